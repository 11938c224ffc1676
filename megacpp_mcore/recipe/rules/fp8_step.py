"""Rules about FP8 in a whole captured step: the linears alone, and nothing that keeps a state."""

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.surfaces.moe_experts import FUSED

TENSORWISE = "tensorwise"
_EXPERTS = "backends.moe_experts"
_NAME = (
    f"name {_EXPERTS} = {shown(FUSED)}, whose products stay in the model's dtype, with "
    f"precision.fp8_recipe = {shown(TENSORWISE)}"
)
_UNTESTED = "FP8 in a captured step is untested otherwise"
_ONLY = {  # key -> its value in a captured step with FP8, and why
    "precision.fp8_recipe": (
        TENSORWISE,
        "its scales are computed on the device from the tensor itself; delayed scaling keeps a "
        "history of maxima between steps, and the others are untested in a captured step",
    ),
    "precision.fp8_param_gather": (
        False,
        "the update would have to write FP8 weights beside the graph",
    ),
    "parallel.tensor_model_parallel_size": (1, _UNTESTED),
    "parallel.context_parallel_size": (1, _UNTESTED),
    "parallel.expert_model_parallel_size": (1, _UNTESTED),
    "attention.kind": ("mla", _UNTESTED),
    "moe.moe_shared_expert_overlap": (False, _UNTESTED),
    "moe.moe_router_padding_for_quantization": (
        False,
        "the experts are not in FP8, and take any number of tokens",
    ),
}  # fmt: skip


def check(r: Rules, captured: str) -> None:
    """captured: "with" what makes the step one graph."""
    if not r.has("E"):
        r.must_be("precision.fp8", None, f"{captured}: {_UNTESTED}, and the pattern has no E")
        return
    if r[_EXPERTS] != FUSED:
        experts = "Transformer Engine's FP8 experts read their counts on the host"
        r.must_be("precision.fp8", None, f"{captured}: {experts}; or {_NAME}")
        return
    both = f"{captured} and {r.text('precision.fp8')}"
    for key, (value, why) in _ONLY.items():
        r.must_be(key, value, f"{both}: {why}")
    r.refuse(r.has_letter("D"), "model.pattern", f"may not have a D {both}: {_UNTESTED}")
