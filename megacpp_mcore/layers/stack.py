"""The stack spec: which module serves each symbol of a hybrid pattern, put together from parts.

`stack_spec` returns what Megatron's `HybridModel(hybrid_stack_spec=...)` and `--spec` take. Parts
(linears, norms, experts) are chosen by dispatch when the spec is made; what depends on the model's
config (attention core, scans) is chosen when a layer is built.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megacpp_mcore import bridges, dispatch, problems
from megacpp_mcore.layers.m2rnn import M2RNNMixer, M2RNNMixerSubmodules
from megacpp_mcore.layers.mamba3 import Mamba3Mixer, Mamba3MixerSubmodules
from megacpp_mcore.layers.mla import MLASelfAttention
from megacpp_mcore.layers.parts import Linears
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.patching import applied

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


class DispatchedCoreAttention:
    """Builds the attention core that dispatch chooses for the layer's config."""

    def __new__(cls, config, **kwargs) -> torch.nn.Module:
        if config.multi_latent_attention and "k_channels" not in kwargs:
            return IdentityOp()  # MLA's base class builds one with other sizes, and MLA replaces it
        problem = problems.core_attention(
            problems.current_device(), config, kwargs.get("k_channels"), kwargs.get("v_channels")
        )
        requests = plugin_settings(config).backends
        return dispatch.decide("core_attention", problem, requests).load()(config=config, **kwargs)


class MegacppStack(HybridStack):
    """Megatron's HybridStack with our settings checked, and the final norm that the spec names.

    Upstream hard-codes TENorm. With the patch final-norm-from-spec the norm is one of the
    submodules, and final_norm is None. MTP's inner stack has no final norm, so that upstream's own
    class serves there.
    """

    def __init__(self, config, submodules, final_norm=None, post_layer_norm=True, **kwargs) -> None:
        bridges.install()
        plugin_settings(config)  # fails here, with the reason, rather than in some layer
        upstream_builds_it = post_layer_norm and final_norm is None
        super().__init__(config, submodules, post_layer_norm=upstream_builds_it, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm and final_norm is not None:
            self.final_norm = final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def stack_spec(
    backends: Mapping[str, str] | None = None,
    recurrent: Literal["m2rnn", "deltanet"] = "m2rnn",
) -> ModuleSpec:
    """The spec of a hybrid stack with Mamba-3 in the M slot.

    backends: surface -> requested backend (a recipe's `[backends]`). recurrent: what the G slot
    carries; one pattern cannot have both. Raises DispatchError when a named backend cannot serve.
    """
    problem = problems.stack_part(problems.current_device())
    linears, norm, experts = (
        dispatch.decide(surface, problem, backends).load()()
        for surface in ("linear", "norm", "moe_experts")
    )
    submodules = HybridStackSubmodules(
        mamba_layer=_mamba3_layer(linears, norm),
        gdn_layer=_m2rnn_layer(linears, norm)
        if recurrent == "m2rnn"
        else _gdn_layer(linears, norm),
        attention_layer=_gqa_layer(linears, norm),
        dsa_layer=_dsa_layer(linears, norm),
        mla_layer=_mla_layer(linears, norm),
        mlp_layer=_mlp_layer(linears, norm),
        moe_layer=_moe_layer(linears, norm, experts),
        mtp_block_spec=_mtp_block(linears, norm),
    )
    if "final-norm-from-spec" in applied("megatron-core"):
        submodules.final_norm = norm
        return ModuleSpec(module=MegacppStack, submodules=submodules)
    return ModuleSpec(module=MegacppStack, params={"final_norm": norm}, submodules=submodules)


def _mamba3_layer(linears: Linears, norm: type) -> ModuleSpec:
    mixer = ModuleSpec(
        module=Mamba3Mixer,
        submodules=Mamba3MixerSubmodules(in_proj=linears.column, out_proj=linears.row),
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
    )


def _attention_layer(norm: type, self_attention: ModuleSpec, **more) -> ModuleSpec:
    """A TransformerLayer of a norm, a token mixer and a residual, without an MLP."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            **more,
        ),
    )


def _m2rnn_layer(linears: Linears, norm: type) -> ModuleSpec:
    submodules = M2RNNMixerSubmodules(in_proj=linears.column, out_proj=linears.row)
    return _attention_layer(norm, ModuleSpec(module=M2RNNMixer, submodules=submodules))


def _gdn_layer(linears: Linears, norm: type) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=linears.column, out_norm=norm, out_proj=linears.row
    )
    return _attention_layer(norm, ModuleSpec(module=GatedDeltaNet, submodules=submodules))


def _gqa_layer(linears: Linears, norm: type) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears.column,
            core_attention=DispatchedCoreAttention,
            linear_proj=linears.row,
        ),
    )
    # Megatron's own hybrid spec fuses this norm into the projection; its checkpoint keys are kept.
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return _attention_layer(norm, attention, sharded_state_dict_keys_map=keys)


def _mla_layer(linears: Linears, norm: type) -> ModuleSpec:
    attention = ModuleSpec(
        module=MLASelfAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            core_attention=DispatchedCoreAttention,
            **_mla_projections(linears),
            **_mla_norms(linears, norm),
        ),
    )
    # The keys of Megatron's own hybrid spec, where the norms are part of TE's up-projections.
    keys = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    return _attention_layer(norm, attention, sharded_state_dict_keys_map=keys)


def _mla_norms(linears: Linears, norm: type) -> dict[str, type]:
    """Q/KV norms as modules; TE's linears have them inside."""
    module = IdentityOp if linears.is_te else norm
    return {"q_layernorm": module, "kv_layernorm": module}


def _dsa_layer(linears: Linears, norm: type) -> ModuleSpec:
    indexer = ModuleSpec(
        module=DSAIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=linears.duplicated,
            linear_wk=linears.duplicated,
            k_norm=norm,
            linear_weights_proj=linears.duplicated,
        ),
    )
    core = ModuleSpec(module=DSAttention, submodules=DSAttentionSubmodules(indexer=indexer))
    attention = ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params=_CAUSAL,
        submodules=AbsorbedMLASelfAttentionSubmodules(
            core_attention=core,
            **_mla_projections(linears),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    return _attention_layer(norm, attention)


def _mla_projections(linears: Linears) -> dict[str, type]:
    return {
        "linear_q_proj": linears.column,
        "linear_q_down_proj": linears.duplicated,
        "linear_q_up_proj": linears.column,
        "linear_kv_down_proj": linears.duplicated,
        "linear_kv_up_proj": linears.column,
        "linear_proj": linears.row,
    }


def _mlp_layer(linears: Linears, norm: type) -> ModuleSpec:
    mlp = MLPSubmodules(linear_fc1=linears.column, linear_fc2=linears.row)
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    return ModuleSpec(module=MLPLayer, submodules=submodules)


def _moe_layer(linears: Linears, norm: type, experts) -> ModuleSpec:
    # num_experts only has to be a number here; the layer reads the config's.
    upstream = get_moe_module_spec(use_te=linears.is_te, num_experts=1)
    moe = replace(upstream.keywords["submodules"], experts=experts)
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=partial(MoELayer, submodules=moe),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=MoETransformerLayer, submodules=submodules)


def _mtp_block(linears: Linears, norm: type) -> ModuleSpec:
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=linears.column,
            mtp_model_layer=None,  # HybridModel builds the inner stack from the pattern
            layer_norm=norm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
