"""Gradient buffers that are filled with zeros only where the step's first gradient is added.

Megatron fills the buffers of its data parallelism with zeros before every step. The gradients of
the fused experts are stored by kernels of ours, which can write the first one of a step instead of
adding it (`kernels.main_grad`): most of NAM56R's 20 GB then need no zeros, and are read once less.

Weights whose gradient nobody has written by the end of the last micro batch, such as those of a
layer that did not run, get their zeros there, before Megatron finishes the reduction.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from megacpp_mcore.kernels import main_grad


def install(chunks: Sequence[Any]) -> int:
    """Let the gradient buffers of a model's chunks be zeroed so. Returns the bytes that need none.

    chunks: the model's, each in Megatron's DistributedDataParallel. Megatron calls the first one's
    config.finalize_model_grads_func after the last micro batch, in a captured step, too. Where
    parts of layers are captured (cuda_graph_impl "local", "transformer_engine") a replayed part
    does not know the first micro batch, and everything is zeroed.
    """
    buffers = [_Buffer(buffer) for chunk in chunks for buffer in _buffers(chunk)]
    weights = [weight for buffer in buffers for weight in buffer.overwritten]
    if not weights or chunks[0].config.cuda_graph_impl not in ("none", "full_iteration"):
        return 0
    for buffer in buffers:
        buffer.install()
    config = chunks[0].config
    finalize = config.finalize_model_grads_func or finalize_model_grads
    config.finalize_model_grads_func = _after_zeroing(weights, finalize)
    return sum(w.main_grad.numel() * w.main_grad.element_size() for w in weights)


def _buffers(chunk: Any) -> Iterator[Any]:
    for name in ("buffers", "expert_parallel_buffers"):
        found = getattr(chunk, name, None)
        yield from found if isinstance(found, list) else ()  # Module.buffers is a method


def _after_zeroing(weights: Sequence[Tensor], finalize: Callable) -> Callable:
    def finalized(*args: Any, **kwargs: Any) -> Any:
        for weight in weights:
            if main_grad.is_due(weight):
                weight.main_grad.zero_()
        return finalize(*args, **kwargs)

    return finalized


class _Buffer:
    """One of Megatron's gradient buffers. overwritten: the weights that need no zeros."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.overwritten: list[Tensor] = []
        others, end = [], 0
        for weight, (start, stop, _) in sorted(
            buffer.param_index_map.items(), key=lambda entry: entry[1][0]
        ):
            if not (main_grad.is_overwritten(weight) and self._is_here(weight, start, stop)):
                continue
            self.overwritten.append(weight)
            others.append((end, start))
            end = stop
        others.append((end, buffer.grad_data.numel()))
        self._others = [(start, stop) for start, stop in others if start < stop]

    def _is_here(self, weight: Tensor, start: int, stop: int) -> bool:
        """Whether main_grad is these elements of the buffer; it may have a dtype of its own."""
        here, own = self._buffer.grad_data[start:stop], weight.main_grad
        same = own.dtype == here.dtype and own.is_contiguous() and own.numel() == here.numel()
        return same and own.data_ptr() == here.data_ptr()

    def install(self) -> None:
        if self.overwritten:
            self._buffer.reset = self.reset

    def reset(self) -> None:
        """Reset the buffer in place of Megatron's, which fills all of it."""
        data = self._buffer.grad_data
        zeroed = [data[start:stop] for start, stop in self._others]
        zeroed += self._buffer.extra_main_grads
        if zeroed:  # with expert parallelism the experts' weights have a buffer to themselves
            torch._foreach_zero_(zeroed)
        for weight in self.overwritten:
            main_grad.expect_first(weight)
