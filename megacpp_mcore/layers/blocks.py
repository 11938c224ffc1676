"""The spec of one layer in each slot of the stack, which the table of block letters names.

Each function takes the parts that the whole stack shares, and returns what Megatron's HybridStack
builds in that slot. A letter of your own has such a function, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
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
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megacpp_mcore.layers.attention import SelfAttention
from megacpp_mcore.layers.dispatched import (
    DispatchedCoreAttention,
    DispatchedExperts,
    DispatchedNorm,
    DispatchedRouter,
)
from megacpp_mcore.layers.m2rnn import M2RNNMixer
from megacpp_mcore.layers.mamba3 import Mamba3Mixer
from megacpp_mcore.layers.mamba3_layer import Mamba3Layer
from megacpp_mcore.layers.mixer import MixerSubmodules
from megacpp_mcore.layers.mla import AbsorbedMLASelfAttention, MLALayer, MLASelfAttention
from megacpp_mcore.layers.moe import MegacppMoELayer
from megacpp_mcore.layers.moe_block import MoEBlock
from megacpp_mcore.layers.parts import Linears
from megacpp_mcore.layers.residual import get_residual_add
from megacpp_mcore.layers.shared_expert import SharedExpert

_RESIDUAL_NORM = partial(DispatchedNorm, has_residual=True)
_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


@dataclass(frozen=True)
class StackParts:
    """What every layer of a stack is put together from.

    norms_inside: MLA's Q/KV norms are part of Transformer Engine's
    linears, which no other norm can be. residual_norm: the norm whose input is the layer's
    residual.
    """

    linears: Linears
    norms_inside: bool
    norm: Callable = DispatchedNorm
    residual_norm: Callable = _RESIDUAL_NORM


def mamba3_layer(parts: StackParts) -> ModuleSpec:
    mixer = ModuleSpec(module=Mamba3Mixer, submodules=_projections(parts))
    return ModuleSpec(
        module=Mamba3Layer,
        submodules=MambaLayerSubmodules(
            norm=parts.residual_norm, mixer=mixer, mamba_bda=get_residual_add
        ),
    )


def mixer_layer(
    parts: StackParts, self_attention: ModuleSpec, module: type = TransformerLayer, **more
) -> ModuleSpec:
    """A TransformerLayer of a norm, a token mixer and a residual, without an MLP."""
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.residual_norm,
            self_attention=self_attention,
            self_attn_bda=get_residual_add,
            **more,
        ),
    )


def m2rnn_layer(parts: StackParts) -> ModuleSpec:
    return mixer_layer(parts, ModuleSpec(module=M2RNNMixer, submodules=_projections(parts)))


def _projections(parts: StackParts) -> MixerSubmodules:
    return MixerSubmodules(in_proj=parts.linears.column, out_proj=parts.linears.row)


def deltanet_layer(parts: StackParts) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=parts.linears.column, out_norm=parts.norm, out_proj=parts.linears.row
    )
    return mixer_layer(parts, ModuleSpec(module=GatedDeltaNet, submodules=submodules))


def gqa_layer(parts: StackParts) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.linears.column,
            core_attention=DispatchedCoreAttention,
            linear_proj=parts.linears.row,
            q_layernorm=parts.norm,
            k_layernorm=parts.norm,
        ),
    )
    # Megatron's own hybrid spec fuses this norm into the projection; its checkpoint keys are kept.
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return mixer_layer(parts, attention, sharded_state_dict_keys_map=keys)


def mla_layer(parts: StackParts) -> ModuleSpec:
    attention = ModuleSpec(
        module=MLASelfAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            core_attention=DispatchedCoreAttention,
            **_mla_projections(parts),
            **_mla_norms(parts),
        ),
    )
    # The keys of Megatron's own hybrid spec, where the norms are part of TE's up-projections.
    keys = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    return mixer_layer(parts, attention, MLALayer, sharded_state_dict_keys_map=keys)


def _mla_norms(parts: StackParts) -> dict[str, type]:
    """Q/KV norms as modules, where the linears do not have them inside."""
    module = IdentityOp if parts.norms_inside else parts.norm
    return {"q_layernorm": module, "kv_layernorm": module}


def dsa_layer(parts: StackParts) -> ModuleSpec:
    indexer = ModuleSpec(
        module=DSAIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=parts.linears.duplicated,
            linear_wk=parts.linears.duplicated,
            k_norm=parts.norm,
            linear_weights_proj=parts.linears.duplicated,
        ),
    )
    core = ModuleSpec(module=DSAttention, submodules=DSAttentionSubmodules(indexer=indexer))
    attention = ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params=_CAUSAL,
        submodules=AbsorbedMLASelfAttentionSubmodules(
            core_attention=core,
            **_mla_projections(parts),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    return mixer_layer(parts, attention)


def _mla_projections(parts: StackParts) -> dict[str, type]:
    return {
        "linear_q_proj": parts.linears.column,
        "linear_q_down_proj": parts.linears.duplicated,
        "linear_q_up_proj": parts.linears.column,
        "linear_kv_down_proj": parts.linears.duplicated,
        "linear_kv_up_proj": parts.linears.column,
        "linear_proj": parts.linears.row,
    }


def mlp_layer(parts: StackParts) -> ModuleSpec:
    mlp = MLPSubmodules(linear_fc1=parts.linears.column, linear_fc2=parts.linears.row)
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.residual_norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_residual_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    return ModuleSpec(module=MLPLayer, submodules=submodules)


def moe_layer(parts: StackParts) -> ModuleSpec:
    # num_experts only has to be a number here; the layer reads the config's.
    upstream = get_moe_module_spec(use_te=parts.linears.is_te, num_experts=1)
    theirs = upstream.keywords["submodules"]
    moe = replace(
        theirs,
        router=DispatchedRouter,
        experts=DispatchedExperts,
        shared_experts=partial(SharedExpert, theirs.shared_experts),
    )
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.residual_norm,
        mlp=partial(MegacppMoELayer, submodules=moe),
        mlp_bda=get_residual_add,
    )
    return ModuleSpec(module=MoEBlock, submodules=submodules)
