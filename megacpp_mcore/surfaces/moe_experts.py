"""Surface `moe_experts`: the routed experts of a rank, tokens [t, h] sorted by expert."""

from functools import partial
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    STACK_TESTS,
    TE,
    TE_GRAPH,
    Unbuildable,
    in_the_models_dtype,
    transformer_engine,
    triton,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

# Optimizers that treat a weight as a matrix; Megatron gives them those with two dimensions only.
_MATRIX_OPTIMIZERS = ("muon", "adaptive_muon", "soap")


FUSED, GROUPED_MM = "fused_moe", "grouped_mm"
# They read the tokens of each expert on the device: a captured step can hold them.
COUNTS_ON_DEVICE = (FUSED, GROUPED_MM)


def workload(device: str, config, optimizer: str) -> Workload:
    """ffn: columns of fc1's gate on one expert-tensor-parallel rank. optimizer: the recipe's,
    which may want every weight to be a matrix."""
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    return Workload.of(
        device,
        dtype_of(config),
        swiglu=config.gated_linear_unit and config.activation_func.__name__ == "silu",
        squared_relu=not config.gated_linear_unit
        and config.activation_func.__name__ == "squared_relu",
        bias=config.add_bias_linear,
        probs_on_input=config.moe_apply_probs_on_input,
        fp8=config.fp8,
        recomputed_activation="moe_act" in recomputed,
        optimizer=optimizer,
        hidden_size=config.hidden_size,
        ffn=config.moe_ffn_hidden_size // config.expert_tensor_parallel_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    if "E" not in recipe.plan.letters:
        return None
    return workload(device, config_of(recipe), recipe.optimizer.optimizer)


def routes(recipe: "Recipe", device: str) -> bool:
    """Whether the experts of the recipe's layers take tokens in their order, with a map."""
    from megacpp_mcore import dispatch  # which imports every surface

    asked = of_recipe(recipe, device)
    try:
        return dispatch.choose("moe_experts", asked, recipe.backends).observed == FUSED
    except dispatch.DispatchError:
        return False


def _recomputes(workload: Workload) -> str | None:
    if workload.size("recomputed_activation"):
        return 'recompute.moe "act": only Transformer Engine\'s experts compute it again'
    return None


def _plain(workload: Workload) -> str | None:
    """The `supports` of experts that are not Transformer Engine's."""
    return _recomputes(workload) or in_the_models_dtype(workload)


def _grouped(workload: Workload) -> str | None:
    """Why GroupedMMExperts are not the experts that are asked for."""
    if not workload.size("swiglu"):
        return "the activation is not SwiGLU, the only one that it has"
    return _stacked(workload) or in_the_models_dtype(workload)


def _fused_kind(workload: Workload) -> str | None:
    """Why FusedExperts are not the experts that are asked for."""
    if not workload.size("swiglu") and not workload.size("squared_relu"):
        return "the activation is neither SwiGLU nor squared ReLU"
    return _stacked(workload)


def _stacked(workload: Workload) -> str | None:
    """Why experts whose weights are one tensor, multiplied by grouped products, do not serve."""
    for name in ("bias", "probs_on_input"):
        if workload.size(name):
            return f"{name}: it has none"
    if (optimizer := workload.size("optimizer")) in _MATRIX_OPTIMIZERS:
        return (
            f"optimizer {optimizer}: the weights are one 3-d tensor, no matrices, so that Megatron "
            "would train them with Adam"
        )
    rows = 16 // (4 if workload.dtype == "float32" else 2)
    for name in ("hidden_size", "ffn"):
        if workload.size(name) % rows:
            return f"{name} {workload.size(name)}: a grouped product takes multiples of {rows}"
    return _recomputes(workload)


def _grouped_mm(workload: Workload) -> str | None:
    """torch's grouped matrix product, which a CPU has too, without any gain."""
    if workload.device != "cuda":
        return f"on {workload.device} it is a loop over the experts, as the reference is"
    return _grouped(workload)


def _fused(workload: Workload) -> str | None:
    """Grouped products, and Triton's kernels around them."""
    return triton(workload) or _fused_kind(workload) or _without_nvcc(workload)


def _without_nvcc(workload: Workload) -> str | None:
    """Why products of our own cannot be compiled where they would be taken instead of torch's."""
    from megacpp_mcore.kernels.moe_experts import hopper_products

    reason = hopper_products.LIBRARY.reason() if workload.dtype == "bfloat16" else None
    return reason if isinstance(reason, Unbuildable) else None


_TESTS = ("tests/kernels/test_moe_experts.py", *KERNEL_TESTS)
_LAYOUT = "tokens [t, h] sorted by expert, counts [experts] on the host"
# What fused_moe saves is around the operator, where a bench of the layer sees it.
_LAYER = "layer-moe.json"
_backend = partial(Backend, tests=_TESTS, receipt="moe_experts.json")

SURFACE = Surface(
    "moe_experts",
    (
        _backend(
            FUSED, "megacpp_mcore.layers.experts:FusedExperts", _fused,
            opt_in=in_the_models_dtype, role="chosen",
            ruled_out=whatever_the_machine(_fused_kind),
            removes="where every expert is local: the permuted copies that are kept for the "
            "backward pass, the sums of the routed and the shared "
            "expert's outputs, of the residual and of the tokens' gradients, and on Hopper the "
            "passes that add weight gradients to main_grad and, with the norm triton, those of the "
            "router's product and of the norm's gradient over the tokens",
            layout="tokens [t, h] and the router's map where every expert is local; else as "
            "grouped_mm's",
            dtypes="bf16, fp16, fp32; SwiGLU or squared ReLU in fp32; our own products bf16 on "
            "Hopper, torch's elsewhere; with precision.fp8 only where named, in the model's dtype",
            fallback=GROUPED_MM,
            tests=(*_TESTS, "tests/kernels/test_moe_routed.py", "tests/kernels/test_moe_hopper.py",
                   "tests/layers/test_moe.py", "tests/layers/test_moe_norm.py",
                   "tests/layers/test_moe_residual.py", "tests/layers/test_moe_whole.py",
                   "tests/gpu/test_moe_experts_gpu.py", "tests/gpu/test_moe_products_gpu.py",
                   "tests/gpu/test_moe_tokens_gpu.py"),
            receipt=_LAYER,
            figures=(
                Figure(_LAYER, "recipe", "an E layer"),
                Figure(_LAYER, "moe_experts=grouped_mm", "with grouped_mm"),
            ),
            builds="megacpp_mcore.kernels.moe_experts.hopper_products:LIBRARY",
            exit_when="a whole run is no faster with it than with grouped_mm",
        ),
        _backend(
            GROUPED_MM, "megacpp_mcore.layers.experts:GroupedMMExperts", _grouped_mm,
            ruled_out=whatever_the_machine(_grouped),
            removes="one GEMM launch an expert, and the wait for the counts on the host. SwiGLU "
            "without bias, not in FP8, and not under Muon, which would leave its weights, one 3-d "
            "tensor, to Adam: the recipe and dispatch refuse those",
            layout="tokens [t, h] sorted by expert, counts [experts] anywhere; h and f multiples "
            "of 8",
            dtypes="bf16; fp16 and fp32 outside torch.compile", fallback=TE,
            exit_when="fused_moe serves wherever it does, and is not slower with expert "
            "parallelism",
            before={
                TE: "of the measured sizes only 64k tokens with 16 experts are faster with it: the "
                "order does not depend on the batch, and with 4k and 16k it takes up to seven "
                "times as long, as the host waits for the counts",
            },
        ),
        _backend(
            TE, "megacpp_mcore.layers.parts:te_experts", transformer_engine,
            removes="one GEMM launch an expert, in fc1, SwiGLU and fc2",
            layout=_LAYOUT,
            dtypes="bf16, fp16, fp32; fp8 inside", fallback=REFERENCE,
            exit_when="FP8 experts, recomputed activations or Muon are served by grouped_mm, too",
            skips={
                **TE_GRAPH, "float32": "TE multiplies float32 in TF32; the model runs it in bf16",
            },
        ),
        reference(
            "megacpp_mcore.layers.parts:sequential_experts", _plain,
            ruled_out=whatever_the_machine(_plain),
            removes="nothing: Megatron's SequentialMLP, one expert after another",
            layout=_LAYOUT,
            dtypes="bf16, fp16, fp32", tests=(*_TESTS, *STACK_TESTS), receipt="moe_experts.json",
        ),
    ),
    of_recipe,
    blocks="E",
    case="megacpp_mcore.kernels.moe_experts.case:MoeExpertsCase",
)  # fmt: skip
