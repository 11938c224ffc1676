"""Combinations that cannot run, found before anything is launched.

A rule is the plugin's own, or one that Megatron-Core 0.19.2 does not check, checks late (in a layer
or a schedule) or reports unclearly. What its parser and validation refuse at once and clearly is
left to them: `megacpp recipe check` runs them, and so does a run before it builds a model. A
refusal names the key, its value, where that came from and what is allowed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacpp_mcore.recipe.fields import optional
from megacpp_mcore.recipe.refusal import Refusal, Rules, shown
from megacpp_mcore.recipe.rules import (
    attention,
    backends,
    blocks,
    cuda_graphs,
    dispatcher,
    experts,
    numbers,
    parallel,
    recompute,
    run,
)
from megacpp_mcore.recipe.source import KEYS

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

_TOPICS = (
    backends, dispatcher, parallel, recompute, attention, experts, blocks, numbers, run,
    cuda_graphs,
)  # fmt: skip


def refusals(recipe: "Recipe") -> Sequence[Refusal]:
    """Every refused key; empty for a recipe that can run."""
    rules = Rules(recipe)
    _ranges(rules)
    _words(rules)
    if rules.found:
        return rules.found  # the rules below divide by these values
    for topic in _TOPICS:
        topic.check(rules)
    return rules.found


def completed(recipe: "Recipe") -> tuple["Recipe", Sequence[Refusal]]:
    """The recipe with the keys filled in that it leaves to us, and what is refused of it."""
    recipe = dispatcher.completed(recipe)
    if recipe.get(cuda_graphs.IMPL) == cuda_graphs.AUTO:
        return _without_auto(recipe)
    return recipe, refusals(recipe)


def _without_auto(recipe: "Recipe") -> tuple["Recipe", Sequence[Refusal]]:
    """The recipe with `launch.cuda_graph_impl = "auto"` replaced, and what is refused of it.

    The whole step is captured unless a rule forbids it. The key's origin then begins with "auto",
    and names that rule.
    """
    eager, captured = (cuda_graphs.replaced(recipe, impl) for impl in ("none", "full_iteration"))
    of_eager, of_captured = refusals(eager), refusals(captured)
    anyway = {refusal.key: refusal.reason for refusal in of_eager}
    against = [r for r in of_captured if anyway.get(r.key) != r.reason]
    if not against:
        return captured, of_captured
    first = against[0]
    why = f"auto, but {first.key} = {shown(recipe.get(first.key))} {first.reason}"
    return cuda_graphs.replaced(recipe, "none", why), of_eager


def _ranges(r: Rules) -> None:
    """Refuse numbers outside the bounds that the schema gives their key."""
    for dotted, key in KEYS.items():
        value = key.of(r.recipe)
        if value is None or isinstance(value, bool | str):
            continue
        numbers = [
            number
            for number in (value if isinstance(value, tuple) else (value,))
            if isinstance(number, int | float) and not isinstance(number, bool)
        ]
        for reason in dict.fromkeys(why for n in numbers for why in key.bounds.reasons(n)):
            unset = ", or leave it out" if optional(key.hint) else ""
            r.refuse(True, dotted, f"must be {reason}{unset}")


def _words(r: Rules) -> None:
    """Refuse strings that Megatron's command line would misread."""
    for dotted, key in KEYS.items():
        value = key.of(r.recipe)
        if not isinstance(value, str | tuple) or key.flag is None:
            continue
        r.refuse(value == (), dotted, "must have an entry, or be left out")
        texts = value if isinstance(value, tuple) else (value,)
        r.refuse(
            any(isinstance(text, str) and (not text or text[0] == "-") for text in texts),
            dotted,
            "must not be empty or begin with a dash: Megatron would take it for a flag",
        )
        r.refuse(
            any(isinstance(text, str) and "\0" in text for text in texts),
            dotted,
            "must not have a NUL, which no argument of a program can have",
        )
