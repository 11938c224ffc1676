"""MLA's down projections of q and of k and v as one product; the two weights stay as they are.

Both read the block's whole input, and have few outputs: the products wait for memory. In one, the
input is read once instead of twice in each direction, and its gradient is written once, where two
gradients were written, read and added. Megatron's own fusion (`mla_down_proj_fusion`) has one
weight, and Transformer Engine's norm inside.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.main_grad import fp32_product, handed_on, takes_gradients
from megacpp_mcore.layers.param_gather import needs_no_call, only_multiplies, wait_for_param_gather


def one_product(
    q_down: torch.nn.Module, kv_down: torch.nn.Module, x: Tensor
) -> tuple[Tensor, Tensor]:
    """x [..., h] -> the outputs of both linears, [..., q] and [..., kv].

    Gradients of the weights are added to main_grad in float32 where the linears do so.
    """
    modules = [wait_for_param_gather(module) for module in (q_down, kv_down)]
    return _OneProduct.apply(x, *(m.weight for m in modules), all(map(accumulates, modules)))


def can_be_one(config, q_down: torch.nn.Module, kv_down: torch.nn.Module, rows: int) -> bool:
    """Whether these linears do nothing but multiply: no bias, 16 bits or more, whole weights,
    and no hooks but data parallelism's.

    rows: outputs of both, q_lora_rank + kv_lora_rank + qk_pos_emb_head_dim. Under tensor
    parallelism Transformer Engine's linears have whole weights, Megatron's do not.
    """
    plain = not (config.fp8 or config.fp4 or getattr(config, "delay_wgrad_compute", False))
    linears = q_down, kv_down
    if not plain or not all(only_multiplies(each) and needs_no_call(each) for each in linears):
        return False
    return sum(len(each.weight) for each in linears) == rows


def accumulates(linear: torch.nn.Module) -> bool:
    """Whether it adds its weight's gradient to main_grad: Transformer Engine's or Megatron's."""
    fused = getattr(linear, "fuse_wgrad_accumulation", None)
    return getattr(linear, "gradient_accumulation_fusion", False) if fused is None else fused


class _OneProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, q: Tensor, kv: Tensor, accumulates: bool) -> tuple[Tensor, Tensor]:
        weight = torch.cat([q, kv])
        ctx.save_for_backward(x, weight)
        ctx.weights, ctx.accumulates = (q, kv), accumulates
        q_out, kv_out = torch.nn.functional.linear(x, weight).split([len(q), len(kv)], dim=-1)
        return q_out.contiguous(), kv_out

    @staticmethod
    @no_second_derivative
    def backward(ctx, dq: Tensor, dkv: Tensor):
        x, weight = ctx.saved_tensors
        dy = torch.cat([dq, dkv], dim=-1)
        wants_x, *wants = ctx.needs_input_grad[:3]
        dx = dy @ weight if wants_x else None
        if not any(wants):
            return dx, None, None, None
        dy, x = (rows.reshape(-1, rows.shape[-1]) for rows in (dy, x))
        into = ctx.accumulates and all(takes_gradients(w) for w in ctx.weights)
        product = fp32_product(dy.t(), x) if into else dy.t() @ x
        found = product.split([len(w) for w in ctx.weights])
        if into:
            found = [_added(w, d) for w, d in zip(ctx.weights, found, strict=True)]
        return dx, *found, None


def _added(weight: Tensor, gradient: Tensor) -> Tensor:
    weight.main_grad.add_(gradient)
    return handed_on(weight)
