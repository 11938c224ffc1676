"""Megatron's router with a gating product and a choice of experts of ours."""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.moe_experts.readers import MOST_GATES
from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.kernels.router_topk import Choice
from megacpp_mcore.layers.param_gather import needs_no_call, wait_for_param_gather
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import router_topk
from megacpp_mcore.surfaces.backend import REFERENCE


class DispatchedTopKRouter(TopKRouter):
    """Megatron's TopKRouter.

    product: computes its logits, as `kernels.router_gating` does, or None for Megatron's. choose:
    the experts of each token and the balance of the load, as `kernels.router_topk` does, or None.
    computed: set before a call, that call's logits [t, experts]; see `gate`.
    """

    def __init__(
        self, *args, product: Callable[[Tensor, Tensor], Tensor] | None,
        choose: Callable[..., Choice] | None, **kwargs,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        for counts in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
            if getattr(self, counts) is not None:
                # A bf16 model turns float buffers to bf16, which counts thousands in steps of 8 or
                # more; Megatron keeps only the bias, which follows the counts, in float32.
                setattr(self, counts, getattr(self, counts).long())
        self.product, self.choose = product, choose
        self.computed: Tensor | None = None

    def gate(self, tokens: Tensor) -> Tensor | None:
        """The weight [experts, h], if somebody else can compute the logits, and multiply their
        gradient by it: they are a plain product of the tokens, and so small a one that it is faster
        on the way, where the tokens are written and their gradients are summed. The router's input
        has no gradient of its own then, so that nothing else may depend on it."""
        config = self.config
        if (
            config.num_moe_experts > MOST_GATES
            or self.product is not fp32_output.router_gating
            or config.moe_input_jitter_eps is not None
            or type(self) is not DispatchedTopKRouter
            or not needs_no_call(self)
        ):
            return None
        return wait_for_param_gather(self, is_called=True)._weight_at(tokens)

    def gating(self, input: Tensor) -> Tensor:
        """Tokens [s, b, h] -> logits [s, b, experts] in float32."""
        if self.product is None:
            return super().gating(input)
        weight = self._weight_at(input)
        computed, self.computed = self.computed, None  # of this call alone
        if computed is not None:
            return fp32_output.router_gating_computed(input, weight, computed)
        return self.product(input, weight)

    def _weight_at(self, tokens: Tensor) -> Tensor:
        if self.weight.device != tokens.device:  # Megatron makes the weight on the CPU
            self.weight.data = self.weight.data.to(tokens.device)
        return self.weight

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [s, b, experts] -> (weights, map), both [t, experts]; with a mask by Megatron's
        steps, which is then recorded."""
        if self.choose is None:
            return super().routing(logits, padding_mask)
        if padding_mask is not None:
            requests = plugin_settings(self.config).backends
            dispatch.record(dispatch.Decision(
                surface=router_topk.NAME,
                requested=dispatch.requested(router_topk.NAME, requests),
                observed=REFERENCE,
                reason="a batch has a mask of padding",
                implementation="megatron.core.transformer.moe.router:TopKRouter",
            ))  # fmt: skip
            return super().routing(logits, padding_mask)
        logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
        (tokens, experts), topk = logits.shape, self.topk
        training = self.training and torch.is_grad_enabled()
        coefficient = self.get_aux_loss_coeff("aux_loss") if training else 0.0
        scaling = self.config.moe_router_topk_scaling_factor or 1.0
        scale = experts * coefficient / (topk * max(tokens, 1) ** 2)
        found = self.choose(logits, self.expert_bias, topk, scaling, scale)
        probs = found.probs
        if coefficient:
            probs = self.attach_and_log_load_balancing_loss(
                probs, coefficient, found.balance, "load_balancing_loss", self.tp_cp_group,
                valid_token_count=tokens,
            )  # fmt: skip
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += found.counts
        return probs, found.routing_map

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens, from which the bias is updated; routing_map [t, experts].

        Megatron's, without torch.compile, which takes seconds in a run's first step to fuse a sum
        with an addition of a number for each expert. padding_mask [t], which Megatron's does not
        take in that shape, the one that `routing` gives it.
        """
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                if padding_mask is not None:
                    routing_map = routing_map & ~padding_mask.view(-1, 1)
                self.local_tokens_per_expert += routing_map.sum(dim=0)
