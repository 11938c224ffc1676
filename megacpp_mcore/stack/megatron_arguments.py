"""Megatron's own parser and validation on a command line, as a program of its own.

    python -m megacpp_mcore.stack.megatron_arguments < questions.json > answers.json

Megatron fills global variables as it parses; where there is no GPU it is told that there is an
H200. What it validates is the argv, then the TransformerConfig built from it;
no model is built and nothing is written.
"""

import contextlib
import enum
import gc
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

# A recipe is checked for the pinned stack, of which a machine without a GPU lacks this part.
_TRANSFORMER_ENGINE = "2.17.1"
# What Megatron imports of torch for models that are spread and saved: a quarter of all imports.
_NOT_HERE = ("torch.distributed.tensor", "torch.distributed._tensor",
             "torch.distributed.checkpoint", "torch.utils.cpp_extension")  # fmt: skip


def plain(value: Any) -> Any:
    """A value of Megatron's namespace as JSON: enums by name, dtypes as the flags spell them."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    dtypes = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
              "torch.uint8": "fp8"}  # fmt: skip
    return dtypes.get(str(value), str(value))


def value_of(args: Any, name: str) -> Any:
    """The value of that name in Megatron's namespace as JSON, or a word that there is none."""
    return plain(getattr(args, name, "(no such argument)"))


def words(error: Exception) -> str:
    """An exception in one line; an assertion without a message is shown by its source line."""
    text = " ".join(str(error).split())
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"


def answers(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One answer a question, each parsed in a process of its own where there are several."""
    from megacpp_mcore.stack import bridges

    bridges.before_megatron(runs=False)
    _StandIns.install()
    import megatron.training.arguments  # noqa: F401  imported once, for every fork

    if len(questions) == 1:
        return [_parse(questions[0])]
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(_parse, questions, chunksize=1)


class _Absent:
    """Stands for a class of a module that is not imported: nothing is one, and none is made."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{type(self).__name__} is not imported where Megatron only parses")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of _NOT_HERE, and of what is in them, give a module of absent classes."""

    @classmethod
    def install(cls) -> None:
        import torch

        # Beside a GPU Transformer Engine is imported, too, which may make some of them.
        if not torch.cuda.is_available():
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in _NOT_HERE or name.startswith(tuple(f"{part}." for part in _NOT_HERE)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_Absent,), {})

        module.__getattr__ = absent


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
        return {**version, "refused": words(error)}
    return {**version, "values": {name: value_of(args, name) for name in question["names"]}}


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


def _main() -> None:
    gc.disable()  # of a process that ends at once: half a second of its imports
    # Megatron prints to stdout: that goes to stderr, so that stdout holds the answers alone.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump(answers(json.load(sys.stdin)), out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without taking down every module, a quarter of a second


if __name__ == "__main__":
    _main()
