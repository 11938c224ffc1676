"""The router's logits and gradients by two kernels, each of which reads the tokens once.

As `fp32_output`, with the same sums: products of bf16 values in float32, and a float32 gradient as
three bf16 parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.router_gating import triton_kernels
from megacpp_mcore.kernels.router_gating.fp32_output import refuse_other_dtypes


class Tile(NamedTuple):
    """Of a kernel: tokens and columns of a block, parts of the tokens, warps, stages."""

    tokens: int
    columns: int
    parts: int
    warps: int
    stages: int


FORWARD, BACKWARD = Tile(64, 128, 1, 4, 4), Tile(64, 64, 8, 4, 3)
_WIDE = 64  # padded experts beyond which the blocks are smaller


def router_gating(x: Tensor, weight: Tensor) -> Tensor:
    """As of `fp32_output`."""
    refuse_other_dtypes(x, weight)
    return _OnePass.apply(x, weight)


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return logits(x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.view(-1, x.shape[-1])
        dx, dweight = gradients(rows, weight, dlogits.reshape(-1, weight.shape[0]).contiguous())
        return dx.view(x.shape), dweight


def logits(x: Tensor, weight: Tensor, tile: Tile = FORWARD) -> Tensor:
    """x (t, h), weight (E, h), contiguous -> (t, E) in float32."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    out = x.new_empty(tokens, experts, dtype=torch.float32)
    tile, width = _fitting(tile, experts)
    if tokens:
        with device_of(x):
            triton_kernels.logits_of_tokens[(triton.cdiv(tokens, tile.tokens),)](
                x, weight, out, tokens, hidden, experts, BLOCK=tile.tokens, COLUMNS=tile.columns,
                WIDTH=width, KIND=_kind(x), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out


def gradients(
    x: Tensor, weight: Tensor, dlogits: Tensor, tile: Tile = BACKWARD
) -> tuple[Tensor, Tensor]:
    """x (t, h), weight (E, h), dlogits (t, E) in float32, contiguous -> as x and as weight."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    tile, width = _fitting(tile, experts)
    dx = torch.empty_like(x)
    if not tokens:
        return dx, torch.zeros_like(weight)
    blocks = triton.cdiv(triton.cdiv(tokens, tile.tokens), tile.parts)
    parts = triton.cdiv(tokens, blocks * tile.tokens)
    dweight = x.new_empty(parts, experts, hidden, dtype=torch.float32)
    with device_of(x):
        triton_kernels.gradients_of_logits[(triton.cdiv(hidden, tile.columns), parts)](
            x, weight, dlogits, dx, dweight, tokens, hidden, experts, blocks, BLOCK=tile.tokens,
            COLUMNS=tile.columns, WIDTH=width, KIND=_kind(x), num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype)


def _kind(x: Tensor) -> tl.dtype:
    return tl.bfloat16 if x.is_cuda else tl.float32


def _fitting(tile: Tile, experts: int) -> tuple[Tile, int]:
    """The tile, smaller for many experts, and their padded number."""
    width = max(16, triton.next_power_of_2(experts))
    if width > _WIDE:
        tile = tile._replace(tokens=min(tile.tokens, 32), columns=min(tile.columns, 64), stages=2)
    return tile, width
