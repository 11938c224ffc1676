"""Keep [backends] moe_dispatch and Megatron's keys of its token dispatchers consistent.

A recipe names a dispatcher by `backends.moe_dispatch`, or by Megatron's moe_token_dispatcher_type
with moe_flex_dispatcher_backend; the other is filled in. If it names both, they must agree. If it
names neither, or "auto", the layers choose, and Megatron's own blocks have its all-to-all
dispatcher.
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
    """The recipe with the keys filled in that it left out."""
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
    if words is None or not r.has("E"):  # without E nothing is filled in
        return
    for key, word in ((TYPE, words.type), (FLEX, words.flex)):
        if word is not None:
            r.must_be(key, word, f"with {r.text(KEY)}, or be left out")


def _in_ours(recipe: "Recipe", backend: str, origin: str) -> "Recipe":
    backends, origins = recipe.backends | {NAME: backend}, {**recipe.origins, KEY: origin}
    return replace(recipe, backends=backends, origins=origins)


def _in_megatrons_words(recipe: "Recipe", backend: str, origin: str) -> "Recipe":
    """The recipe with Megatron's keys for `backend`, except those that it sets itself."""
    words = MEGATRONS[backend]
    values = {TYPE: words.type, FLEX: words.flex}
    unsaid = {k: v for k, v in values.items() if v is not None and k not in recipe.origins}
    moe = replace(recipe.moe, **{key.partition(".")[2]: value for key, value in unsaid.items()})
    return replace(recipe, moe=moe, origins={**recipe.origins, **dict.fromkeys(unsaid, origin)})


def _nothing_is_exchanged(recipe: "Recipe", backend: str) -> bool:
    """Megatron's all-to-all on one rank only permutes, as other backends may, too."""
    p = recipe.parallel
    return backend == ALLTOALL and p.expert_model_parallel_size == 1
