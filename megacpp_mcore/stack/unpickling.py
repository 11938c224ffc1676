"""Restricted unpicklers for what a resume reads: data becomes data, and never runs code.

torch and Transformer Engine unpickle three parts of a checkpoint with everything importable: its
index `.metadata`, the objects in its shards (random states, the rerun state), and the extra state
of Transformer Engine's modules. `install` restricts all three to known classes. Megatron itself
restricts the rest: common state, `common.pt` and the index caches of datasets.

Compiled kernels are code, too: they are kept in the user's cache, and a run's folder, which may be
somebody else's, is used for them where that cannot be written to.
"""

import io
import os
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = {("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
# (module, name), as they stand in an index written by torch or Megatron
_OF_AN_INDEX = _DTYPES | {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
            "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_AN_INDEX:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no index of a checkpoint needs: somebody else "
                "wrote it, and reading it would run their code"
            )
        return super().find_class(module, name)


def read_index(checkpoint: Path) -> Metadata:
    """The index of a checkpoint's shards, its file `.metadata`.

    Raises OSError, and ValueError when it is damaged, holds anything but an index, or names what is
    no regular file in the checkpoint's folder.
    """
    try:
        with open(checkpoint / ".metadata", "rb") as file:
            index = _load_index(file)
        names = {entry.relative_path for entry in index.storage_data.values()}
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises one of many types
        raise ValueError(f"{checkpoint / '.metadata'} cannot be read: {error}") from error
    for name in names:
        if name in (".", "..") or "/" in name:
            raise ValueError(f"{checkpoint / '.metadata'} names {name!r}, not a file of its folder")
    for path in (checkpoint / name for name in (*names, "common.pt")):
        if os.path.lexists(path) and not path.is_file():  # a FIFO would be waited for
            raise ValueError(f"{path} is no regular file")
    return index


def _load_index(file: IO[bytes]) -> Metadata:
    index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(index).__name__}, not an index of shards")
    return index


def install() -> None:
    """Restrict what torch and Transformer Engine unpickle in this process as they load."""
    from torch.distributed.checkpoint import default_planner, filesystem

    filesystem.pickle = SimpleNamespace(dump=pickle.dump, load=_load_index)
    default_planner.DefaultLoadPlanner.load_bytes = _load_bytes
    _restrict_transformer_engine()


def _load_bytes(self: Any, read_item: Any, value: IO[bytes]) -> None:
    """As DefaultLoadPlanner's, with the classes that torch and Megatron have registered as safe."""
    from torch.distributed.checkpoint._nested_dict import set_element

    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{name} in the shards is not plain data: {_why(error)}"
        ) from None
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _why(error: BaseException) -> str:
    """What torch.load refuses, without its advice to run the code."""
    found = re.search(r"Unsupported .*|Trying to .*", str(error))
    return found[0] if found else str(error)


def why(error: BaseException) -> str:
    """Why a checkpoint cannot be loaded, in one line: of several ranks' failures, the first."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if "weights_only" in str(error):
        return f"a file of it is not plain data: {_why(error)}"
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


def _restrict_transformer_engine() -> None:
    """Let its modules' extra state be read by Megatron's unpickler for just that."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "pickle", None) is pickle:
            module.pickle = SimpleNamespace(dumps=pickle.dumps, loads=_load_extra_state)


def _load_extra_state(data: bytes) -> Any:
    from megatron.core.safe_globals import SafeUnpickler

    return SafeUnpickler(io.BytesIO(data)).load()
