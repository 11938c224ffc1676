"""The layer around a mixture of experts: norm, router and experts, residual."""

from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megacpp_mcore.layers.moe import MegacppMoELayer
from megacpp_mcore.layers.param_gather import needs_no_call
from megacpp_mcore.layers.residual import get_residual_add


class MoEBlock(MoETransformerLayer):
    """Megatron's MoETransformerLayer, whose residual is an addend of the experts' own sum.

    Megatron hands the residual to `mlp_bda`, after the MLP, which never sees it: a bda of our own
    would come too late. So this part of the forward pass is ours, where it is norm, experts and a
    sum and nothing else, and Megatron's everywhere else. The sum of experts, shared expert and
    residual is made in float32 and rounded once; Megatron rounds the experts' output, too.
    """

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context=None,
        padding_mask: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """hidden_states [s, b, h] -> [s, b, h], the experts of its norm, plus itself."""
        if not self._sums_inside(hidden_states, inference_context, packed_seq_params):
            return super()._forward_mlp(
                hidden_states, inference_context, padding_mask, packed_seq_params
            )
        normed, residual, readers = self.mlp.normed(self.pre_mlp_layernorm, hidden_states)
        output, _ = self.mlp(normed, padding_mask=padding_mask, residual=residual, readers=readers)
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True)

    def _sums_inside(self, hidden_states: Tensor, inference_context, packed_seq_params) -> bool:
        """Whether norm, experts and a plain sum of one dtype are all that Megatron's would do."""
        config, mlp = self.config, self.mlp
        return (
            isinstance(mlp, MegacppMoELayer)
            and mlp.takes_residual
            # A hook of the MLP's sees what Megatron gives it, and what it returns.
            and needs_no_call(mlp)
            and self.mlp_bda is get_residual_add
            and not (self.training and self.hidden_dropout)
            and not config.fp32_residual_connection
            and hidden_states.dtype == mlp.experts.linear_fc2.weight.dtype
            # Megatron's turns packed rows into a batch for the router, and its output back.
            and packed_seq_params is None
            # They need the norm's or the MLP's output by itself, or the MLP in pieces.
            and not (self.recompute_pre_mlp_layernorm or self.recompute_mlp)
            and not self.offload_mlp_norm
            and config.mlp_chunks_for_training == 1
            and not self.use_partial_cudagraphs
            and config.cuda_graph_impl in ("none", "full_iteration")
            and inference_context is None
            and not InferenceMode.is_active()
        )
