"""mamba-ssm's Mamba-3 SISO launchers as two torch operators, which torch.compile sees as one node.

Upstream's autograd.Function launches Triton kernels from Python, which breaks torch.compile's
graph. Its kernels autotune over 200 configurations on their first call, minutes on an H200;
`mamba_ssm_configs` has few or one for each.

Shapes: q, k (B, S, G, N), v, z (B, S, H, P), angles (B, S, H, A) in bfloat16; adt, dt (B, S, H) in
float32; trap (B, S, H) in bfloat16; q_bias, k_bias (H, N) and D (H) in float32; bounds (documents
+ 1) int32, which end at S.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.mamba3.mamba_ssm_configs import KERNELS, configurations

_PACKAGE = "mamba_ssm.ops.triton.mamba3"
_GRADIENTS = 11  # q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z


@torch.library.custom_op("megacpp::mamba3_siso", mutates_args=(), device_types="cuda")
def mamba3_siso(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, q_bias: Tensor,
    k_bias: Tensor, angles: Tensor, D: Tensor | None, z: Tensor | None, bounds: Tensor | None,
    chunk_size: int, save: bool,
) -> list[Tensor]:  # fmt: skip
    """y (B, S, H, P), followed, when `save` is set, by what the backward pass reads."""
    from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_fwd
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd import mamba3_siso_fwd

    set_up(q.shape[-1], v.shape[-1], chunk_size)
    adt, dt, trap = (x.transpose(1, 2) for x in (adt, dt, trap))
    sums = angle_dt_fwd(angles, dt, chunk_size=chunk_size, cu_seqlens=bounds)
    y, *inner, _ = mamba3_siso_fwd(
        q, k, v, adt, dt, trap, q_bias, k_bias, sums, D, z, chunk_size=chunk_size,
        store_states_adt_outv=save, cu_seqlens=bounds,
    )  # fmt: skip
    return [y, sums, *inner] if save else [y]


@mamba3_siso.register_fake
def _(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, bounds, chunk_size, save):
    y = v.new_empty(v.shape)
    if not save:
        return [y]
    batch, seq, heads, head_dim = v.shape
    state_dim = q.shape[-1]
    chunks = -(-seq // chunk_size)
    if bounds is not None:
        chunks = bounds.shape[0] - 1 + seq // chunk_size
    wide = functools.partial(v.new_empty, dtype=torch.float32)
    rows = (batch, heads, seq)
    return [
        y,
        torch.empty_like(angles),
        v.new_empty(v.shape),
        v.new_empty(batch, heads, head_dim, chunks * state_dim),
        wide(rows),
        wide(batch, heads, chunks),
        *(x.new_empty(batch, seq, heads, state_dim) for x in (q, k)),
        *(wide(rows) for _ in range(3)),
    ]


@torch.library.custom_op("megacpp::mamba3_siso_backward", mutates_args=(), device_types="cuda")
def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor,
    q_bias: Tensor, k_bias: Tensor, angles: Tensor, D: Tensor | None, z: Tensor | None,
    bounds: Tensor | None, saved: list[Tensor], chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k, v, adt, dt, trap, q_bias, k_bias, angles, and of D and z if given."""
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd as launch
    from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_bwd

    set_up(q.shape[-1], v.shape[-1], chunk_size)
    dt, trap = dt.transpose(1, 2), trap.transpose(1, 2)
    sums, y_before_z, states, decay, chunk_decay, q_rotated, k_rotated, qk, scale, gamma = saved
    dy, dz = dy.contiguous(), None
    if z is not None:
        dz, dy = launch.compute_dzdo(dy, z, y_before_z, chunk_size=chunk_size)
    dq, dk, dv, dadt, dqk, dD, _ = launch.compute_dqkv(
        q_rotated, k_rotated, v, decay, chunk_decay, qk, states, dy, D=D, chunk_size=chunk_size,
        Cu_Seqlens=bounds,
    )  # fmt: skip
    dq, dk, dq_bias, dk_bias, dsums, dscale, dgamma = launch.compute_dqktheta(
        q, k, scale, gamma, q_bias, k_bias, sums, dq, dk, dqk, chunk_size=chunk_size,
        Cu_Seqlens=bounds,
    )  # fmt: skip
    ddt, dtrap, *_ = launch.compute_ddt_dtrap_dinput_states(
        dscale, dgamma, dt, trap.float(), Cu_Seqlens=bounds
    )
    dangles, ddt_of_angles, _ = angle_dt_bwd(
        dsums, angles, dt, chunk_size=chunk_size, cu_seqlens=bounds
    )
    found = (dq, dk, dv, dadt.transpose(1, 2), (ddt + ddt_of_angles).transpose(1, 2),
             dtrap.transpose(1, 2), dq_bias, dk_bias, dangles, dD, dz)  # fmt: skip
    given = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z)
    return [
        gradient.to(x.dtype).contiguous()
        for gradient, x in zip(found, given, strict=True)
        if x is not None
    ]


@_backward.register_fake
def _(dy, q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, bounds, saved, chunk_size):
    given = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z)
    return [x.new_empty(x.shape) for x in given if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_size, _ = inputs
    ctx.given = [x is not None for x in tensors]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the saved outputs need no gradients
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, dys):
    kept = ctx.saved_tensors
    tensors, saved = kept[:12], list(kept[12:])
    gradients = iter(_backward(dys[0], *tensors, saved, ctx.chunk_size))
    found = [next(gradients) if given else None for given in ctx.given[:_GRADIENTS]]
    return *found, None, None, None


mamba3_siso.register_autograd(_gradients, setup_context=_save)


def set_up(state_dim: int, head_dim: int, chunk_size: int) -> None:
    """Set up Triton as upstream's kernels need it, in this thread (autograd has its own)."""
    import triton

    triton.set_allocator(_allocate)
    _pin(state_dim, head_dim, chunk_size)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for tensor descriptors on the current device, which a kernel is launched on.

    Triton keeps the function in every thread that set it: it must not hold on to a tensor.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _pin(state_dim: int, head_dim: int, chunk_size: int) -> None:
    """Give the kernels the configurations for this GPU and these sizes."""
    sizes = (torch.cuda.get_device_capability(), state_dim, head_dim, chunk_size)
    for tuner, configs in _configured(sizes):
        tuner.configs = configs


def unpin() -> None:
    """Give the kernels upstream's own candidates again, until the next call of ours."""
    for tuner, candidates in _tuners().values():
        tuner.configs = candidates


@functools.cache
def _configured(sizes: tuple[tuple[int, int], int, int, int]) -> tuple[tuple[Any, Any], ...]:
    """Upstream's autotuners, and what each chooses among."""
    import triton

    found = []
    for kernel, (tuner, candidates) in _tuners().items():
        given = configurations(kernel, *sizes)
        chosen = candidates if given is None else [triton.Config(**config) for config in given]
        found.append((tuner, chosen))
    return tuple(found)


@functools.cache
def _tuners() -> dict[str, tuple[Any, Any]]:
    """Kernel -> upstream's autotuner and its own candidates."""
    found = {}
    for kernel in KERNELS:
        module, name = kernel.split(":")
        tuner = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        found[kernel] = (tuner, tuner.configs)
    return found
