"""One refused key, and the helper with which rules examine a recipe."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


@dataclass(frozen=True)
class Refusal:
    """One refused key. reason: what is allowed, as a sentence without a subject."""

    key: str
    reason: str

    def text(self, recipe: "Recipe") -> str:
        origins = [
            origin
            for key, origin in recipe.origins.items()
            if key == self.key or key.startswith(self.key + ".")  # an entry of a table
        ]
        origin = ", ".join(dict.fromkeys(origins)) or "default"
        return f"{self.key} = {shown(recipe.get(self.key))} ({origin}): {self.reason}"


def shown(value: Any) -> str:
    """A value as a recipe file spells it."""
    return "(unset)" if value is None else json.dumps(value, ensure_ascii=False)


class Rules:
    """A recipe under examination: the values, and the refusals so far."""

    def __init__(self, recipe: "Recipe"):
        self.recipe = recipe
        self.found: list[Refusal] = []

    def __getitem__(self, key: str) -> Any:
        return self.recipe.get(key)

    def has(self, symbols: str) -> bool:
        """Whether any of these Megatron symbols is in the plan, MTP included."""
        return any(symbol in self.recipe.plan.megatron_pattern for symbol in symbols)

    def has_letter(self, letter: str) -> bool:
        return letter in self.recipe.plan.letters

    def text(self, key: str) -> str:
        """`key = value`, to be used in a reason."""
        return f"{key} = {shown(self[key])}"

    def refuse(self, condition: Any, key: str, reason: str) -> None:
        if condition:
            self.found.append(Refusal(key, reason))

    def must_be(self, key: str, value: Any, why: str) -> None:
        """`key` must have `value`, None standing for unset. why: ends the sentence."""
        wanted = "left out" if value is None else shown(value)
        self.refuse(self[key] != value, key, f"must be {wanted} {why}")

    def ordered(self, low: str, high: str) -> None:
        """The value of key `low` must be at most that of `high`."""
        self.refuse(self[low] > self[high], low, f"must be at most {self.text(high)}")

    def multiple(self, key: str, of: str, value: int | None = None) -> None:
        """`key` must be a multiple of `of`: another key, or a text that describes `value`."""
        divisor = self[of] if value is None else value
        size = self[key]
        base = f"{of} = {divisor}" if value is None else of
        if size is not None and divisor is not None:
            self.refuse(size % divisor, key, f"must be a multiple of {base}")
