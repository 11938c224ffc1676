"""MLA's up-projections and RoPE as one operator, in place of the two linears and `mla_rope`.

The linears stay the owners of their weights: parameters, checkpoint keys and the ranks' gathers of
updated weights are as they were, and gradients reach main_grad where the linears would add them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mla_rope import RotaryTable
from megacpp_mcore.layers import mla_down
from megacpp_mcore.layers.param_gather import only_multiplies, wait_for_param_gather
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import mla_up
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.workload import current_device

if TYPE_CHECKING:
    from megacpp_mcore.layers.mla import MLASelfAttention


class MLAUpError(MegacppError):
    """Up-projections that the named backend of `mla_up` cannot stand for."""


def decided(attention: "MLASelfAttention") -> Callable | None:
    """The operator that dispatch chose for a layer; None: its reference, which is the linears and
    then what serves `mla_rope`.

    Raises DispatchError for a named backend that does not support the config, and MLAUpError for
    linears that do more than multiply by a whole weight, as another's spec may have them.
    """
    config = attention.config
    requests = plugin_settings(config).backends
    workload = mla_up.workload(current_device(), config, requests)
    decision = dispatch.decide(mla_up.SURFACE.name, workload, requests)
    if decision.observed == REFERENCE:
        return None
    dims = {"q": config.qk_pos_emb_head_dim, "kv": config.v_head_dim}
    for which, more in dims.items():
        rows = attention.num_attention_heads_per_partition * (config.qk_head_dim + more)
        linear = getattr(attention, name := f"linear_{which}_up_proj")
        if not (only_multiplies(linear) and len(linear.weight) == rows):
            raise MLAUpError(
                f'mla_up = "{decision.observed}" is asked for, but {name} is a '
                f"{type(linear).__name__} with a bias, a norm inside, a forward pass of its own "
                f"or another weight than one of {rows} rows; set mla_up = "
                f'"{REFERENCE}" in [backends] or remove the key'
            )
    return decision.load()


def apply(
    operator: Callable, attention: "MLASelfAttention", q_latent: Tensor, kv_latent: Tensor,
    k_pos: Tensor, rotary: RotaryTable, bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v by what `decided` returned. Shapes: `megacpp_mcore.kernels.mla_up.mla_up`."""
    linears = attention.linear_q_up_proj, attention.linear_kv_up_proj
    weights = (wait_for_param_gather(linear).weight for linear in linears)
    return operator(
        q_latent, kv_latent, k_pos, *weights, rotary, qk_head_dim=attention.config.qk_head_dim,
        cu_seqlens=bounds, into_main_grad=all(map(mla_down.accumulates, linears)),
    )  # fmt: skip
