"""What the admission suite looks through: memory, modes, layouts, operators and graphs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a wider tensor of NaN."""
    if not tensor.is_floating_point() or not tensor.dim():
        return tensor
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"))
    return wide[..., 1::2].copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the first axis innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


def far_apart(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values, 2^30 elements apart along `axis`: of three, the last is out of the reach of
    31 bits. What is never touched between them takes no memory."""
    apart, strides = 2**30, list(tensor.contiguous().stride())
    strides[axis] = apart
    size = apart * (tensor.shape[axis] - 1) + tensor.numel()
    return tensor.new_empty(size).as_strided(tensor.shape, strides).copy_(tensor)


@contextlib.contextmanager
def poisoned_memory(device: str) -> Iterator[None]:
    """What is allocated holds NaN: the allocator's free blocks do, and on a CPU torch sees to it.

    torch does so in deterministic mode only, in which some CUDA kernels refuse to run.
    """
    # On a CPU up to 1 MiB, more than a sample's tensors have: filling more takes most of a check.
    for power in range(4, 19 if device == "cpu" else 23):
        blocks = [torch.full((2**power,), float("nan"), device=device) for _ in range(4)]
        del blocks
    if device != "cpu":
        yield
        return
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with deterministic(warn_only=True):
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    saved = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        # Megatron's own switch for TE, and what cuBLAS asks for in this mode.
        with environment(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", CUBLAS_WORKSPACE_CONFIG=":4096:8"):
            yield
    finally:
        torch.use_deterministic_algorithms(saved)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


class _Recorder(TorchDispatchMode):
    """Every operator of the megacpp library that is called, with its first arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[tuple, dict]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace.startswith("megacpp") and operator not in self.calls:
            self.calls[operator] = args, kwargs or {}
        return operator(*args, **(kwargs or {}))


def operators(bound: BoundBackend, case: Case, tensors: Tensors) -> list[tuple[Any, list, dict]]:
    """Our operators in a forward and a backward call, with their arguments.

    The floating ones of a forward call want gradients.
    """
    leaves = {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}
    bound.put(tensors)
    with _Recorder() as forward:
        outputs = bound.call(**leaves)
    with _Recorder() as backward:
        torch.autograd.backward([y.sum() for y in outputs.values()])
    return [
        (operator, [_leaf(argument, recorder is forward) for argument in args], kwargs)
        for recorder in (forward, backward)
        for operator, (args, kwargs) in recorder.calls.items()
    ]


def _leaf(argument: Any, differentiable: bool) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    copy = argument.detach().clone()
    return copy.requires_grad_(differentiable and copy.is_floating_point())


@dataclass(frozen=True)
class Graphs:
    """count: graphs of a call; again: after a second one. around: the marked operations in each."""

    count: int
    again: int
    around: list[list[str]]


_BEFORE, _AFTER = (torch.asinh, torch.atan), (torch.erf, torch.sinc)  # in no op of ours


def graphs(bound: BoundBackend, case: Case, tensors: Tensors) -> Graphs:
    """A block around the op, compiled without generating code, and called twice."""
    inputs = [n for n in case.inputs if n not in bound.parameters]
    first = next((n for n in inputs if n not in case.fp32_tensors), inputs[0])
    leaves = {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}
    taken: list[torch.fx.GraphModule] = []
    marks = {f.__name__ for f in _BEFORE + _AFTER}

    def block(**given):
        before, joined = _BEFORE
        given[first] = joined(before(given[first]))
        after, last = _AFTER
        return sum(last(after(y)).float().sum() for y in bound.call(**given).values())

    def keep(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        taken.append(graph)
        return graph.forward

    bound.put(tensors)
    with torch._dynamo.config.patch(disable=False):  # the CPU lane turns it off
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=keep)
        compiled(**leaves)
        count = len(taken)
        compiled(**leaves)
        torch._dynamo.reset()
    around = [
        [n.target.__name__ for n in graph.graph.nodes if getattr(n.target, "__name__", "") in marks]
        for graph in taken[:count]
    ]
    return Graphs(count, len(taken), [marked for marked in around if marked])
