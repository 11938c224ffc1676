"""Megatron's extension in C++, which recomputation wants, without torch's headers for Python.

They take twenty seconds and 1.4 GB to compile, once for every environment; what Megatron's function
needs of torch takes two. Its source is Megatron's; only how Python calls it is ours.
"""

import ctypes
import functools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from made_once import made_once
from megatron.core.tensor_parallel import random
from torch.utils.cpp_extension import get_cxx_compiler

_CALL = """
static at::Tensor tensor(at::TensorImpl* x) {
    using Pointer = c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
    return at::Tensor(Pointer::reclaim_copy(x));
}
extern "C" void call(at::TensorImpl* dst, at::TensorImpl* src) {
    share_storage(tensor(dst), tensor(src));
}
"""


def compile_quickly() -> None:
    """From here on, in this process: what Megatron compiles for itself is compiled by this."""
    random.load_inline = _load_inline


def _load_inline(name: str, cpp_sources: str, functions: list[str], verbose: bool) -> Any:
    assert functions == ["share_storage"]
    source = cpp_sources.replace("torch/extension.h", "ATen/core/Tensor.h")
    assert source != cpp_sources
    path = made_once(f"{name}.so", functools.partial(_compile, source + _CALL))
    call = ctypes.PyDLL(str(path)).call  # with the interpreter's lock, as pybind11 calls
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return SimpleNamespace(share_storage=lambda dst, src: call(dst._cdata, src._cdata))


def _compile(source: str, path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    subprocess.run(
        [get_cxx_compiler(), "-x", "c++", "-", "-std=c++17", "-shared", "-fPIC",
         f"-I{torch_folder / 'include'}", "-o", path, f"-L{torch_folder / 'lib'}", "-lc10",
         f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"],
        input=source, text=True, check=True,
    )  # fmt: skip
