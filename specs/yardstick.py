"""What `--spec megacpp_mcore.specs.yardstick NAME` names: Megatron's own stack, to compare with.

Every block, norm and linear is Megatron's (megatron.core.models.hybrid.hybrid_layer_specs), with
Mamba-2 in the M slot. Only the core attention is chosen by dispatch, as in our stack: Transformer
Engine's fused attention fails in the backward pass under the pinned torch's cuDNN.
"""

from megacpp_mcore.errors import MegacppError


class YardstickError(MegacppError):
    """Megatron's own stack spec is unavailable."""


try:
    from dataclasses import replace

    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megacpp_mcore.layers.dispatched import DispatchedCoreAttention
except (ImportError, AssertionError) as error:  # Megatron asserts that Transformer Engine is there
    raise YardstickError(
        f"Megatron's hybrid stack spec cannot be used: {error or 'it needs Transformer Engine'}"
    ) from error


def _with_our_core(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    inner = replace(attention.submodules, core_attention=DispatchedCoreAttention)
    attention = replace(attention, submodules=inner)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


_native = hybrid_stack_spec.submodules
yardstick_stack_spec = replace(
    hybrid_stack_spec,
    submodules=replace(
        _native,
        mla_layer=_with_our_core(_native.mla_layer),
        attention_layer=_with_our_core(_native.attention_layer),
    ),
)
