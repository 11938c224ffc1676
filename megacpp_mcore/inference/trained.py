"""Which checkpoint of a run's folder, and of which recipe. Imports neither torch nor Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.inference.recipe import InferenceError
from megacpp_mcore.receipts import ReceiptError, read
from megacpp_mcore.training.checkpoints import folder


@dataclass(frozen=True)
class Trained:
    """A checkpoint with the recipe of the run that wrote it. recipe: as `Recipe.to_dict`."""

    name: str
    recipe: Mapping[str, Any]
    checkpoint: Path
    iteration: int

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of the tokenizer.json of the run's data; None: bytes, or not known."""
        return (self.recipe.get("data") or {}).get("tokenizer_sha256")


def trained(run: Path, iteration: int | None = None) -> Trained:
    """The newest complete checkpoint of a run of either lane, or that of `iteration`.

    run: the --out folder of `megacpp train`, which has the receipt. On GPUs the checkpoints are in
    the recipe's checkpoint.save; if that is relative, it is looked for from the current folder.
    Raises InferenceError, which says what is missing.
    """
    try:
        entry = read(run / "receipt.json")["recipe"]
    except (ReceiptError, LookupError) as error:
        raise InferenceError(
            f"{run} is not the folder of a run: {error}; name the --out of `megacpp train`"
        ) from error
    recipe = entry["content"]
    saved = (recipe.get("checkpoint") or {}).get("save")
    folders = [run / "checkpoints", *([Path(saved)] if isinstance(saved, str) else [])]
    found = {number: place for place in reversed(folders) for number in folder.complete(place)}
    if not found:
        raise InferenceError(
            f"no complete checkpoint in {' or '.join(map(str, folders))}: train with "
            "checkpoint.save_interval (and on GPUs checkpoint.save) set"
        )
    number = max(found) if iteration is None else iteration
    if number not in found:
        listed = ", ".join(map(str, sorted(found)))
        raise InferenceError(f"--iteration {number}: there are checkpoints of iterations {listed}")
    checkpoint = folder.path_of(found[number], number)
    return Trained(entry["name"], recipe, checkpoint, number)
