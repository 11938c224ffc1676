"""An M block between its projections in plain torch: `prep` and `mamba3_scan`, SISO."""

from collections.abc import Sequence

from torch import Tensor

from megacpp_mcore.kernels.mamba3 import mamba3_scan
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3_core.prep import mamba3_prep


def mamba3_core(
    projected: Tensor,
    dt_bias: Tensor,
    B_weight: Tensor,
    C_weight: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    angles: int,
    decay: str,
    decay_floor: float,
    eps: float,
    cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    """The output of a SISO Mamba-3 block from what its input projection gives; differentiable.

    S tokens of a batch of b, H heads of head_dim P, G groups of state_dim N, A angles.

    projected: (S, b, rows), columns [z (H P), x (H P), B (G N), C (G N), dt (H), A (H), trap (H),
    angle (A)]; more are padding, whose gradient is zero. dt_bias, D: (H,). B_weight, C_weight:
    (N,), of the norms of B and C. B_bias, C_bias: (H, N). decay, decay_floor: of `Mamba3Settings`.
    eps: of the norms. cu_seqlens: (documents + 1,) integers, as in `mamba3_scan`, b = 1.
    initial_state, return_final_state: the state before the row (None: zero), and whether the one
    after it is returned, a `Mamba3State` as of `mamba3_scan`, which is what inference keeps; not
    with cu_seqlens. Both are differentiable, so that a row is its pieces one after another.

    Returns (S, b, H P) in projected's dtype, computed in float32 or wider, and with
    return_final_state also the state. Raises Mamba3InputError for tensors that do not fit together,
    and for states together with cu_seqlens. Math: `kernels/mamba3/reference.py`.
    """
    inner, group = heads * head_dim, groups * state_dim
    parts = (inner, inner, group, group, heads, heads, heads, angles)
    check_inputs(projected, parts, cu_seqlens)
    padding = projected.shape[-1] - sum(parts)
    columns = projected.transpose(0, 1).split([*parts, padding], dim=-1)
    z, x, B, C, dt, A, trap, angle, _ = columns
    found = mamba3_prep(
        B, C, dt, A, dt_bias, B_weight, C_weight, variant="siso", rank=1, decay=decay,
        decay_floor=decay_floor, eps=eps,
    )  # fmt: skip
    x, z = (t.unflatten(-1, (heads, head_dim)) for t in (x, z))
    y = mamba3_scan(
        found.q, found.k, x, found.adt, found.dt, trap, angle.unsqueeze(2), C_bias, B_bias, D, z,
        cu_seqlens=cu_seqlens, initial_state=initial_state, return_final_state=return_final_state,
    )  # fmt: skip
    if return_final_state:
        return y[0].transpose(0, 1).flatten(2), y[1]
    return y.transpose(0, 1).flatten(2)


def check_inputs(projected: Tensor, parts: Sequence[int], cu_seqlens: Tensor | None) -> None:
    """Raises Mamba3InputError unless the projection has the parts' columns."""
    if projected.dim() != 3 or projected.shape[-1] < sum(parts):
        raise Mamba3InputError(
            f"the projection has shape {tuple(projected.shape)}, expected (S, b, rows) with at "
            f"least {sum(parts)} rows"
        )
    if cu_seqlens is not None and projected.shape[1] != 1:
        raise Mamba3InputError(
            f"cu_seqlens packs documents into one row, the batch is {projected.shape[1]}"
        )
