"""Builders that a stack spec names as modules; they ask dispatch with the layer's config."""

from functools import partial

import torch
from megatron.core.transformer.identity_op import IdentityOp

from megacpp_mcore import dispatch, problems
from megacpp_mcore.layers.recompute import recomputed
from megacpp_mcore.layers.settings import plugin_settings


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


class DispatchedNorm:
    """Builds the norm that dispatch chooses for the layer's config."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        problem = problems.norm(problems.current_device(), config)
        norm = dispatch.decide("norm", problem, plugin_settings(config).backends).load()()
        return norm(config=config, hidden_size=hidden_size, eps=eps)


class DispatchedExperts:
    """Builds the routed experts that dispatch chooses for the layer's config."""

    def __new__(cls, num_local_experts: int, config, pg_collection=None, name=None):
        plugin = plugin_settings(config)
        problem = problems.moe_experts(problems.current_device(), config, plugin.optimizer)
        build = dispatch.decide("moe_experts", problem, plugin.backends).load()()
        experts = build(num_local_experts, config, pg_collection=pg_collection, name=name)
        if "experts" in plugin.recompute.moe:
            experts.forward = partial(recomputed, config, pg_collection.tp, experts.forward)
        return experts
