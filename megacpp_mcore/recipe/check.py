"""Compare a recipe, key by key, with what Megatron's own parser and validation read."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.recipe import Recipe, answers_cache
from megacpp_mcore.recipe.lowering import Lowered, lower
from megacpp_mcore.recipe.source import RecipeError
from megacpp_mcore.stack.megatron_arguments import plain, value_of, words

_STARTUP_S, _QUESTION_S = 300, 60


class MegatronRefusal(RecipeError):
    """Megatron's own parser or validation stops at a recipe's arguments."""


@contextlib.contextmanager
def megatrons_refusals() -> Iterator[None]:
    """Turn errors of Megatron's validation inside the block into MegatronRefusal."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        raise MegatronRefusal(f"Megatron refuses the recipe: {words(error)}") from error


@dataclass(frozen=True)
class Row:
    """One value: what the recipe asked for, and what Megatron will run with."""

    key: str
    name: str
    requested: Any
    got: Any

    @property
    def ok(self) -> bool:
        return self.requested == self.got


@dataclass(frozen=True)
class Report:
    """How Megatron reads one recipe. refused: its own message if it refused, else None."""

    recipe: str
    megatron_version: str
    rows: tuple[Row, ...]
    refused: str | None

    @property
    def differences(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    @property
    def ok(self) -> bool:
        return self.refused is None and not self.differences


def check(recipes: Sequence[Recipe], *, cached: bool = False) -> list[Report]:
    """Parse and validate lowered recipes with the Megatron that is installed, one after another.

    cached: an earlier answer of the same installation to the same question may be used.

    Raises RecipeError when Megatron's parser cannot be run at all.
    """
    lowered = [lower(recipe) for recipe in recipes]
    questions = [
        {
            "argv": item.argv,
            "environment": {
                **item.environment,
                **{"WORLD_SIZE": str(recipe.world_size), "RANK": "0", "LOCAL_RANK": "0"},
            },
            "device": recipe.launch.device,
            "names": [expectation.name for expectation in item.expected],
        }
        for recipe, item in zip(recipes, lowered, strict=True)
    ]
    answers = answers_cache.through(questions, _ask) if cached else _ask(questions)
    return [
        Report(
            recipe.name,
            answer["version"],
            tuple(_rows(item, answer["values"])) if "values" in answer else (),
            answer.get("refused"),
        )
        for recipe, item, answer in zip(recipes, lowered, answers, strict=True)
    ]


def compare(lowered: Lowered, args: Any) -> list[Row]:
    """Compare what the recipe asked for with `args`, Megatron's validated arguments."""
    names = {expectation.name for expectation in lowered.expected}
    return list(_rows(lowered, {name: value_of(args, name) for name in names}))


def _rows(lowered: Lowered, values: Mapping[str, Any]) -> Iterator[Row]:
    for expectation in lowered.expected:
        requested, got = plain(expectation.value), values[expectation.name]
        if isinstance(requested, list) and len(requested) == 1 and not isinstance(got, list):
            requested = requested[0]  # Megatron unwraps some lists of one
        if requested is False and got is None:
            got = False  # a switch that Megatron leaves at None until it is given
        yield Row(expectation.key, expectation.name, requested, got)


def _ask(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Megatron's answers, from a process of its own."""
    timeout = _STARTUP_S + _QUESTION_S * len(questions)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "megacpp_mcore.stack.megatron_arguments"],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise RecipeError(f"Megatron's parser gave no answer in {timeout} s") from error
    try:
        return json.loads(process.stdout)
    except json.JSONDecodeError as error:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RecipeError(
            f"Megatron's parser cannot be run: exit status {process.returncode}: {last}"
        ) from error
