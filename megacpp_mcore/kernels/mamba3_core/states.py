"""The state that a row of Mamba-3 begins with and the one that it leaves, where the scan's kernels
see nothing but matrices: one token's worth of work, in plain torch.

The term that a token adds for the token before it, (1 - lam) dt v k^T, is decayed with the state
(`kernels/mamba3/reference.py`): the first token's is added to the matrix that the row begins with,
and the last token's own key and value are left to the row that follows.
"""

import math

import torch
from torch import Tensor

from megacpp_mcore.kernels.mamba3.reference import rotate
from megacpp_mcore.kernels.mamba3_core.around import Sizes, Steps


def shapes(batch: int, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Shapes of the four tensors of a `Mamba3State`."""
    rows, dim, state_dim = (batch, sizes.heads), sizes.head_dim, sizes.state_dim
    return (*rows, sizes.angles), (*rows, dim, state_dim), (*rows, state_dim), (*rows, dim)


def entering(steps: Steps, ssm: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scan's matrix before the row, (b, H, P, N) in float32. ssm (b, H, P, N), k (b, H, N),
    v (b, H, P): of the `Mamba3State` before it."""
    return torch.addcmul(ssm, _ahead(steps)[..., None] * v.unsqueeze(-1), k.unsqueeze(-2))


def entering_backward(
    steps: Steps, gradient: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first token's (1 - lam) dt, (b, H), and of ssm, k and v, from that of
    `entering`'s matrix. The first is summed from what v's is made of."""
    of_v = (gradient @ k.unsqueeze(-1)).squeeze(-1)
    of_k = (v.unsqueeze(-2) @ gradient).squeeze(-2)
    ahead = _ahead(steps)
    return (of_v * v).sum(-1), gradient, ahead * of_k, ahead * of_v


def left(steps: Steps, x: Tensor, k_bias: Tensor, ssm: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the `Mamba3State` after the row, in float32. x: (b, s, H, P). k_bias: (H, N).
    ssm: the scan's matrix after the row."""
    angle = steps.theta[:, -1]
    k = steps.B[:, -1].float()
    k = k.repeat_interleave(k_bias.shape[0] // k.shape[1], 1) + k_bias
    k = rotate(k, angle.cos(), angle.sin(), halves=False)
    return angle.remainder(2 * math.pi), ssm, k, x[:, -1].to(torch.float32, copy=True)


def _ahead(steps: Steps) -> Tensor:
    """(1 - lam) dt of the first token, (b, H, 1)."""
    return steps.dt[:, :, :1] - steps.gamma[:, :, :1]
