"""What Megatron-Core 0.19.2 cannot do as it is installed, bridged in this one place.

All but `dataset_helper`, `operators_alone`, `without` and `experts_of_few_rows` is for machines
with no GPU and changes nothing with CUDA. Each bridge names its reason; one that a patch of the
lane makes needless is not laid where that is applied.
The distributed optimizer's checkpoints have their own: `megacpp_mcore.stack.optimizer_bridges`.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.patching import applied


def before_megatron() -> None:
    """Prepare this process for Megatron's first import.

    Megatron catches only ImportError around Transformer Engine, and TE without a driver dies with
    `OSError: libcuda.so.1`. A None in sys.modules makes Megatron take its path without TE; with the
    patch te-import-without-driver Megatron does so itself.

    Megatron compiles elementwise functions with torch.compile as it defines them. On a CPU that
    costs some 20 s of C++ compilation a process and gains nothing.

    Megatron warns of each CUDA package that is not there, torch of CUDA itself: nobody asked.
    """
    if torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    te_is_installed = importlib.util.find_spec("transformer_engine") is not None
    if te_is_installed and "te-import-without-driver" not in applied("megatron-core"):
        sys.modules.setdefault("transformer_engine", None)
    torch._dynamo.config.disable = True


def install() -> None:
    """Let Megatron's modules be built, run and saved where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    # RoPE tables, the router's expert bias, MTP's counters, sequence-parallel gathers: each asks
    # for the current CUDA device to place a tensor, although the model is on the CPU. The patch
    # rope-tables-on-cpu serves the first of them only, so that it cannot replace this.
    torch.cuda.current_device = _cpu
    # dist_checkpointing waits for the device before it writes, without asking whether there is one.
    torch.cuda.synchronize = _nothing


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(device=None) -> None:
    return None


def dataset_helper() -> None:
    """Let Megatron's training loop start from a wheel.

    initialize_megatron runs `make` in the installed package, whose wheel has the helper compiled
    and no Makefile: it would end the process. With the patch dataset-helper-without-makefile
    Megatron does this itself. Raises ImportError when the compiled helper is not there either.
    """
    from megatron.core.datasets import utils

    if "dataset-helper-without-makefile" in applied("megatron-core"):
        return
    if not Path(utils.__file__).with_name("Makefile").is_file():
        utils.compile_helpers = _import_the_helper


def _import_the_helper() -> None:
    importlib.import_module("megatron.core.datasets.helpers_cpp")


def experts_of_few_rows() -> None:
    """Let the experts' SwiGLU of no row or of one run as it is written, not compiled.

    Megatron compiles it for any number of rows, but torch.compile never takes 0 and 1 for any: it
    compiles anew when a rank's experts first get no token and when they first get one, 0.5 and
    1.7 s on an H200 in the middle of a run, and all other ranks of expert parallelism wait.
    """
    from megatron.core.fusions import fused_bias_swiglu

    for name in ("weighted_swiglu", "weighted_swiglu_back"):
        compiled = getattr(fused_bias_swiglu, name)
        if not isinstance(compiled, _AsWrittenForFewRows):
            setattr(fused_bias_swiglu, name, _AsWrittenForFewRows(compiled))


@dataclass(frozen=True)
class _AsWrittenForFewRows:
    compiled: Callable

    def __call__(self, rows: torch.Tensor, *others: torch.Tensor) -> Any:
        if rows.shape[0] > 1:
            return self.compiled(rows, *others)
        with torch.compiler.set_stance("force_eager"):
            return self.compiled(rows, *others)


def has_apex() -> bool:
    """Whether apex's kernel for gradient accumulation is installed."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


@contextlib.contextmanager
def fused_accumulation_without_apex() -> Iterator[None]:
    """Let a model with gradient_accumulation_fusion be built where apex is not installed.

    Transformer Engine's linears accumulate weight gradients into main_grad by themselves. Only
    Megatron's own linears need apex, and refuse to be built without it; the one in a model of
    Transformer Engine's linears is the output layer, whose builder turns the fusion off again.
    """
    from megatron.core.tensor_parallel import layers

    known = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = known


def operators_alone(package: str) -> None:
    """Let `import PACKAGE.ops...` leave PACKAGE's own __init__ for whoever asks for what is in it.

    mamba_ssm's imports its models, and transformers with them, at every rank's start, for nothing
    that is used here.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)

    def whole(name: str):
        if name.startswith("__") and name != "__version__":  # what Python itself looks for
            raise AttributeError(name)
        del module.__getattr__
        spec.loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = whole
    sys.modules[package] = module


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports that only try a package find it absent, and find it again afterwards.

    For what others import wherever it is installed, and a run then never asks for: seconds of every
    rank's start. A package that is imported already stays.
    """
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for package in hidden:
            if sys.modules.get(package, package) is None:
                del sys.modules[package]


@contextlib.contextmanager
def answering_for_a_gpu() -> Iterator[None]:
    """Answer Megatron's questions about the GPU as an H200 would, while arguments are validated.

    validate_args asks for the compute capability whatever the launch; nothing is run meanwhile.
    """
    if torch.cuda.is_available():
        yield
        return
    saved = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device=None: h200
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = saved
