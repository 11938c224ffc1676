"""Builders for stack specs: each asks dispatch for a module once the layer's config is known."""

from functools import partial

import torch
from megatron.core.transformer.identity_op import IdentityOp

from megacpp_mcore import dispatch
from megacpp_mcore.layers.core_attention import CoreAttentionByLayout, window_of
from megacpp_mcore.layers.norm import build as build_norm
from megacpp_mcore.layers.recompute import recomputed
from megacpp_mcore.layers.router import DispatchedTopKRouter
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import core_attention, moe_experts, router_gating, router_topk
from megacpp_mcore.surfaces import norm as norm_surface
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.workload import current_device


class DispatchedCoreAttention:
    """Builds the attention cores that dispatch chooses for the layer's config.

    A layer does not know at construction whether batches will be packed, so a backend is chosen and
    recorded for both layouts. If no backend supports whole rows, construction fails; if none
    supports packed documents, the first packed batch fails.
    """

    def __new__(cls, config, layer_number, **kwargs) -> torch.nn.Module:
        if config.multi_latent_attention and "k_channels" not in kwargs:
            return IdentityOp()  # a placeholder: MLA replaces what its base class builds here
        dims = kwargs.get("k_channels"), kwargs.get("v_channels")
        window = window_of(config, layer_number)

        def choose(layout: str) -> type:
            workload = core_attention.workload(current_device(), config, *dims, layout, window)
            requests = plugin_settings(config).backends
            return dispatch.decide("core_attention", workload, requests).load()

        def build(core: type) -> torch.nn.Module:
            return core(config=config, layer_number=layer_number, **kwargs)

        whole = choose("sbhd")
        try:
            packed = choose("thd")
        except dispatch.DispatchError as error:
            return CoreAttentionByLayout(config, build(whole), None, str(error))
        if packed is whole:
            return build(whole)
        return CoreAttentionByLayout(config, build(whole), build(packed))


class DispatchedNorm:
    """Builds the norm that dispatch chooses for the layer's config.

    has_residual: the norm's input is also the layer's residual. A norm that `fuses_residual` then
    returns (normalised, residual), the others the normalised alone.
    """

    def __new__(
        cls, config, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> torch.nn.Module:
        workload = norm_surface.workload(current_device(), config)
        norm = dispatch.decide("norm", workload, plugin_settings(config).backends).load()
        return build_norm(norm, config, hidden_size, eps, has_residual)


class DispatchedRouter:
    """Builds the router whose gating product and choice of experts dispatch decides on for the
    layer's config."""

    def __new__(cls, config, **kwargs) -> torch.nn.Module:
        requests = plugin_settings(config).backends
        decisions = [
            dispatch.decide(surface.NAME, surface.workload(current_device(), config), requests)
            for surface in (router_gating, router_topk)
        ]
        product, choose = (
            None if decision.observed == REFERENCE else decision.load() for decision in decisions
        )
        return DispatchedTopKRouter(config=config, product=product, choose=choose, **kwargs)


class DispatchedExperts:
    """Builds the routed experts that dispatch chooses for the layer's config."""

    def __new__(cls, num_local_experts: int, config, pg_collection=None, name=None):
        plugin = plugin_settings(config)
        workload = moe_experts.workload(current_device(), config, plugin.optimizer)
        build = dispatch.decide("moe_experts", workload, plugin.backends).load()
        experts = build(num_local_experts, config, pg_collection=pg_collection, name=name)
        if "experts" in plugin.recompute.moe:
            for name in {"forward", "routed"} & set(dir(experts)):
                call = partial(recomputed, config, pg_collection.tp, getattr(experts, name))
                setattr(experts, name, call)
        return experts
