"""The surfaces of the model, by name. A new one is its module in this list."""

from megacpp_mcore.surfaces import (
    core_attention,
    embedding,
    linear,
    linear_cross_entropy,
    m2rnn,
    m2rnn_core,
    mamba3_core,
    mamba3_scan,
    mla_rope,
    mla_up,
    moe_dispatch,
    moe_experts,
    norm,
    rope_qk,
    router_gating,
    router_topk,
)
from megacpp_mcore.surfaces.backend import Surface

_MODULES = (
    linear, norm, router_gating, router_topk, moe_dispatch, moe_experts, core_attention, mla_rope,
    mla_up, rope_qk, mamba3_core, mamba3_scan, m2rnn_core, m2rnn, embedding, linear_cross_entropy,
)  # fmt: skip
REGISTRY: dict[str, Surface] = {module.SURFACE.name: module.SURFACE for module in _MODULES}
