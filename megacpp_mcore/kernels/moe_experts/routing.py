"""Where each (token, expert) pair has its row, computed on the device in two small kernels."""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.moe_experts import triton_kernels


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert, those of one expert by token.

    routing_map: (tokens, E), bool. rows: (tokens, topk), int32, the row of each of a token's
    experts in ascending order, -1 where it has fewer. token: (R,), int32, the token of a row, -1 in
    padding. row_probs: (R,), float32. ends: (E,), int32, where an expert's rows end. align: every
    expert's rows start at a multiple of it; rows after the last end belong to nobody.
    """

    routing_map: Tensor
    rows: Tensor
    token: Tensor
    row_probs: Tensor
    ends: Tensor
    align: int

    @property
    def topk(self) -> int:
        return self.rows.shape[1]

    @property
    def size(self) -> int:
        """Rows that are allocated."""
        return self.token.shape[0]


@dataclass
class Sorted:
    """What passes of the experts leave for functions beside them: the forward pass its routing, the
    backward pass x and the routing for fc1's weight gradient. It must not refer to `Readers`:
    autograd's nodes keep it, and a cycle would keep all activations where garbage collection is
    off."""

    routing: Routing | None = None
    of_fc1: tuple[Tensor, Routing] | None = None


def allocated(tokens: int, topk: int, experts: int, align: int) -> int:
    """Rows that are enough for any distribution of the tokens."""
    return tokens * topk + experts * (align - 1)


def route(routing_map: Tensor, probs: Tensor, topk: int, align: int = 1) -> Routing:
    """Sort the pairs that routing_map (tokens, E) marks, at most topk a token.

    probs: (tokens, E), the router's weights. Nothing is read on the host: sizes depend on the
    shapes alone. The order does not depend on how the GPU schedules the work.
    """
    tokens, experts = routing_map.shape
    size = allocated(tokens, topk, experts, align)
    new = routing_map.new_empty
    rows = new((tokens, topk), dtype=torch.int32)
    token, row_probs = new(size, dtype=torch.int32), new(size, dtype=torch.float32)
    ends = new(experts, dtype=torch.int32)
    routing_map = routing_map.contiguous()
    if tokens:
        tile = _tile(experts)
        blocks = triton.cdiv(tokens, tile["BLOCK"])
        at_once = max(1, 2048 // tile["WIDTH"])
        counts = new((blocks, experts), dtype=torch.int32)
        marks = routing_map.view(torch.uint8)
        triton_kernels.moe_count_tokens[(blocks,)](marks, counts, tokens, experts, **tile)
        triton_kernels.moe_place_tokens[(blocks,)](
            marks, probs.contiguous(), counts, token, row_probs, rows, ends, tokens, experts,
            blocks, size, TOPK=topk, TOPK_WIDTH=triton.next_power_of_2(topk), ALIGN=align,
            PADS=max(16, at_once), CHUNK=at_once, **tile,
        )  # fmt: skip
    else:
        ends.zero_()
    return Routing(routing_map, rows, token, row_probs, ends, align)


def _tile(experts: int) -> dict[str, int]:
    width = triton.next_power_of_2(experts)
    return {"BLOCK": 128 if width <= 64 else 64, "WIDTH": width}


def probs_gradient(routing: Routing, row_grads: Tensor, dtype: torch.dtype) -> Tensor:
    """(R,) gradients of row_probs -> those of probs, (tokens, E), 0 where nothing was routed."""
    tokens, experts = routing.routing_map.shape
    grads = row_grads.new_empty((tokens, experts), dtype=dtype)
    if tokens:
        tile = _tile(experts)
        triton_kernels.moe_gather_probs[(triton.cdiv(tokens, tile["BLOCK"]),)](
            routing.routing_map.view(torch.uint8), routing.rows, row_grads, grads, tokens, experts,
            TOPK=routing.topk, **tile,
        )  # fmt: skip
    return grads


@dataclass
class Gathered:
    """Tokens (tokens, h) in the order of a routing's rows: what a product takes for its rows.

    A product reads the tokens from where they are, or takes `rows`, a copy that is made once.
    """

    tokens: Tensor
    routing: Routing

    def __len__(self) -> int:
        return self.routing.size

    @functools.cached_property
    def rows(self) -> Tensor:
        """(R, h)."""
        return to_rows(self.tokens, self.routing)


def rows_of(x: Tensor | Gathered) -> Tensor:
    """(R, h), of what is sorted already or of tokens."""
    return x.rows if isinstance(x, Gathered) else x


def to_rows(x: Tensor, routing: Routing) -> Tensor:
    """(tokens, h) -> (R, h): each token once for every expert that it has; 0 in padding."""
    tokens, width = x.shape
    out = x.new_empty(routing.size, width)
    pads = routing.ends.shape[0] * (routing.align - 1)
    if tokens:
        triton_kernels.moe_spread[(tokens + pads,)](
            x.contiguous(), out, routing.rows, routing.token, routing.ends, tokens, width,
            TOPK=routing.topk, PADS=max(routing.align - 1, 1), BLOCK=_columns(width),
        )  # fmt: skip
    return out


def to_tokens(
    y: Tensor, routing: Routing, one: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    """(R, h) -> (tokens, h): the sum of each token's rows, plus two addends (tokens, h)."""
    tokens, width = routing.rows.shape[0], y.shape[1]
    out = y.new_empty(tokens, width)
    one, other = (None if x is None else x.contiguous() for x in (one, other))
    if tokens:
        triton_kernels.moe_combine[(tokens,)](
            y, routing.rows, out, one, other, width, TOPK=routing.topk, HAS_ONE=one is not None,
            HAS_OTHER=other is not None, BLOCK=_columns(width), num_warps=8,
        )  # fmt: skip
    return out


def sum_gradients(
    y: Tensor, routing: Routing, one: Tensor | None, d_logits: Tensor, gate: Tensor
) -> Tensor:
    """(R, h) -> (tokens, h): the sum of each token's rows, plus one (tokens, h) and d_logits gate.

    d_logits (tokens, E), float32: the gradient of the router's logits. gate (E, h): its weight.
    """
    (tokens, experts), width = d_logits.shape, y.shape[1]
    out = y.new_empty(tokens, width)
    if tokens:
        tile, block = 2, min(triton.next_power_of_2(width), 1024)
        grid = triton.cdiv(width, block), triton.cdiv(tokens, tile)
        triton_kernels.moe_sum_gradients[grid](
            y, routing.rows, None if one is None else one.contiguous(), d_logits.contiguous(),
            gate.contiguous(), out, tokens, width, EXPERTS=experts, TOPK=routing.topk,
            HAS_ONE=one is not None, TILE=tile, BLOCK=block,
        )  # fmt: skip
    return out


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), 4096)
