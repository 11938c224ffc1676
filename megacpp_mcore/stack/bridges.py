"""Bridges: small run-time changes to Megatron-Core 0.19.2 where it does not work as installed.

`dataset_helper`, `import_ops_only`, `hide_packages`, `uncompiled_swiglu_for_few_rows` and
`shift_documents_on_the_device` are for every machine. The others are for machines without a GPU,
and do nothing when CUDA is available. Each bridge states its reason, and is skipped if a patch of
the patch lane already fixes the cause.
Bridges for the distributed optimizer's checkpoints: `megacpp_mcore.stack.optimizer_bridges`.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.kernels.documents import shifted_left
from megacpp_mcore.patching import applied

_COMPILE = torch.compile


def before_megatron(runs: bool = True) -> None:
    """Prepare this process for Megatron's first import. runs: whether it will run a model.

    Megatron catches only ImportError around Transformer Engine, but without a driver TE raises
    `OSError: libcuda.so.1`. A None in sys.modules makes Megatron run without TE; with the patch
    te-import-without-driver Megatron does so itself.

    Megatron hands elementwise functions to torch.compile at import, which imports Inductor: a
    seventh of a rank's imports, for functions of which our layers call none. Each of Megatron's is
    compiled at its first call instead. On a CPU, where that is about 20 s of C++ compilation per
    process without a benefit, it stays as it is, and torch.compile is disabled. Where nothing runs,
    torch.compile leaves all functions as they are, which spares the import of Dynamo, too.

    Python's collector visits no more what is there by now, torch above all: it would in each of its
    collections while Megatron is imported and at the process's end, a quarter of a start's time.

    Warnings about absent CUDA packages are silenced.
    """
    if "megatron.core" not in sys.modules:
        gc.freeze()
    has_gpu = torch.cuda.is_available()
    if not runs:
        torch.compile = _leave_uncompiled
    else:
        torch.compile = _CompileOfMegatrons(_compiled_when_called if has_gpu else _leave_uncompiled)
    if has_gpu:
        return
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    te_is_installed = importlib.util.find_spec("transformer_engine") is not None
    if te_is_installed and "te-import-without-driver" not in applied("megatron-core"):
        sys.modules.setdefault("transformer_engine", None)
    if runs:
        torch._dynamo.config.disable = True


def _leave_uncompiled(function=None, **options):
    return (lambda decorated: decorated) if function is None else function


@dataclass(frozen=True)
class _CompileOfMegatrons:
    """torch.compile, but for Megatron's own functions. theirs: what they become."""

    theirs: Callable

    def __call__(self, model: Callable | None = None, **options: Any) -> Callable:
        if model is None:
            return functools.partial(self, **options)
        if isinstance(model, FunctionType) and (model.__module__ or "").startswith("megatron."):
            return self.theirs(model, **options)
        return _COMPILE(model, **options)


def _compiled_when_called(function: Callable, **options: Any) -> Callable:
    """Within a function that is being compiled it is part of that, as a compiled one would be."""
    compiled = functools.cache(lambda: _COMPILE(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **words: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **words)
        return compiled()(*args, **words)

    return call


def install() -> None:
    """Let Megatron's modules be built, run and saved where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    # RoPE tables, the router's expert bias, MTP's counters and sequence-parallel gathers place
    # tensors on the current CUDA device even if the model is on the CPU. The patch
    # rope-tables-on-cpu fixes only the first of these, so this is needed with it, too.
    torch.cuda.current_device = _cpu
    # dist_checkpointing synchronises the CUDA device before it writes, whether or not there is one.
    torch.cuda.synchronize = _nothing


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(device=None) -> None:
    return None


def dataset_helper() -> None:
    """Let Megatron's training loop start from a wheel.

    initialize_megatron runs `make` in the installed package, and exits if that fails. The wheel has
    the compiled helper, but no Makefile; the helper is imported instead. With the patch
    dataset-helper-without-makefile Megatron does so itself. The import raises ImportError when the
    compiled helper is missing, too.
    """
    from megatron.core.datasets import utils

    if "dataset-helper-without-makefile" in applied("megatron-core"):
        return
    if not Path(utils.__file__).with_name("Makefile").is_file():
        utils.compile_helpers = _import_the_helper


def _import_the_helper() -> None:
    importlib.import_module("megatron.core.datasets.helpers_cpp")


def uncompiled_swiglu_for_few_rows() -> None:
    """Run the experts' SwiGLU eagerly for zero rows and for one row.

    Megatron compiles it with a dynamic number of rows, but torch.compile specialises on 0 and 1. It
    recompiles when a rank's experts first get no token, and when they first get one: 0.5 s and
    1.7 s on an H200 in the middle of a run, while all other expert-parallel ranks wait.
    """
    from megatron.core.fusions import fused_bias_swiglu

    for name in ("weighted_swiglu", "weighted_swiglu_back"):
        compiled = getattr(fused_bias_swiglu, name)
        if not isinstance(compiled, _EagerForFewRows):
            setattr(fused_bias_swiglu, name, _EagerForFewRows(compiled))


@dataclass(frozen=True)
class _EagerForFewRows:
    compiled: Callable

    def __call__(self, rows: torch.Tensor, *others: torch.Tensor) -> Any:
        if rows.shape[0] > 1:
            return self.compiled(rows, *others)
        with torch.compiler.set_stance("force_eager"):
            return self.compiled(rows, *others)


def shift_documents_on_the_device() -> None:
    """Let MTP move packed documents by one token without the host's knowing where they lie.

    Megatron cuts the row into its documents with offsets that are on the GPU: the host reads each
    of them back, twice, and waits for the GPU, for labels, mask, tokens and positions of every MTP
    depth. Under context parallelism the parts go over ranks, and Megatron's function stays.
    """
    from megatron.core.transformer import multi_token_prediction as mtp

    if not isinstance(mtp._roll_tensor_packed_seq, _ShiftDocuments):
        mtp._roll_tensor_packed_seq = _ShiftDocuments(mtp._roll_tensor_packed_seq)


@dataclass(frozen=True)
class _ShiftDocuments:
    upstream: Callable

    def __call__(
        self, tensor: torch.Tensor, shifts: int, dims: int, documents: Any, cp_group: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        over_ranks = cp_group is not None and cp_group.size() > 1
        if over_ranks or shifts != -1 or dims not in (-1, tensor.dim() - 1):
            return self.upstream(tensor, shifts, dims, documents, cp_group)
        moved = shifted_left(tensor, documents.cu_seqlens_q)
        return moved, moved.sum()


def has_apex() -> bool:
    """Whether apex's kernel for gradient accumulation is installed."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


@contextlib.contextmanager
def fused_accumulation_without_apex() -> Iterator[None]:
    """Let a model with gradient_accumulation_fusion be built without apex.

    Transformer Engine's linears accumulate weight gradients into main_grad by themselves. Only
    Megatron's own linears need apex, and refuse to be built without it: see
    `unfused_where_apex_is_needed` for those of the model.
    """
    from megatron.core.tensor_parallel import layers

    known = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = known


def unfused_where_apex_is_needed(model: torch.nn.Module) -> None:
    """Without apex, leave the weight gradients of Megatron's own linears to data parallelism.

    Such are the output layer and experts that run one after another; their gradients are then added
    to main_grad after the product.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    if has_apex():
        return
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = False


def import_ops_only(package: str) -> None:
    """Let `import PACKAGE.ops...` skip PACKAGE/__init__.py until something asks for its contents.

    mamba_ssm/__init__.py imports its models, and with them transformers. This package uses only the
    operators, so every rank starts faster without them.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)

    def load_package(name: str):
        if name.startswith("__") and name != "__version__":  # the import system looks for these
            raise AttributeError(name)
        del module.__getattr__
        spec.loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = load_package
    sys.modules[package] = module


@contextlib.contextmanager
def hide_packages(*packages: str) -> Iterator[None]:
    """Make optional imports of these packages fail inside the block.

    For packages that a dependency imports whenever they are installed, and that a run never uses:
    each costs seconds at every rank's start. A package that is already imported stays visible.
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
def pretend_h200() -> Iterator[None]:
    """Report the properties of an H200 inside the block if there is no GPU.

    Megatron's validate_args always asks for the compute capability; nothing runs on the device.
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
