"""Sizes, tiles and launches of the kernels of `mla_up`.

Tensors are (s, b, ...) here, also those of packed documents. Gradients of q, k and v may have any
strides, but their last axis is contiguous.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.mla_up import triton_kernels, weight_kernels
from megacpp_mcore.kernels.mla_up.inputs import Sizes
from megacpp_mcore.kernels.strides import readable

# kernel -> (tokens of a tile, warps, stages), in bf16: the fastest of a handful each on an H200 at
# NAM56R's sizes (195, 183, 144 and 94 us; with 128, 8, 2 the first two took 261 and 200).
_TILES = {
    triton_kernels.mla_up_forward: (64, 4, 3),
    triton_kernels.mla_up_latents_backward: (64, 4, 3),
    weight_kernels.mla_up_q_weight_backward: (64, 4, 3),
    weight_kernels.mla_up_kv_weight_backward: (128, 8, 2),
}
_OF_FLOAT32 = (32, 4, 1)  # the same for every kernel in float32, which tests use
_HEADS_EACH = 28  # of a program of the forward kernel
_PROGRAMS = 512  # of a kernel of the weights' gradients, about: some four for each of 132 SMs
_SUM_BLOCK = 1024
_ALL = ("PLAIN", "PAIRS", "V_DIM", "Q_RANK", "KV_RANK")


class Call(NamedTuple):
    """What the launches of one call depend on. sizes: of `mla_up`. tokens: s * b of them."""

    sizes: Sizes
    tokens: int
    batch: int
    interleaved: bool

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


class Operands(NamedTuple):
    """The arguments that both passes need. angles: see `_angles`."""

    q_latent: Tensor
    kv_latent: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    angles: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, q_latent, kv_latent, q_weight, kv_weight, cos, sin, places):
        return cls(q_latent, kv_latent, q_weight, kv_weight, _angles(cos, sin, places))

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.q_weight.contiguous(), self.kv_weight.contiguous()

    def call(self, pos: int, plain: int, interleaved: bool) -> Call:
        """pos, plain: dims of a head."""
        heads = self.q_weight.shape[0] // (plain + pos)
        v = self.kv_weight.shape[0] // heads - plain
        ranks = self.q_latent.shape[-1], self.kv_latent.shape[-1]
        seq, batch, _ = self.q_latent.shape
        return Call(Sizes(heads, plain, pos, v, *ranks), seq * batch, batch, interleaved)


def forward(operands: Operands, k_pos: Tensor, call: Call, outputs: tuple[Tensor, ...]) -> None:
    """Write q, k and v, without gaps, to `outputs`."""
    if not call.tokens:
        return
    latents = [readable(x) for x in (operands.q_latent, operands.kv_latent, k_pos)]
    block, options = call.tile(triton_kernels.mla_up_forward, k_pos)
    heads = call.sizes.heads
    grid = triton.cdiv(heads, _HEADS_EACH), triton.cdiv(call.tokens, block)
    with device_of(k_pos):
        triton_kernels.mla_up_forward[grid](
            *latents, *operands.weights, *operands.angles, *outputs, call.tokens, call.batch,
            heads, _HEADS_EACH, *_strides(*latents), **call.constants(*_ALL), **options,
        )  # fmt: skip


def latent_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, operands: Operands, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q_latent, kv_latent and k_pos."""
    rows, size = dq.shape[:2], call.sizes
    widths = size.q_rank, size.kv_rank, size.pos
    found = [dq.new_empty(*rows, width) for width in widths]
    if call.tokens:
        block, options = call.tile(triton_kernels.mla_up_latents_backward, dq)
        with device_of(dq):
            triton_kernels.mla_up_latents_backward[(triton.cdiv(call.tokens, block),)](
                dq, dk, dv, *operands.weights, *operands.angles, *found, call.tokens,
                call.batch, size.heads, *_strides(dq, dk, dv), **call.constants(*_ALL),
                **options,
            )  # fmt: skip
    dq_latent, dkv_latent, dk_pos = found
    return dq_latent, dkv_latent, dk_pos


def q_weight_gradient(dq: Tensor, operands: Operands, call: Call, into: Tensor | None) -> Tensor:
    """The gradient of q's weight; into: what it is added to, and returned, instead."""
    kernel = weight_kernels.mla_up_q_weight_backward
    latent = readable(operands.q_latent)

    def launch(grid: tuple[int, int], sums: Tensor, tiles: int, options: dict[str, int]) -> None:
        kernel[grid](
            dq, latent, *operands.angles, sums, call.tokens, call.batch,
            call.sizes.heads, tiles, *_strides(dq, latent),
            **call.constants("PLAIN", "PAIRS", "Q_RANK"), **options,
        )  # fmt: skip

    return _weight_gradient(kernel, launch, operands.q_weight, call, into)


def kv_weight_gradient(
    dk: Tensor, dv: Tensor, operands: Operands, call: Call, into: Tensor | None
) -> Tensor:
    """The gradient of k's and v's weight, as q_weight_gradient."""
    kernel = weight_kernels.mla_up_kv_weight_backward
    latent = readable(operands.kv_latent)

    def launch(grid: tuple[int, int], sums: Tensor, tiles: int, options: dict[str, int]) -> None:
        kernel[grid](
            dk, dv, latent, sums, call.tokens, call.batch, call.sizes.heads, tiles,
            *_strides(dk, dv, latent), **call.constants("PLAIN", "V_DIM", "KV_RANK"), **options,
        )  # fmt: skip

    return _weight_gradient(kernel, launch, operands.kv_weight, call, into)


def _weight_gradient(
    kernel: Any, launch: Any, weight: Tensor, call: Call, into: Tensor | None
) -> Tensor:
    """Sums over splits of the tokens by `launch`, added up in their order.

    How many splits there are depends on sizes alone: on any machine the sums have one order.
    """
    if not call.tokens:
        return torch.zeros_like(weight) if into is None else into
    target = into
    if into is None or not into.is_contiguous():
        dtype = weight.dtype if into is None else torch.float32
        target = weight.new_empty(weight.shape, dtype=dtype)
    block, options = call.tile(kernel, weight)
    tiles, heads = triton.cdiv(call.tokens, block), call.sizes.heads
    tiles_each = triton.cdiv(tiles, max(1, _PROGRAMS // heads))
    splits, size = triton.cdiv(tiles, tiles_each), weight.numel()
    sums = weight.new_empty(splits, size, dtype=torch.float32)
    with device_of(weight):
        launch((heads, splits), sums, tiles_each, options)
        weight_kernels.mla_up_add_splits[(triton.cdiv(size, _SUM_BLOCK),)](
            sums, target, size, splits, ADD=target is into, BLOCK=_SUM_BLOCK
        )  # fmt: skip
    return target if into is None or target is into else into.add_(target)
