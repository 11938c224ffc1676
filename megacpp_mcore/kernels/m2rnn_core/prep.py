"""The operations before and after the recurrence of an R block, in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def conv_and_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    weight: Tensor,
    bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    history: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu of a depthwise causal convolution of q, k and v, and the forget gate f.

    q, k, v: (s, b, channels of each), c channels in all. decay: (s, b, H), logits. weight: (c, 1,
    kernel). bias: (c,). A_log, dt_bias: (H,). history: (kernel - 1, b, c), the tokens before; None
    is zeros. offset: (s, 1, 1) integers, each token's position in its document; None is one
    document.

    Returns (s, b, c) in q's dtype, computed in float32 or wider, and exp(-exp(A_log) softplus(decay
    + dt_bias)), (b, s, H) in dt_bias's dtype.
    """
    x = torch.cat((q, k, v), dim=-1)
    if history is None:
        history = x.new_zeros(weight.shape[-1] - 1, *x.shape[1:])
    mixed = _causal_conv_silu(torch.cat((history.to(x.dtype), x)), weight, bias, offset)
    step = softplus(decay.to(dt_bias.dtype) + dt_bias)
    return mixed, torch.exp(-A_log.exp() * step).transpose(0, 1)


def _causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None) -> Tensor:
    """x: (kernel - 1 + s, b, c), history first. Returns (s, b, c) in x's dtype."""
    kernel = weight.shape[-1]
    # Widened once, so that the gradients of all taps are summed before they are rounded.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = x.shape[0] - kernel + 1
    out = bias.to(wide.dtype)
    for start, tap in enumerate(weight.squeeze(1).to(wide.dtype).unbind(-1)):
        term = wide[start : start + length] * tap
        if offset is not None:
            term = term * (offset >= kernel - 1 - start)
        out = out + term
    return silu(out).to(x.dtype)


def gated_norm(
    y: Tensor,
    v: Tensor,
    gate: Tensor,
    D: Tensor,
    weight: Tensor,
    *,
    channels: int,
    eps: float,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """RMSNorm((y + D v) silu(gate)) over the channels of all ranks.

    y, v: (b, s, heads, V). gate: (s, b, heads * V). D, weight: (heads * V,). channels: their
    number on all ranks. over_ranks: sums a tensor over the ranks; None where one has all channels.

    Returns (s, b, heads * V) in gate's dtype, computed in D's.
    """
    y, v = (x.flatten(2).transpose(0, 1).to(D.dtype) for x in (y, v))
    x = (y + D * v) * silu(gate.to(D.dtype))
    squares = x.square().sum(-1, keepdim=True)
    squares = squares if over_ranks is None else over_ranks(squares)
    x = x * torch.rsqrt(squares / channels + eps)
    return (x * weight.to(x.dtype)).to(gate.dtype)
