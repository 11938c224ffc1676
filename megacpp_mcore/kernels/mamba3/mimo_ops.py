"""A Mamba-3 MIMO scan with its skip, gate and projections as two torch operators.

The math is in `mimo_kernels.py`. B batch, S tokens, H heads, R rank, N state dim, P head dim; rows
are S R, those of one token together.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.mamba3 import mimo_backward_kernels as backward_kernels
from megacpp_mcore.kernels.mamba3 import mimo_kernels as kernels
from megacpp_mcore.kernels.mamba3_core.scan import CHUNK, Segments
from megacpp_mcore.kernels.strides import align, readable

# Warps and stages of each kernel: those of SISO's, but one stage where values are made of two
# tensors; not measured on a GPU yet.
CONFIGS = {"states": (4, 1), "forward": (4, 1), "backward": (4, 1)}
_TOKENS = 64  # of a program before and after the backward pass of the scan


class Inputs(NamedTuple):
    """q, k: (B, H, S R, N), rotated. x, z: (B, S, H, P). adt, scale, gamma: (B, H, S) in float32.
    D (H,), mimo_v, mimo_z, mimo_out (H, R, P): float32. starts: (S R,) int32, the first row of each
    row's document (B = 1), or None. initial: (B, H, P, N) float32, or None for zero."""

    q: Tensor
    k: Tensor
    x: Tensor
    z: Tensor
    adt: Tensor
    scale: Tensor
    gamma: Tensor
    D: Tensor
    mimo_v: Tensor
    mimo_z: Tensor
    mimo_out: Tensor
    starts: Tensor | None
    initial: Tensor | None

    def readable(self) -> "Inputs":
        """The inputs as the kernels read them: x and z where they lie."""
        own = {"x": readable(self.x), "z": readable(self.z)}
        others = {n: t.contiguous() for n, t in self._asdict().items()
                  if t is not None and n not in own}  # fmt: skip
        return self._replace(**own, **others)

    def sizes(self, kernel: str, *tokens: Tensor) -> dict[str, Any]:
        """What every kernel gets; tokens: what it reads in strides of its own."""
        _, seq, heads, dim = self.x.shape
        rows, state_dim = self.q.shape[2:]
        warps, stages = CONFIGS[kernel]
        return {
            "H": heads, "P": dim, "N": state_dim, "P_BLOCK": max(16, triton.next_power_of_2(dim)),
            "N_BLOCK": max(16, triton.next_power_of_2(state_dim)), "CHUNK": CHUNK,
            "RANK": rows // seq, "ALIGN": align(*tokens), "PACKED": self.starts is not None,
            "WHOLE": rows % CHUNK == 0, "APPROXIMATE": self.x.is_cuda, "STAGES": stages,
            "num_warps": warps,
        }  # fmt: skip


@torch.library.custom_op("megacpp::mamba3_mimo", mutates_args=())
def mimo_scan(
    q: Tensor, k: Tensor, x: Tensor, z: Tensor, adt: Tensor, scale: Tensor, gamma: Tensor,
    D: Tensor, mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor, starts: Tensor | None,
    initial: Tensor | None, save: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    """y (B, S, H, P), followed, with `final`, by the state (B, H, P, N) after the row, and, with
    `save`, by the sum over the state before skip's gate (B, H, S R, P) and the states before each
    chunk. Tensors: `Inputs`."""
    given = Inputs(
        q, k, x, z, adt, scale, gamma, D, mimo_v, mimo_z, mimo_out, starts, initial
    ).readable()
    y, *others = _outputs(given, save, final)
    after, (inner, states) = others[0] if final else None, others[-2:] if save else (None, None)
    batch, _, heads, _ = x.shape
    segments = Segments.of(q.shape[2], batch * heads)
    shared = given.sizes("forward", given.x, given.z)
    with device_of(x):
        sums, throughs = _segment_states(given, given.k, given.x, segments, reverse=False)
        kernels.mimo_forward[(heads, segments.count, batch)](
            *given[:11], given.starts, sums, throughs, given.initial, y, inner, states, after,
            q.shape[2], *segments, *_strides(shared["ALIGN"], given.x, given.z), SAVE=save,
            CARRIED=initial is not None, FINAL=final, **shared,
        )  # fmt: skip
    return [y, *others]


def _outputs(given: Inputs, save: bool, final: bool) -> list[Tensor]:
    batch, _, heads, dim = given.x.shape
    rows, state_dim = given.q.shape[2:]
    found = [given.x.new_empty(given.x.shape)]
    if final:
        found.append(given.adt.new_empty((batch, heads, dim, state_dim)))
    if save:
        chunks = triton.cdiv(rows, CHUNK)
        found.append(given.x.new_empty((batch, heads, rows, dim)))
        found.append(given.x.new_empty((batch, heads, chunks, dim, state_dim)))
    return found


@mimo_scan.register_fake
def _(*given):
    *tensors, save, final = given
    return _outputs(Inputs(*tensors), save, final)


@torch.library.custom_op("megacpp::mamba3_mimo_backward", mutates_args=())
def _backward(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, x: Tensor, z: Tensor, adt: Tensor,
    scale: Tensor, gamma: Tensor, D: Tensor, mimo_v: Tensor, mimo_z: Tensor, mimo_out: Tensor,
    starts: Tensor | None, initial: Tensor | None, final: Tensor | None, inner: Tensor,
    states: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `Inputs` up to mimo_out, and of initial if it is given. final, dfinal: the
    state after the row and its gradient, or None."""
    given = Inputs(
        q, k, x, z, adt, scale, gamma, D, mimo_v, mimo_z, mimo_out, starts, initial
    ).readable()
    (batch, seq, heads, _), rank = given.x.shape, mimo_v.shape[1]
    segments = Segments.of(q.shape[2], batch * heads)
    dq, dk = torch.empty_like(given.q), torch.empty_like(given.k)
    dadt, dscale, dgamma = adt.new_empty((3, *q.shape[:3]))
    dD = D.new_empty((batch * segments.count, heads))
    dinitial = None if initial is None else torch.empty_like(given.initial)
    last, dlast = (None, None) if dfinal is None else (final, dfinal.contiguous())
    shared = given.sizes("backward", given.x)
    with device_of(x):
        d, dz, dmimo_z, dmimo_out = _gate_backward(given, dy, inner)
        sums, throughs = _segment_states(given, given.q, d, segments, reverse=True)
        backward_kernels.mimo_backward[(heads, segments.count, batch)](
            *given[:3], d, *given[4:9], given.starts, states, sums, throughs, last, dlast, dq, dk,
            dadt, dscale, dgamma, dD, dinitial, q.shape[2], *segments,
            *_strides(shared["ALIGN"], given.x), CARRIED=initial is not None,
            FINAL=dfinal is not None, **shared,
        )  # fmt: skip
        dx, dmimo_v = _values_backward(given, d)
    dadt = dadt.unflatten(2, (seq, rank))[..., 0].contiguous()
    dscale, dgamma = (t.unflatten(2, (seq, rank)).sum(-1) for t in (dscale, dgamma))
    found = [dq, dk, dx, dz, dadt, dscale, dgamma, dD.sum(0), dmimo_v, dmimo_z, dmimo_out]
    return found if dinitial is None else [*found, dinitial]


@_backward.register_fake
def _(dy, dfinal, *given):
    inputs = (*given[:11], *(() if given[12] is None else (given[12],)))
    return [x.new_empty(x.shape) for x in inputs]


def _gate_backward(given: Inputs, dy: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
    """The gradients of what the gate multiplies, like inner, and of z, mimo_z and mimo_out."""
    dy, d, dz = readable(dy), torch.empty_like(inner), given.z.new_empty(given.z.shape)
    grid, shared = _of_tokens(given, given.z, dy)
    batch, blocks = grid[2], grid[0]
    sums = given.D.new_empty((batch * blocks, 2, *given.mimo_z.shape))
    backward_kernels.mimo_gate_backward[grid](
        given.z, dy, inner, given.mimo_z, given.mimo_out, d, dz, sums, dy.shape[1], blocks,
        *_strides(shared["ALIGN"], given.z, dy), **shared,
    )  # fmt: skip
    return d, dz, sums[:, 0].sum(0), sums[:, 1].sum(0)


def _values_backward(given: Inputs, dvalues: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and mimo_v from that of the values, (B, H, S R, P)."""
    dx, (grid, shared) = given.x.new_empty(given.x.shape), _of_tokens(given, given.x)
    batch, blocks = grid[2], grid[0]
    sums = given.D.new_empty((batch * blocks, *given.mimo_v.shape))
    backward_kernels.mimo_values_backward[grid](
        given.x, dvalues, given.mimo_v, dx, sums, dx.shape[1], blocks,
        *_strides(shared["ALIGN"], given.x), **shared,
    )  # fmt: skip
    return dx, sums.sum(0)


def _of_tokens(given: Inputs, *tokens: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid and sizes of a kernel that takes tokens one by one."""
    batch, seq, heads, dim = given.x.shape
    return (triton.cdiv(seq, _TOKENS), heads, batch), {
        "H": heads, "P": dim, "P_BLOCK": triton.next_power_of_2(dim), "BLOCK": _TOKENS,
        "RANK": given.mimo_v.shape[1], "ALIGN": align(*tokens), "num_warps": 8,
    }  # fmt: skip


def _segment_states(
    given: Inputs, rows: Tensor, values: Tensor, segments: Segments, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The segments' states, as SISO's (`mamba3_core/scan.py`). values: x, or with reverse (B, H, S
    R, P)."""
    batch, _, heads, dim = given.x.shape
    sums = given.adt.new_empty((batch, heads, segments.count, dim, rows.shape[-1]))
    throughs = given.adt.new_empty((batch, heads, segments.count))
    shared = given.sizes("states", given.x)
    if segments.count > 1:
        kernels.mimo_states[(heads, segments.count - 1, batch)](
            rows, values, given.mimo_v, given.adt, given.scale, given.starts, sums, throughs,
            rows.shape[2], *segments, *_strides(shared["ALIGN"], given.x), REVERSE=reverse,
            **shared,
        )  # fmt: skip
    return sums, throughs


def _strides(align: int, *tensors: Tensor) -> tuple[int, ...]:
    """Strides of the token, the sequence and the head."""
    return tuple(x.stride(dim) // align for x in tensors for dim in (1, 0, 2))


def _save(ctx, inputs, output) -> None:
    tensors, ctx.final, ctx.carried = inputs[:13], inputs[-1], inputs[12] is not None
    first = 2 if ctx.final else 1
    ctx.mark_non_differentiable(*output[first:])
    ctx.set_materialize_grads(False)  # the saved outputs need no gradients
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, dys):
    tensors, kept = ctx.saved_tensors[:13], ctx.saved_tensors[13:]
    final, dfinal = (kept[0], dys[1]) if ctx.final else (None, None)
    dy = torch.zeros_like(tensors[2]) if dys[0] is None else dys[0]
    found = _backward(dy, dfinal, *tensors, final, *kept[-2:])
    return *found[:11], None, found[11] if ctx.carried else None, None, None


mimo_scan.register_autograd(_gradients, setup_context=_save)
