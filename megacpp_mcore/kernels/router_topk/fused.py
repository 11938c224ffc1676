"""The router's choice in two kernels forward and one backward; its gradient needs only the logits
and the map."""

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.router_topk import triton_kernels
from megacpp_mcore.kernels.router_topk.reference import Choice


def router_topk(
    logits: Tensor, bias: Tensor | None, topk: int, scaling: float = 1.0, scale: float = 1.0
) -> Choice:
    """As `megacpp_mcore.kernels.router_topk.router_topk`, for logits and a bias in float32.

    Of equal scores the expert with the lower number is chosen. Runs on CUDA, and on a CPU in
    Triton's interpreter. The host never waits for the device.
    """
    probs, routing_map, counts, _, balance = _forward(logits, bias, topk, scaling, scale)
    return Choice(probs, routing_map, counts, balance)


@torch.library.custom_op("megacpp::router_topk", mutates_args=())
def _forward(
    logits: Tensor, bias: Tensor | None, topk: int, scaling: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """probs, routing_map, counts, the counts of the balance, balance."""
    logits = logits.contiguous()
    (tokens, experts), new = logits.shape, logits.new_empty
    tile = _tile(experts)
    blocks = triton.cdiv(tokens, tile["BLOCK"])
    found = _forward_fake(logits, bias, topk, scaling, scale)
    probs, routing_map, *totals = found
    partial, score_sums = new(2, blocks, experts, dtype=torch.int32), new(blocks, experts)
    if tokens:
        triton_kernels.router_choose[(blocks,)](
            logits, bias if bias is None else bias.contiguous(), probs,
            routing_map.view(torch.uint8), *partial, score_sums, tokens, experts, scaling,
            TOPK=topk, HAS_BIAS=bias is not None, **tile,
        )  # fmt: skip
    triton_kernels.router_balance[(1,)](
        *partial, score_sums, *totals, experts, blocks, scale,
        CHUNK=max(1, 2048 // tile["WIDTH"]), WIDTH=tile["WIDTH"], num_warps=tile["num_warps"],
    )  # fmt: skip
    return found


@_forward.register_fake
def _forward_fake(logits, bias, topk, scaling, scale):
    (tokens, experts), new = logits.shape, logits.new_empty
    counts, balance_counts = (new(experts, dtype=torch.int32) for _ in range(2))
    routing_map = new(tokens, experts, dtype=torch.bool)
    return new(tokens, experts), routing_map, counts, balance_counts, new(())


@torch.library.custom_op("megacpp::router_topk_backward", mutates_args=())
def _backward(
    d_probs: Tensor, d_balance: Tensor, logits: Tensor, routing_map: Tensor,
    balance_counts: Tensor, topk: int, scaling: float, scale: float,
) -> Tensor:  # fmt: skip
    tokens, experts = logits.shape
    d_logits, tile = logits.new_empty(tokens, experts), _tile(experts)
    if tokens:
        triton_kernels.router_choose_backward[(triton.cdiv(tokens, tile["BLOCK"]),)](
            logits.contiguous(), routing_map.view(torch.uint8), d_probs.contiguous(),
            balance_counts, d_balance, d_logits, tokens, experts, scaling, scale, TOPK=topk, **tile,
        )  # fmt: skip
    return d_logits


@_backward.register_fake
def _(d_probs, d_balance, logits, routing_map, balance_counts, topk, scaling, scale):
    return logits.new_empty(logits.shape)


def _setup(ctx, inputs, output) -> None:
    logits, _, *ctx.settings = inputs
    _, routing_map, _, balance_counts, _ = output
    ctx.save_for_backward(logits, routing_map, balance_counts)
    ctx.set_materialize_grads(False)  # the map and the counts have none


def _gradients(ctx, d_probs, _map, _counts, _balance_counts, d_balance):
    logits, *_ = ctx.saved_tensors
    d_probs = torch.zeros_like(logits) if d_probs is None else d_probs
    d_balance = logits.new_zeros(()) if d_balance is None else d_balance
    d_logits = _backward(d_probs, d_balance, *ctx.saved_tensors, *ctx.settings)
    return d_logits, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _tile(experts: int) -> dict[str, int]:
    width = triton.next_power_of_2(experts)
    return {"BLOCK": max(1, min(128, 16384 // width)), "WIDTH": width, "num_warps": 8}
