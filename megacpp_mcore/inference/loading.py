"""A checkpoint as a model on one device."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.inference.recipe import InferenceError, check_letters, on_one_device
from megacpp_mcore.inference.trained import Trained
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.checkpoints import checksums

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ANY_FAILURE = (Exception, CheckpointException)  # the latter is a BaseException


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode. model: MegacppHybridModel. eod: the id that ends a document."""

    model: Any
    recipe: Recipe
    device: torch.device
    eod: int


@contextlib.contextmanager
def loaded(
    source: Trained, *, device: str, dtype: str | None = None, mtp: bool = False
) -> Iterator[Loaded]:
    """The model of a checkpoint on one device, within Megatron's groups of one process.

    dtype: "fp32" or "bf16"; None: float32 on a CPU, the run's own on a GPU. Raises InferenceError
    for a checkpoint that is damaged, or that does not hold the recipe's model.
    """
    if dtype is None:
        dtype = "bf16" if device == "cuda" and source.recipe["precision"]["bf16"] else "fp32"
    recipe = on_one_device(source.name, source.recipe, device=device, mtp=mtp)
    with built(recipe, dtype) as model:
        load_weights(model, source.checkpoint)
        data = source.recipe.get("data") or {}
        eod = data.get("null_tokenizer_eod_id")
        eod = recipe.model.vocab_size - 1 if eod is None else eod
        yield Loaded(model.eval(), recipe, next(model.parameters()).device, eod)


@contextlib.contextmanager
def built(recipe: Recipe, dtype: str = "fp32") -> Iterator[Any]:
    """The recipe's model with its initial weights, within Megatron's groups of one process.

    dtype: of DTYPES. With bf16, parameters that M, R and the router keep in float32 stay so.
    """
    from megacpp_mcore.stack import bridges

    bridges.before_megatron()
    from megacpp_mcore import dispatch
    from megacpp_mcore.training.cpu.megatron_setup import (
        build_model,
        megatron_args,
        single_process,
    )

    check_letters(recipe)
    args = megatron_args(lower(recipe).argv)
    args.params_dtype, args.bf16 = DTYPES[dtype], dtype == "bf16"
    with single_process(recipe.schedule.seed, recipe.launch.device):
        dispatch.begin()
        with contextlib.redirect_stderr(io.StringIO()):  # which backend serves which part
            model = build_model(args, recipe)
        yield model.to(DTYPES[dtype])


def load_weights(model: Any, checkpoint: Path) -> None:
    """Replace the model's parameters by those of a checkpoint of either lane and of any layout.

    Raises InferenceError when a file is damaged, or a parameter is missing or of another shape.
    """
    from megatron.core import dist_checkpointing

    from megacpp_mcore.stack import unpickling
    from megacpp_mcore.training.cpu.megatron_setup import quiet

    unpickling.install()
    try:
        checksums.verify(checkpoint)
        unpickling.read_index(checkpoint)
        state = without_extra_state(model.sharded_state_dict())
        with quiet():
            state = dist_checkpointing.load({"model": state}, str(checkpoint))
        model.load_state_dict(state["model"], strict=True)
    except MegacppError:
        raise
    except _ANY_FAILURE as error:
        raise InferenceError(
            f"{checkpoint} does not hold the model of its recipe: {unpickling.why(error)}"
        ) from error


def without_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A sharded state dict without Transformer Engine's `_extra_state`, which holds no weight."""
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}
