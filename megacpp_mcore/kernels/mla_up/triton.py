"""MLA's up-projections and RoPE in Triton: q, k and v are written once and nothing before them.

By themselves the up-projections write q and kv, and RoPE reads and writes all of it again, both
ways; with latents of few dims that traffic is all there is to it. Here one kernel multiplies,
rotates in float32 and rounds once. The backward pass reads the gradients of q, k and v twice, for
the latents and for the weights, and writes none of their size. Of the activations the latents
alone are saved for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.documents import positions
from megacpp_mcore.kernels.main_grad import handed_on, takes_gradients
from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable
from megacpp_mcore.kernels.mla_up import triton_kernels, weight_kernels
from megacpp_mcore.kernels.mla_up.inputs import MLAUpInputError, Sizes, check_inputs
from megacpp_mcore.kernels.strides import readable
from megacpp_mcore.surfaces.mla_up import MOST

DTYPES = ("bfloat16", "float32")
_TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
# kernel -> (tokens of a tile, warps, stages), in bf16. Not tuned: no GPU has run them yet;
# `tests/kernels/compile_for_hopper.py` says what they take of one.
_TILES = {
    triton_kernels.forward: (128, 8, 2),
    triton_kernels.latents_backward: (128, 8, 2),
    weight_kernels.q_weight_backward: (64, 4, 3),
    weight_kernels.kv_weight_backward: (64, 4, 3),
}
_OF_FLOAT32 = (32, 4, 1)  # the same for every kernel in float32, which tests use
_HEADS_EACH = 8  # of a program of the forward kernel
_PROGRAMS = 512  # of a kernel of the weights' gradients, about: some four for each of 132 SMs
_SUM_BLOCK = 1024


def mla_up(
    q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, q_weight: Tensor, kv_weight: Tensor,
    rotary: RotaryTable, *, qk_head_dim: int, cu_seqlens: Tensor | None = None,
    interleaved: bool = True, into_main_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `megacpp_mcore.kernels.mla_up.mla_up`, for the dtypes of DTYPES, all pos dims rotated, and
    dims and ranks of 64 at most.

    into_main_grad: where both weights have a main_grad, the gradients are added to it in float32
    before they are rounded. Raises MLAUpInputError for what these kernels do not take.
    """
    weights = q_weight, kv_weight
    sizes = check_inputs(
        q_latent, kv_latent, k_pos, *weights, rotary, qk_head_dim, cu_seqlens
    )  # fmt: skip
    if q_latent.dtype not in _TORCH_DTYPES:
        raise MLAUpInputError(
            f"q_latent is {q_latent.dtype}; the kernels of mla_up take {', '.join(DTYPES)}; cast "
            "the arguments, or use the reference"
        )
    if 2 * rotary.cos.shape[1] != sizes.pos:
        raise MLAUpInputError(
            f"the table turns {2 * rotary.cos.shape[1]} of {sizes.pos} dims; the kernels of mla_up "
            "turn all of them; use the reference"
        )
    if max(sizes[1:]) > MOST:
        raise MLAUpInputError(
            f"a head's dims and the ranks are {tuple(sizes[1:])}; the kernels of mla_up take "
            f"{MOST} at most of each; use the reference"
        )
    packed = cu_seqlens is not None
    latents = q_latent, kv_latent, k_pos
    if packed:
        latents = tuple(x.unsqueeze(1) for x in latents)
    cos, sin = (table.float().contiguous() for table in rotary)
    places = None
    if cu_seqlens is not None:
        places = positions(q_latent.shape[0], cu_seqlens.to(q_latent.device))
    operator = _forward
    if into_main_grad and all(map(takes_gradients, weights)) and not torch.compiler.is_compiling():
        operator = _IntoMainGrad.apply
    outputs = operator(*latents, *weights, cos, sin, places, qk_head_dim, interleaved)
    q, k, v = (x.squeeze(1) for x in outputs) if packed else outputs
    return q, k, v


class _Problem(NamedTuple):
    """sizes: of `mla_up`. tokens: s * b of them. The rest as its arguments."""

    sizes: Sizes
    tokens: int
    batch: int
    interleaved: bool

    @classmethod
    def of(cls, q_latent, kv_latent, weights, pos: int, plain: int, interleaved: bool):
        heads = weights[0].shape[0] // (plain + pos)
        v = weights[1].shape[0] // heads - plain
        sizes = Sizes(heads, plain, pos, v, q_latent.shape[-1], kv_latent.shape[-1])
        seq, batch, _ = q_latent.shape
        return cls(sizes, seq * batch, batch, interleaved)

    def constants(self, *names: str) -> dict[str, int]:
        """Those of `names` with their blocks. Tensor cores take no fewer than 16."""
        size = self.sizes
        of = {"PLAIN": size.plain, "PAIRS": size.pos // 2, "V_DIM": size.v,
              "Q_RANK": size.q_rank, "KV_RANK": size.kv_rank}  # fmt: skip
        blocks = {f"{n.split('_')[0].removesuffix('S')}_BLOCK": _block(of[n]) for n in names}
        pairs = {"INTERLEAVED": self.interleaved} if "PAIRS" in names else {}
        return {name: of[name] for name in names} | blocks | pairs

    def tile(self, kernel: Any, like: Tensor) -> tuple[int, dict[str, int]]:
        """Tokens of a tile of a kernel, and the options of its launch, for a tensor of it."""
        exact = like.dtype == torch.float32
        block, warps, stages = _OF_FLOAT32 if exact else _TILES[kernel]
        options = {"TOKEN_BLOCK": block, "STAGES": stages, "num_warps": warps}
        return block, options | {"WIDEN": not like.is_cuda}


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _angles(cos: Tensor, sin: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """A row of cos and sin for each of the tokens s. The kernels do not look positions up, as a
    load that waits for another is not begun ahead; rows of packed documents are gathered in each
    pass, which takes microseconds, rather than kept."""
    return (cos, sin) if places is None else (cos[places], sin[places])


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:-1]]


@torch.library.custom_op("megacpp::mla_up", mutates_args=())
def _forward(
    q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, q_weight: Tensor, kv_weight: Tensor,
    cos: Tensor, sin: Tensor, places: Tensor | None, qk_head_dim: int, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v, (s, b, heads, ...)."""
    latents = [readable(x) for x in (q_latent, kv_latent, k_pos)]
    weights = q_weight.contiguous(), kv_weight.contiguous()
    problem = _Problem.of(q_latent, kv_latent, weights, k_pos.shape[-1], qk_head_dim, interleaved)
    outputs = _outputs(q_latent, k_pos, weights, qk_head_dim)
    if not problem.tokens:
        return outputs
    kernel = triton_kernels.forward
    block, launch = problem.tile(kernel, q_latent)
    heads = problem.sizes.heads
    grid = triton.cdiv(heads, _HEADS_EACH), triton.cdiv(problem.tokens, block)
    with device_of(q_latent):
        kernel[grid](
            *latents, *weights, *_angles(cos, sin, places), *outputs, problem.tokens,
            problem.batch, heads, _HEADS_EACH, *_strides(*latents),
            **problem.constants("PLAIN", "PAIRS", "V_DIM", "Q_RANK", "KV_RANK"),
            **launch,
        )  # fmt: skip
    return outputs


def _outputs(
    q_latent: Tensor, k_pos: Tensor, weights: Sequence[Tensor], plain: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dim = q_latent.shape[:-1], plain + k_pos.shape[-1]
    heads = weights[0].shape[0] // dim
    widths = dim, dim, weights[1].shape[0] // heads - plain
    q, k, v = (q_latent.new_empty(*tokens, heads, width) for width in widths)
    return q, k, v


@_forward.register_fake
def _(q_latent, kv_latent, k_pos, q_weight, kv_weight, cos, sin, places, qk_head_dim, interleaved):
    return _outputs(q_latent, k_pos, (q_weight, kv_weight), qk_head_dim)


class _Saved(NamedTuple):
    """What the backward pass needs of the forward one's arguments."""

    q_latent: Tensor
    kv_latent: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    angles: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, q_latent, kv_latent, q_weight, kv_weight, cos, sin, places):
        return cls(q_latent, kv_latent, q_weight, kv_weight, _angles(cos, sin, places))

    def problem(self, dq: Tensor, plain: int, interleaved: bool) -> _Problem:
        weights, pos = (self.q_weight, self.kv_weight), dq.shape[-1] - plain
        return _Problem.of(
            self.q_latent, self.kv_latent, weights, pos, plain, interleaved
        )  # fmt: skip


def _latent_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, saved: _Saved, problem: _Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q_latent, kv_latent and k_pos."""
    rows, size = dq.shape[:2], problem.sizes
    widths = size.q_rank, size.kv_rank, size.pos
    found = [dq.new_empty(*rows, width) for width in widths]
    if problem.tokens:
        kernel = triton_kernels.latents_backward
        block, launch = problem.tile(kernel, dq)
        with device_of(dq):
            kernel[(triton.cdiv(problem.tokens, block),)](
                dq, dk, dv, saved.q_weight.contiguous(), saved.kv_weight.contiguous(),
                *saved.angles, *found, problem.tokens, problem.batch, size.heads,
                *_strides(dq, dk, dv),
                **problem.constants("PLAIN", "PAIRS", "V_DIM", "Q_RANK", "KV_RANK"),
                **launch,
            )  # fmt: skip
    dq_latent, dkv_latent, dk_pos = found
    return dq_latent, dkv_latent, dk_pos


def _q_weight_gradient(dq: Tensor, saved: _Saved, problem: _Problem, into: Tensor | None) -> Tensor:
    """The gradient of q's weight; into: what it is added to, and returned, instead."""
    kernel = weight_kernels.q_weight_backward
    latent = readable(saved.q_latent)

    def launch(grid: tuple[int, int], sums: Tensor, tiles: int, options: dict[str, int]) -> None:
        kernel[grid](
            dq, latent, *saved.angles, sums, problem.tokens, problem.batch,
            problem.sizes.heads, tiles, *_strides(dq, latent),
            **problem.constants("PLAIN", "PAIRS", "Q_RANK"), **options,
        )  # fmt: skip

    return _weight_gradient(kernel, launch, saved.q_weight, problem, into)


def _kv_weight_gradient(
    dk: Tensor, dv: Tensor, saved: _Saved, problem: _Problem, into: Tensor | None
) -> Tensor:
    """As _q_weight_gradient."""
    kernel = weight_kernels.kv_weight_backward
    latent = readable(saved.kv_latent)

    def launch(grid: tuple[int, int], sums: Tensor, tiles: int, options: dict[str, int]) -> None:
        kernel[grid](
            dk, dv, latent, sums, problem.tokens, problem.batch, problem.sizes.heads, tiles,
            *_strides(dk, dv, latent), **problem.constants("PLAIN", "V_DIM", "KV_RANK"), **options,
        )  # fmt: skip

    return _weight_gradient(kernel, launch, saved.kv_weight, problem, into)


def _weight_gradient(
    kernel: Any, launch: Any, weight: Tensor, problem: _Problem, into: Tensor | None
) -> Tensor:
    """Sums over splits of the tokens by `launch`, added up in their order.

    How many splits there are depends on sizes alone: on any machine the sums have one order.
    """
    if not problem.tokens:
        return torch.zeros_like(weight) if into is None else into
    target = into
    if into is None or not into.is_contiguous():
        dtype = weight.dtype if into is None else torch.float32
        target = weight.new_empty(weight.shape, dtype=dtype)
    block, options = problem.tile(kernel, weight)
    tiles, heads = triton.cdiv(problem.tokens, block), problem.sizes.heads
    tiles_each = triton.cdiv(tiles, max(1, _PROGRAMS // heads))
    splits, size = triton.cdiv(tiles, tiles_each), weight.numel()
    sums = weight.new_empty(splits, size, dtype=torch.float32)
    with device_of(weight):
        launch((heads, splits), sums, tiles_each, options)
        weight_kernels.add_splits[(triton.cdiv(size, _SUM_BLOCK),)](
            sums, target, size, splits, ADD=target is into, BLOCK=_SUM_BLOCK
        )  # fmt: skip
    return target if into is None or target is into else into.add_(target)


@torch.library.custom_op("megacpp::mla_up_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q_latent: Tensor, kv_latent: Tensor, q_weight: Tensor,
    kv_weight: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None, qk_head_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the latents, k_pos and the weights."""
    dq, dk, dv = readable(dq), readable(dk), readable(dv)
    saved = _Saved.of(q_latent, kv_latent, q_weight, kv_weight, cos, sin, places)
    problem = saved.problem(dq, qk_head_dim, interleaved)
    return (
        *_latent_gradients(dq, dk, dv, saved, problem),
        _q_weight_gradient(dq, saved, problem, None),
        _kv_weight_gradient(dk, dv, saved, problem, None),
    )


@_backward.register_fake
def _(dq, dk, dv, q_latent, kv_latent, q_weight, kv_weight, cos, sin, places, plain, interleaved):
    shapes = (q_latent.shape, kv_latent.shape, (*dq.shape[:2], dq.shape[-1] - plain),
              q_weight.shape, kv_weight.shape)  # fmt: skip
    return tuple(dq.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output) -> None:
    q_latent, kv_latent, _, *others = inputs[:-2]  # k_pos's gradient does not depend on it
    ctx.save_for_backward(q_latent, kv_latent, *others)
    ctx.options = inputs[-2:]


def _gradients(ctx, dq, dk, dv):
    return *_backward(dq, dk, dv, *ctx.saved_tensors, *ctx.options), *(None,) * 5


_forward.register_autograd(_gradients, setup_context=_save)


class _IntoMainGrad(torch.autograd.Function):
    """The operator above, with the weights' gradients added to their main_grad.

    The parameters themselves are kept beside the saved tensors, as they carry main_grad.
    """

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        ctx.weights = inputs[3:5]
        return _forward(*inputs)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dq, dk, dv = readable(dq), readable(dk), readable(dv)
        saved = _Saved.of(*ctx.saved_tensors)
        problem = saved.problem(dq, *ctx.options)
        q, kv = ctx.weights
        found = [*_latent_gradients(dq, dk, dv, saved, problem), None, None]
        if ctx.needs_input_grad[3]:
            _q_weight_gradient(dq, saved, problem, q.main_grad)
            found[3] = handed_on(q)
        if ctx.needs_input_grad[4]:
            _kv_weight_gradient(dk, dv, saved, problem, kv.main_grad)
            found[4] = handed_on(kv)
        return *found, *(None,) * 5
