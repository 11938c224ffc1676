"""Writing safetensors: 8 bytes with the header's length, the header in JSON, the tensors' bytes.

The format is stable and small (huggingface.co/docs/safetensors), and no package is needed for it.
`standalone.read_safetensors` reads it.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacpp_mcore.files import written_atomically
from megacpp_mcore.inference import standalone
from megacpp_mcore.inference.recipe import InferenceError

_NAMES = {dtype: name for name, dtype in standalone.DTYPES.items()}
_ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `path` whole or not at all. metadata: text by name, which readers pass on.

    Wide dtypes come first, so that every tensor starts at a multiple of its element's size. Raises
    OSError, and InferenceError for a dtype that is not in the format.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise InferenceError(f"{name} is {tensor.dtype}; safetensors here has {list(_NAMES)}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with written_atomically(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def refuse_special(path: Path) -> None:
    """Raises ValueError for a device or a FIFO, which would be waited for."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file. Raises InferenceError for one that is damaged or missing."""
    try:
        refuse_special(path)
        return standalone.read_safetensors(path)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, RecursionError, struct.error,
            OverflowError, MemoryError) as error:  # fmt: skip
        raise InferenceError(
            f"{path} is not a readable safetensors file: {type(error).__name__}: {error}"
        ) from error
