"""Surface `mla_up`: up-projections and RoPE of MLA, from the latents to what attention takes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces import linear, mixer_core, mla_rope, norm
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    TE,
    always,
    cuda_only,
    import_reason,
    in_the_models_dtype,
    one_context_rank,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

_INSIDE = mla_rope.SURFACE.name
MOST = 64  # dims of a part of a head, and of a latent: more do not fit the registers


def workload(device: str, config, requests: Mapping[str, str]) -> Workload:
    """The workload of `mla_rope`, and ranks of the latents; requests: the recipe's [backends].

    norms_inside: the up-projections have the latents' norms inside, as Transformer Engine's may.
    """
    inside = mla_rope.workload(device, config)
    whole = mixer_core.around(inside, _INSIDE, config.tensor_model_parallel_size, requests)
    return Workload.of(
        device,
        whole.dtype,
        **dict(whole.sizes),
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        fp8=config.fp8,
        fp4=getattr(config, "fp4", None),
        norms_inside=bool(config.qk_layernorm) and _are_transformer_engines(requests),
        delays_weight_gradients=bool(getattr(config, "delay_wgrad_compute", False)),
    )


def _are_transformer_engines(requests: Mapping[str, str]) -> bool:
    """Whether the stack's linears and norms would be, on a machine that has it."""
    from megacpp_mcore import dispatch  # which imports every surface

    names = (linear.SURFACE.name, norm.SURFACE.name)
    return all(dispatch.requested(name, requests) in (dispatch.AUTO, TE) for name in names)


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    """The workload of a recipe, as of `mla_rope`."""
    if "+" not in recipe.plan.symbols:
        return None
    return workload(device, config_of(recipe), recipe.backends)


def _options(workload: Workload) -> str | None:
    """Why the kernels cannot serve a recipe on any machine."""
    over_ranks = "the up-projections gather and scatter tokens over the ranks"
    if reason := mixer_core.options(workload, over_ranks) or one_context_rank(workload):
        return reason
    if workload.dtype != "bfloat16":
        return f"its products are of bfloat16, not {workload.dtype}"
    if (kind := workload.size("fp4")) is not None:
        return f"{kind}: it multiplies in bfloat16, Transformer Engine's linears in that"
    if workload.size("norms_inside"):
        return (
            f"qk_layernorm with {TE}'s norm, which is inside the up-projections: name another norm"
        )
    if workload.size("delays_weight_gradients"):
        return "delay_wgrad_compute: it computes the weights' gradients with the others"
    return _widths(workload)


def _widths(workload: Workload) -> str | None:
    if workload.size("q_lora_rank") is None:
        return "q_lora_rank is not set: queries come from the hidden states, not from a latent"
    rotary, pos = workload.size("rotary_dim"), workload.size("pos_dim")
    if rotary != pos:
        return f"rotary_dim {rotary} of {pos}: it turns all dims of the rotary part"
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "pos_dim", "v_head_dim"):
        if (size := workload.size(name)) > MOST:
            return f"{name} {size}: it takes {MOST} at most"
    return None


def _triton(workload: Workload) -> str | None:
    reason = cuda_only("its kernels run", workload) or _options(workload)
    return reason or import_reason("triton")


_KERNELS = "megacpp_mcore.kernels.mla_up"
_facts = {
    "layout": "latents [s, b, rank], k_pos [s, b, pos], weights [heads x dims, rank] -> q, k, v "
    "[s, b, heads, dims], or packed thd",
    "tests": (
        "tests/kernels/test_mla_up.py", "tests/kernels/test_mla_up_main_grad.py",
        "tests/layers/test_mla_up_layer.py",
        "tests/gpu/test_mla_up_gpu.py", *KERNEL_TESTS,
    ),
}  # fmt: skip
_LAYER = "layer-mla-up.json"
TRITON = "triton"

SURFACE = Surface(
    "mla_up",
    (
        Backend(
            TRITON, f"{_KERNELS}.triton:mla_up", _triton,
            opt_in=in_the_models_dtype, role="chosen",
            ruled_out=whatever_the_machine(_options),
            removes="the up-projections' outputs and their gradients: a tile of latents is "
            "multiplied and rotated on the chip, and q, k and v are written once; the gradients of "
            "q, k and v are read twice, and none of their size is written. One rank, whole weights "
            f"without a norm inside, and dims and ranks of {MOST} at most",
            dtypes="bf16, with precision.fp8 only where named; summed and rotated in fp32, rounded "
            "once; weight gradients added to main_grad in fp32",
            fallback=REFERENCE,
            exit_when="the linears and mla_rope are as fast in layer A, or Transformer Engine "
            "fuses plain RoPE into MLA's up-projections",
            receipt=_LAYER, figures=(Figure(_LAYER, "recipe", "layer A"),), **_facts,
        ),
        reference(
            f"{_KERNELS}:mla_up", always,
            removes="nothing: in a layer the linears and then mla_rope, which has backends of its "
            "own; in a bench of the operator mla_rope's definition in plain torch",
            dtypes="bf16, fp16, fp32, fp64; rotated in fp32 or wider",
            receipt=_LAYER, figures=(Figure(_LAYER, "mla_up=reference", "layer A"),), **_facts,
        ),
    ),
    of_recipe,
    blocks="A",
    case="megacpp_mcore.kernels.mla_up.case:MLAUpCase",
)  # fmt: skip
