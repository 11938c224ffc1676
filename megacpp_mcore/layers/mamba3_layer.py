"""The layer around a Mamba-3 mixer: norm, mixer, residual."""

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.utils import deprecate_inference_params
from torch import Tensor


class Mamba3Layer(MambaLayer):
    """Megatron's MambaLayer, which also takes a norm that returns (normalised, residual).

    Megatron's transformer layers take one, its MambaLayer does not.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context=None,
        rotary_pos_emb: Tensor | None = None,
        *,
        inference_params=None,
        packed_seq_params=None,
    ) -> Tensor:
        """hidden_states [s, b, h] -> [s, b, h]; the mask and the embedding are ignored."""
        normed = self.norm(hidden_states.to(self.config.params_dtype))
        normed, residual = normed if isinstance(normed, tuple) else (normed, hidden_states)
        mixed = self.mixer(
            normed,
            inference_context=deprecate_inference_params(inference_context, inference_params),
            packed_seq_params=packed_seq_params,
        )
        if self.config.fp32_residual_connection:
            residual = residual.float()
        with self.bias_dropout_add_exec_handler():
            add = self.mamba_bda(training=self.training, fused=self.config.bias_dropout_fusion)
            return add(mixed, residual, self.hidden_dropout)
