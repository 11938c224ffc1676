"""torch.nn.functional.scaled_dot_product_attention, with and without a kernel named.

The named ones never give way to another kernel: where cuDNN or flash attention cannot serve, torch
raises RuntimeError (`No available kernel`), as it does for both in deterministic mode when the
kernel's backward pass adds up in an order of its own.
"""

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """The kernel that torch picks for the device, the dtype and the dims."""
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """cuDNN's kernel, which takes dqk != dv as they are."""
    q, k, v = _readable(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, scale=scale, dropout=dropout)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """FlashAttention-2, which needs dqk == dv: a narrower v is padded with zeros to dqk."""
    dv = v.shape[-1]
    q, k, v = _readable(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = sdpa(q, k, functional.pad(v, (0, q.shape[-1] - dv)), scale=scale, dropout=dropout)
    return y[..., :dv]


def _readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies where the fused kernels cannot read: groups of queries, elements that stand apart."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
