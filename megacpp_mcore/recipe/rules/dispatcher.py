"""How [backends] moe_dispatch and Megatron's keys for its token dispatchers agree.

A recipe names a dispatcher in one of two ways, and the other follows: `backends.moe_dispatch`, or
Megatron's moe_token_dispatcher_type with moe_flex_dispatcher_backend. Named in both ways, they must
say the same. Named in neither, or as "auto", the layers choose; Megatron's own blocks then have its
all-to-all dispatcher.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.surfaces.moe_dispatch import ALLGATHER, ALLTOALL, MEGATRONS, NAME, named_by

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

KEY = f"backends.{NAME}"
TYPE, FLEX = "moe.moe_token_dispatcher_type", "moe.moe_flex_dispatcher_backend"
_AUTO = "auto"


def completed(recipe: "Recipe") -> "Recipe":
    """The recipe with the way that it left out."""
    if "E" not in recipe.plan.letters:
        return recipe
    named = recipe.backends.get(NAME, _AUTO)
    if named in MEGATRONS:
        return _in_megatrons_words(recipe, named, f"as {KEY}")
    if TYPE not in recipe.origins:
        default = ALLTOALL if recipe.launch.device == "cuda" else ALLGATHER
        said = _in_ours(recipe, _AUTO, recipe.origins.get(KEY, "default"))
        return _in_megatrons_words(said, default, f"{KEY} = {shown(_AUTO)}")
    backend = named_by(recipe.get(TYPE), recipe.get(FLEX))
    if NAME in recipe.backends or backend is None or _nothing_is_exchanged(recipe, backend):
        return recipe
    return _in_ours(recipe, backend, f"as {TYPE}")


def check(r: Rules) -> None:
    words = MEGATRONS.get(r[KEY])
    if words is None:
        return
    for key, word in ((TYPE, words.type), (FLEX, words.flex)):
        if word is not None:
            r.refuse(
                r[key] != word, key, f"must be {shown(word)} with {r.told(KEY)}, or be left out"
            )


def _in_ours(recipe: "Recipe", backend: str, origin: str) -> "Recipe":
    backends, origins = recipe.backends | {NAME: backend}, {**recipe.origins, KEY: origin}
    return replace(recipe, backends=backends, origins=origins)


def _in_megatrons_words(recipe: "Recipe", backend: str, origin: str) -> "Recipe":
    """With what Megatron calls `backend`, where the recipe says nothing itself."""
    words = MEGATRONS[backend]
    values = {TYPE: words.type, FLEX: words.flex}
    unsaid = {k: v for k, v in values.items() if v is not None and k not in recipe.origins}
    moe = replace(recipe.moe, **{key.partition(".")[2]: value for key, value in unsaid.items()})
    return replace(recipe, moe=moe, origins={**recipe.origins, **dict.fromkeys(unsaid, origin)})


def _nothing_is_exchanged(recipe: "Recipe", backend: str) -> bool:
    """Megatron's all-to-all on one rank permutes, and so may any other."""
    p = recipe.parallel
    return backend == ALLTOALL and p.expert_model_parallel_size == 1
