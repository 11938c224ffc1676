"""The arguments of a Mamba-3 scan, checked, in one form for SISO and MIMO."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError


class Mamba3InputError(MegacppError):
    """Arguments of a Mamba-3 scan that do not fit together."""


class Mamba3State(NamedTuple):
    """The state of a sequence between two tokens, in float32 (float64 for float64).

    angle: (B, H, A), radians in [0, 2 pi). ssm: (B, H, P, N). k: the last rotated key, (B, H, N),
    MIMO (B, R, H, N). v: the last value, (B, H, P), before `mimo_v`.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Mamba3Inputs:
    """The arguments of `mamba3_scan` in the dtype of the computation, SISO as MIMO of rank 1.

    q, k: (B, S, R, G, N). v, z: (B, S, H, P). adt, dt, trap: (B, S, H). angles: (B, S, H or 1, A).
    q_bias, k_bias: (R, H, N). mimo_v, mimo_z, mimo_out: (H, R, P), None for SISO. document: (S,)
    integers that change where a document starts, or None. angle_dtype: q and k are rotated by
    angles rounded to it, as mamba-ssm's kernels keep them; None rotates by them as they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    adt: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor
    q_bias: Tensor
    k_bias: Tensor
    D: Tensor | None
    z: Tensor | None
    mimo_v: Tensor | None
    mimo_z: Tensor | None
    mimo_out: Tensor | None
    document: Tensor | None
    output_dtype: torch.dtype
    angle_dtype: torch.dtype | None = None

    @property
    def is_mimo(self) -> bool:
        return self.mimo_v is not None

    def zero_state(self) -> Mamba3State:
        """The state before the first token of a document, k as (B, R, H, N)."""
        batch, _, rank, _, state_dim = self.q.shape
        _, _, heads, head_dim = self.v.shape
        return Mamba3State(
            self.v.new_zeros(batch, heads, self.angles.shape[-1]),
            self.v.new_zeros(batch, heads, head_dim, state_dim),
            self.v.new_zeros(batch, rank, heads, state_dim),
            self.v.new_zeros(batch, heads, head_dim),
        )

    def state_in(self, state: Mamba3State | None) -> Mamba3State:
        """The caller's state, checked, in the dtype of the computation, k as (B, R, H, N)."""
        zeros = self.zero_state()
        if state is None:
            return zeros
        if not self.is_mimo:
            zeros = zeros._replace(k=zeros.k.squeeze(1))
        for name, tensor, zero in zip(state._fields, state, zeros, strict=True):
            check_shape(f"initial_state.{name}", tensor, zero.shape)
        state = Mamba3State(*(tensor.to(self.v.dtype) for tensor in state))
        return state if self.is_mimo else state._replace(k=state.k.unsqueeze(1))

    def state_out(self, state: Mamba3State) -> Mamba3State:
        """The state in the caller's form: for SISO k has no rank."""
        return state if self.is_mimo else state._replace(k=state.k.squeeze(1))


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    mimo_v: Tensor | None = None, mimo_z: Tensor | None = None, mimo_out: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Check the arguments of `mamba3_scan` (documented there).

    Returns whether they are MIMO's, and (S,) the index of each token's document, or None. Raises
    Mamba3InputError naming the argument, what it is and what it should be.
    """
    is_mimo = _check_variant(q, z, mimo_v, mimo_z, mimo_out)
    _check_sizes(q, v, angles)
    batch, seq, *rank, _, state_dim = q.shape
    heads, head_dim = v.shape[2:]
    expected = {
        "k": (k, q.shape),
        "v": (v, (batch, seq, heads, head_dim)),
        "adt": (adt, (batch, seq, heads)),
        "dt": (dt, (batch, seq, heads)),
        "trap": (trap, (batch, seq, heads)),
        "angles": (angles, (batch, seq, angles.shape[2], angles.shape[3])),
        "q_bias": (q_bias, (heads, *rank, state_dim)),
        "k_bias": (k_bias, (heads, *rank, state_dim)),
        "D": (D, (heads,)),
        "z": (z, (batch, seq, heads, head_dim)),
        "mimo_v": (mimo_v, (heads, *rank, head_dim)),
        "mimo_z": (mimo_z, (heads, *rank, head_dim)),
        "mimo_out": (mimo_out, (heads, *rank, head_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None:
            check_shape(name, tensor, shape)
    for name, tensor in (("adt", adt), ("dt", dt)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise Mamba3InputError(
                f"{name} is {tensor.dtype}; the step sizes and decays must be torch.float32 "
                "(or torch.float64): in half precision their sums are wrong"
            )
    return is_mimo, None if cu_seqlens is None else _documents(cu_seqlens, batch, seq)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    mimo_v: Tensor | None = None, mimo_z: Tensor | None = None, mimo_out: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Mamba3Inputs:  # fmt: skip
    """Check the arguments of `mamba3_scan` (documented there) and bring them to one form.

    Raises Mamba3InputError naming the argument, what it is and what it should be.
    """
    is_mimo, document = check_arguments(
        q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z,
        mimo_v=mimo_v, mimo_z=mimo_z, mimo_out=mimo_out, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    compute = torch.float64 if v.dtype == torch.float64 else torch.float32

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(compute)

    if not is_mimo:
        q, k, q_bias, k_bias = (
            q.unsqueeze(2),
            k.unsqueeze(2),
            q_bias.unsqueeze(1),
            k_bias.unsqueeze(1),
        )
    return Mamba3Inputs(
        *map(cast, (q, k, v, adt, dt, trap, angles)),
        *(cast(bias).transpose(0, 1) for bias in (q_bias, k_bias)),
        *map(cast, (D, z, mimo_v, mimo_z, mimo_out)),
        document=document,
        output_dtype=v.dtype,
    )


def _check_variant(q, z, mimo_v, mimo_z, mimo_out) -> bool:
    """True for MIMO. Raises unless q's dimensions and the mimo_* tensors agree."""
    if q.dim() == 4 and mimo_v is mimo_z is mimo_out is None:
        return False
    if q.dim() == 5 and mimo_v is not None and mimo_out is not None:
        if (z is None) != (mimo_z is None):
            raise Mamba3InputError("z and mimo_z go together: give both or neither")
        return True
    given = [
        name
        for name, tensor in (("mimo_v", mimo_v), ("mimo_z", mimo_z), ("mimo_out", mimo_out))
        if tensor is not None
    ]
    raise Mamba3InputError(
        f"q has {q.dim()} dimensions and {', '.join(given) or 'no mimo_* tensor'} is given; SISO "
        "takes q (B, S, G, N) and no mimo_* tensor, MIMO q (B, S, R, G, N), mimo_v and mimo_out"
    )


def _check_sizes(q: Tensor, v: Tensor, angles: Tensor) -> None:
    if v.dim() != 4:
        raise Mamba3InputError(f"v has shape {tuple(v.shape)}, expected (B, S, H, P)")
    if angles.dim() != 4:
        raise Mamba3InputError(
            f"angles has shape {tuple(angles.shape)}, expected (B, S, H or 1, A)"
        )
    groups, state_dim = q.shape[-2:]
    heads, angle_heads, rotated = v.shape[2], angles.shape[2], angles.shape[3]
    if q.shape[1] < 1:
        raise Mamba3InputError("the sequence is empty: S must be at least 1")
    if heads % groups:
        raise Mamba3InputError(f"v has {heads} heads, no multiple of q's {groups} groups")
    if state_dim % 2:
        raise Mamba3InputError(
            f"the state dim N is {state_dim}; RoPE rotates pairs: it must be even"
        )
    if not 1 <= rotated <= state_dim // 2:
        raise Mamba3InputError(
            f"{rotated} angles for a state dim of {state_dim}: 1 to {state_dim // 2} pairs rotate"
        )
    if angle_heads not in (1, heads):
        raise Mamba3InputError(
            f"angles has {angle_heads} heads; it must have {heads} as v does, or 1 shared by all"
        )


def check_shape(name: str, tensor: Tensor, shape) -> None:
    """Raises Mamba3InputError naming the argument, its shape and the one it must have."""
    if tuple(tensor.shape) != tuple(shape):
        raise Mamba3InputError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def _documents(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """(S,) the index of each token's document. The host does not wait for the device."""
    if batch != 1:
        raise Mamba3InputError(
            f"cu_seqlens packs documents into one row, the batch is {batch}: reshape to (1, B * S)"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise Mamba3InputError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "expected integers of shape (documents + 1,)"
        )
    # On a GPU the values are not checked, as reading them would stall its queue.
    if cu_seqlens.device.type == "cpu":
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] > seq or offsets != sorted(offsets):
            raise Mamba3InputError(
                f"cu_seqlens {offsets} must start at 0, never fall, and end at or before S = {seq}"
            )
    positions = torch.arange(seq, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=True)
