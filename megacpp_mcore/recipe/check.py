"""A recipe against Megatron's own parser and validation, key by key.

Megatron parses in a process of its own: it fills global variables, and where there is no GPU its
questions about one are answered as an H200 would. What it validates is the argv, then the
TransformerConfig built from it; no model is built and nothing is written.
"""

import contextlib
import enum
import io
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megacpp_mcore.recipe import Recipe, answers_cache
from megacpp_mcore.recipe.lowering import Lowered, lower
from megacpp_mcore.recipe.source import RecipeError

# A recipe is checked for the pinned stack, of which a machine without a GPU lacks this part.
_TRANSFORMER_ENGINE = "2.17.1"
_STARTUP_S, _QUESTION_S = 300, 60


class MegatronRefusal(RecipeError):
    """Megatron's own parser or validation stops at a recipe's arguments."""


@contextlib.contextmanager
def megatrons_refusals() -> Iterator[None]:
    """Around Megatron's validation in a process that trains: its errors as MegatronRefusal."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        raise MegatronRefusal(f"Megatron refuses the recipe: {_words(error)}") from error


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
    """What Megatron made of one recipe. refused: its own words when it stopped, else None."""

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

    cached: an answer to the same question by the same installation may be an earlier one.

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
    """What the recipe asked for beside Megatron's validated arguments, where a process has them."""
    names = {expectation.name for expectation in lowered.expected}
    return list(_rows(lowered, {name: _value(args, name) for name in names}))


def _rows(lowered: Lowered, values: Mapping[str, Any]) -> Iterator[Row]:
    for expectation in lowered.expected:
        requested, got = _plain(expectation.value), values[expectation.name]
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
            [sys.executable, "-m", "megacpp_mcore.recipe.check"],
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


def _plain(value: Any) -> Any:
    """A value of Megatron's namespace as JSON: enums by name, dtypes as the flags spell them."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    dtypes = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
              "torch.uint8": "fp8"}  # fmt: skip
    return dtypes.get(str(value), str(value))


def _value(args: Any, name: str) -> Any:
    return _plain(getattr(args, name, "(no such argument)"))


def _answer(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In the process of its own: one fork a question, because Megatron parses once a process."""
    from megacpp_mcore.stack import bridges

    bridges.before_megatron(runs=False)
    import megatron.training.arguments  # noqa: F401  imported once, for every fork

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(_parse, questions, chunksize=1)


def _parse(question: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megacpp_mcore.stack import bridges

    # not megatron.core.__version__: in a .venv inside a checkout it has that checkout's commit
    version = {"version": metadata.version("megatron-core")}
    os.environ.update(question["environment"])
    if question["device"] == "cuda":
        _answer_for_transformer_engine()
    sys.argv = ["Megatron", *question["argv"]]
    usage = io.StringIO()
    try:
        with bridges.pretend_h200(), contextlib.redirect_stderr(usage):
            args = parse_and_validate_args()
            core_transformer_config_from_args(args)
    except SystemExit:  # argparse, after its words on stderr
        return {**version, "refused": (usage.getvalue().strip().splitlines() or ["exit"])[-1]}
    except Exception as error:
        return {**version, "refused": _words(error)}
    return {**version, "values": {name: _value(args, name) for name in question["names"]}}


def _answer_for_transformer_engine() -> None:
    """Where Transformer Engine is absent, let Megatron validate as if the pinned one were there."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    if utils.get_te_version() != Version("0.0.0"):
        return
    utils._te_version = Version(_TRANSFORMER_ENGINE)
    for module in (moe_utils, rope_utils):
        for name, value in vars(module).items():
            if name.startswith("fused_") and value is None:
                setattr(module, name, object())  # asked about, never called


def _words(error: Exception) -> str:
    """An exception in one line; an assertion without a message is shown by its source line."""
    text = " ".join(str(error).split())
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"


def _main() -> None:
    # Megatron prints to stdout: that goes to stderr, so that stdout holds the answer alone.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(_answer(json.load(sys.stdin)), answer)


if __name__ == "__main__":
    _main()
