"""The A block as MLA: Megatron's module, with Q/KV norms where Transformer Engine is not there."""

from dataclasses import replace

from megatron.core.transformer import multi_latent_attention as upstream
from megatron.core.transformer.identity_op import IdentityOp


class MLASelfAttention(upstream.MLASelfAttention):
    """Megatron's MLASelfAttention, whose spec may name Q/KV norms that the config does not want.

    With `qk_layernorm`, upstream fuses the norms into TE's up-projections; a spec of other linears
    must name norm modules, which upstream then refuses without `qk_layernorm`. A spec is made
    before the config is known, so ours names them and this class drops them.
    """

    def _resolve_qk_norm_config(self, submodules):
        if not self.config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=IdentityOp, kv_layernorm=IdentityOp)
        return super()._resolve_qk_norm_config(submodules)
