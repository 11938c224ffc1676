"""Mamba-3 MIMO on the TileLang kernels of mamba-ssm, with the interface of `mamba3_scan`.

Upstream requires q, k, v, z and trap in bfloat16, angles and their sums in float32, and tiles of 64
rows (tokens x rank). Its backward pass requires groups of one head or of all heads, and, without
documents, whole chunks.

Its launchers check every stride, even those of axes of length 1, whose strides are arbitrary: with
one token, one head or group on a rank, or a micro batch of one, a tensor or gradient can be
`is_contiguous()` and still be refused (`strides[2] expected 1, but got 4`). `_with_new_strides`
avoids that.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from megacpp_mcore.kernels.documents import bounds_to_end
from megacpp_mcore.kernels.mamba3 import mamba3_scan as reference_scan
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3.mamba_ssm import check_bfloat16

_ROWS = 64  # rows of a tile: tokens of a chunk times the rank
_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
_BACKWARD = ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd")
_KERNELS = {
    "mamba3_mimo_fwd": ("mamba_mimo_fwd",),
    "mamba3_mimo_fwd_varlen": ("mamba_mimo_fwd",),
    "mamba3_mimo_bwd": _BACKWARD,
    "mamba3_mimo_bwd_varlen": _BACKWARD,
}


def mamba3_scan(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    mimo_v: Tensor | None = None, mimo_z: Tensor | None = None, mimo_out: Tensor | None = None,
    chunk_size: int = _ROWS, cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None, return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:  # fmt: skip
    """`megacpp_mcore.kernels.mamba3.mamba3_scan`, MIMO with skip and gate, in bfloat16; shapes are
    described there. The kernels' own chunk is 64 / R tokens; `chunk_size` is only used by the
    reference, and dispatch does not choose this backend for a `chunk_size` other than 64.

    With a state, which is inference, the reference runs.

    Raises Mamba3InputError for a v that is not bfloat16, an empty sequence, and a call without the
    skip, the gate, or the projections of MIMO.
    """
    if initial_state is not None or return_final_state:
        return reference_scan(
            q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z, mimo_v=mimo_v, mimo_z=mimo_z,
            mimo_out=mimo_out, chunk_size=chunk_size, cu_seqlens=cu_seqlens,
            initial_state=initial_state, return_final_state=return_final_state,
        )  # fmt: skip
    check_bfloat16(v)
    if any(x is None for x in (D, z, mimo_v, mimo_z, mimo_out)):
        raise Mamba3InputError(
            "mamba-ssm's MIMO kernels take D, z, mimo_v, mimo_z and mimo_out, and one of them is "
            "None: use the reference"
        )
    heads, groups, rank = v.shape[2], q.shape[3], q.shape[2]
    if 1 < groups < heads:
        q, k = (x.repeat_interleave(heads // groups, dim=3) for x in (q, k))
    q, k, trap, z = (x.to(torch.bfloat16) for x in (q, k, trap, z))
    angles = angles.float().expand(-1, -1, heads, -1)
    bounds = None if cu_seqlens is None else bounds_to_end(cu_seqlens, v.shape[1]).to(torch.int32)
    tokens = (q, k, v, adt, dt, trap, angles, z)
    if bounds is None and v.shape[1] % (_ROWS // rank):
        bounds, tokens = _as_documents(*tokens)
    q, k, value, adt, dt, trap, angles, z = tokens
    y = _launch(
        q, k, value, *(x.transpose(1, 2) for x in (adt, dt, trap)), q_bias, k_bias, mimo_v, mimo_z,
        mimo_out, angles, D, z, _ROWS // rank, bounds,
    )  # fmt: skip
    return y.view(v.shape)


def _as_documents(*tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The rows (B, S, ...) as documents of one row (1, B * S, ...), and their offsets."""
    batch, seq = tokens[0].shape[:2]
    bounds = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=tokens[0].device)
    return bounds, [x.flatten(0, 1).unsqueeze(0) for x in tokens]


@torch.compiler.disable  # torch.compile cannot trace a TileLang launch
def _launch(*inputs) -> Tensor:
    from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo

    _cache_kernels()
    *tensors, chunk_size, bounds = inputs
    state_dim, angles = tensors[0].shape[-1], tensors[11].shape[-1]
    y = mamba3_mimo(
        *map(_with_new_strides, tensors),
        chunk_size,
        state_dim // angles,
        torch.bfloat16,
        cu_seqlens=bounds,
    )
    return _with_new_strides(y)


def _with_new_strides(x: Tensor) -> Tensor:
    """x with the strides of a new contiguous tensor, and so its gradient."""
    return x.flatten().view(x.shape)


@functools.cache
def _cache_kernels() -> None:
    """Let upstream's launchers look up each kernel in TileLang once, not in every call.

    They pass new symbols for the dynamic sizes each time, so TileLang traces the kernel again
    before it finds it in its cache: 0.2 s forward and 1 s backward of host time.
    """
    for module, names in _KERNELS.items():
        upstream = importlib.import_module(f"{_PACKAGE}.{module}")
        for name in names:
            setattr(upstream, name, _cached(getattr(upstream, name)))


def _cached(make: Callable) -> Callable:
    """`make`, with its kernels cached by the text of the arguments."""
    kernels = {}

    def kernel(*sizes, **settings):
        key = (*map(str, sizes), *(f"{name}={settings[name]}" for name in sorted(settings)))
        if key not in kernels:
            kernels[key] = make(*sizes, **settings)
        return kernels[key]

    return kernel
