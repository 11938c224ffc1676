"""The scan's arguments from columns of an M block's projection, in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScanInputs(NamedTuple):
    """Arguments of `megacpp_mcore.kernels.mamba3.mamba3_scan`, by its names."""

    q: Tensor
    k: Tensor
    adt: Tensor
    dt: Tensor


def mamba3_prep(
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    B_weight: Tensor,
    C_weight: Tensor,
    head_groups: Tensor | None = None,
    *,
    variant: str,
    rank: int,
    decay: str,
    decay_floor: float,
    eps: float,
) -> ScanInputs:
    """Norms of B and C, step sizes and decays; differentiable in every floating tensor.

    S tokens of a batch of b, H heads, G groups of state dim N and rank R (1 for SISO).

    B, C: (b, S, G * R * N). dt, A: (b, S, H), logits. dt_bias: (H,). B_weight, C_weight: (N,).
    head_groups: (H,) integers, each head's group; q and k then have H groups, one a head.
    variant, decay, decay_floor: of `Mamba3Settings`. eps: of the norms.

    Returns q, k (b, S, G, N), MIMO (b, S, R, G, N), and adt, dt (b, S, H); float32 or wider.
    """
    groups = {"head_groups": head_groups, "variant": variant, "rank": rank, "eps": eps}
    step = F.softplus(_wide(dt) + dt_bias)
    return ScanInputs(
        q=_normed(C, C_weight, **groups),
        k=_normed(B, B_weight, **groups),
        adt=_decay(_wide(A), decay, decay_floor) * step,
        dt=step,
    )


def _normed(
    x: Tensor, weight: Tensor, *, head_groups: Tensor | None, variant: str, rank: int, eps: float
) -> Tensor:
    x = x.unflatten(-1, (-1, rank, weight.shape[0]))
    x = F.rms_norm(_wide(x), weight.shape, _wide(weight), eps)
    if head_groups is not None:
        x = x.index_select(2, head_groups)
    return x.transpose(2, 3) if variant == "mimo" else x.squeeze(3)


def _decay(x: Tensor, decay: str, floor: float) -> Tensor:
    """A < 0 from its logits, at most -floor."""
    if decay == "softplus":
        return -F.softplus(x).clamp(min=floor)
    # 1 + x for x >= 0, 1 / (1 - x) below
    return -(x.clamp(min=0) + 1 / (1 - x.clamp(max=0))).clamp(min=floor)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
