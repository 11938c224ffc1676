"""Call M2RNN's CUDA kernels through their C interface (csrc/m2rnn.cu)."""

import ctypes
import functools
from pathlib import Path

import torch

from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.m2rnn.schedule import Sizes

LIBRARY = nvcc.Library(Path(__file__).parent / "csrc" / "m2rnn.cu", instead="m2rnn=reference")
STEPS = 16  # steps of a stage; chunk_size is a multiple of it
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in m2rnn.cu


class Params(ctypes.Structure):
    """`Params` of csrc/common.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "W", "f", "initial", "bounds", "first_chunk", "checkpoints",
            "final_state", "y", "y_parts", "y_counts", "state_ready", "dy", "d_final", "dq", "dk",
            "dv", "dW", "df", "d_initial", "dq_parts", "dk_parts", "dv_parts", "df_parts",
            "dW_parts", "segments_done",
        )),
        *((f"{name}_{step}", ctypes.c_int64)
          for name in ("q", "k", "v", "f") for step in ("batch", "token", "head")),
        *((name, ctypes.c_int32) for name in (
            "chains", "batch", "tokens", "heads", "q_heads", "k_heads", "k_dim", "stages",
            "row_blocks", "slots", "bundle", "segments",
        )),
        ("clamp", ctypes.c_float),
        ("exact_tanh", ctypes.c_int32),
    ]  # fmt: skip


def launch(entry: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, **tensors):
    """Call `entry` on the current stream. A tensor that is None is passed as a null pointer.

    Raises RuntimeError when CUDA refuses the launch, KernelBuildError when nothing can be built.
    """
    params = Params(
        chains=sizes.chains, batch=sizes.batch, tokens=sizes.tokens, heads=sizes.heads,
        q_heads=sizes.q_heads, k_heads=sizes.k_heads, k_dim=sizes.k_dim,
        stages=sizes.chunk // STEPS, row_blocks=sizes.row_blocks, clamp=sizes.clamp,
        slots=sizes.slots, bundle=sizes.bundle, segments=sizes.segments,
        exact_tanh=sizes.exact_tanh,
    )  # fmt: skip
    for name, x in tensors.items():
        setattr(params, name, None if x is None else x.data_ptr())
    for name in ("q", "k", "v", "f"):
        for step, stride in zip(("batch", "token", "head"), tensors[name].stride(), strict=False):
            setattr(params, f"{name}_{step}", stride)
    library = kernels(device.index)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        error = getattr(library, entry)(ctypes.byref(params), _DTYPES[dtype], stream)
    if error:
        raise RuntimeError(f"{entry}: {library.m2rnn_error(error).decode()}")


@functools.cache
def kernels(device: int) -> ctypes.CDLL:
    """The library for this GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    found = LIBRARY.load(f"sm_{major}{minor}")
    found.m2rnn_error.restype = ctypes.c_char_p
    found.m2rnn_params_size.restype = ctypes.c_int64
    for entry in (found.m2rnn_forward, found.m2rnn_backward):
        entry.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if found.m2rnn_params_size() != ctypes.sizeof(Params):
        raise RuntimeError(
            f"m2rnn.cu's Params has {found.m2rnn_params_size()} bytes, launch.py's "
            f"{ctypes.sizeof(Params)}"
        )
    return found
