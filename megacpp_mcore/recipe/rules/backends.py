"""Rules about [backends]: a named backend that this recipe's model rules out on any machine."""

from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.surfaces import registry as surfaces

_REASONS = {
    ("linear", "reference"): surfaces.in_the_models_dtype,
    ("norm", "liger"): surfaces.liger_norm_kind,
    ("mamba3_prep", "inductor"): surfaces.inductor_options,
    ("m2rnn_prep", "inductor"): surfaces.inductor_options,
    ("moe_experts", "grouped_mm"): surfaces.grouped_experts,
    ("moe_experts", "reference"): surfaces.plain_experts,
}


def check(r: Rules) -> None:
    for (surface, backend), reason in _REASONS.items():
        key = f"backends.{surface}"
        if r[key] != backend:
            continue
        problem = surfaces.REGISTRY[surface].problem(r.recipe, r["launch.device"])
        why = problem and reason(problem)
        r.refuse(why, key, f"must be left out, or name another: {why}")
    r.refuse(
        r["backends.norm"] == "liger" and r.has("D"),
        "backends.norm",
        "must be left out, or name another: DSA's indexer has a LayerNorm, Liger's is an RMSNorm",
    )
