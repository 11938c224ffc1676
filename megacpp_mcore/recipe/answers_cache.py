"""Megatron's answers to `megacpp recipe check`, kept in the user's cache folder.

Importing Megatron takes many seconds, its answer depends only on the question and on what is
installed. Nothing else reads the folder; it may be deleted at any time.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megacpp_mcore.files import cache_folder, read_regular, write_atomically
from megacpp_mcore.surfaces.workload import current_device

_Question = Mapping[str, Any]
_Ask = Callable[[Sequence[_Question]], list[dict[str, Any]]]
_FILES = ("training/arguments.py", "training/argument_utils.py", "core/utils.py",
          "core/transformer/transformer_config.py", "core/model_parallel_config.py")  # fmt: skip
_MOST = 500  # files; the oldest ones are deleted


def folder() -> Path:
    """Where answers are kept."""
    return cache_folder("recipe-check")


def through(questions: Sequence[_Question], ask: _Ask) -> list[dict[str, Any]]:
    """One answer for each question: from the folder if it is there, the others from one call of
    `ask`, which are then stored. A folder that cannot be read or written counts as empty."""
    paths = [folder() / f"{_digest(question)}.json" for question in questions]
    answers = [_read(path) for path in paths]
    unknown = [at for at, answer in enumerate(answers) if answer is None]
    if unknown:
        for at, answer in zip(unknown, ask([questions[at] for at in unknown]), strict=True):
            answers[at] = answer
            with contextlib.suppress(OSError):
                paths[at].parent.mkdir(parents=True, exist_ok=True)
                write_atomically(paths[at], json.dumps(answer))
                _sweep(paths[at].parent)
    return answers


def _read(path: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and "version" in answer else None


def _sweep(place: Path) -> None:
    kept = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[_MOST:]:
        path.unlink(missing_ok=True)


def _digest(question: _Question) -> str:
    text = json.dumps([question, _installation()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _installation() -> list[Any]:
    """What an answer depends on: versions, the content of Megatron's files (patches change them)
    and of our own code that asks, the device."""
    names = ("megatron-core", "torch", "transformer-engine")
    spec = importlib.util.find_spec("megatron")
    roots = [Path(place) for place in spec.submodule_search_locations] if spec else []
    own = Path(__file__).parents[1] / "stack"
    files = [root / name for root in roots for name in _FILES]
    files += [own / "megatron_arguments.py", own / "bridges.py"]
    return [
        [_version(name) for name in names],
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()],
        current_device(),
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
