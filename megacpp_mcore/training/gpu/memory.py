"""Where a rank's GPU memory goes: what an out-of-memory error does not say.

Parameters, gradients and optimizer states are counted by their storages. What a layer keeps for the
backward pass is measured once, in the first micro batch, as the difference of allocated memory
around its forward pass. The rest of what torch has allocated is called other: activations of
earlier micro batches in a pipeline, logits, temporaries.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SHOWN = 5


@dataclass
class Memory:
    """Bytes of one rank. modules: of parameters, by kind of block. layers, kept: how many layers
    of a kind ran forward in the first micro batch, and what they kept."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    modules: Counter[str] = field(default_factory=Counter)
    layers: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)


class MemoryWatch:
    """Follows the memory of one rank's model. allocated: bytes that are in use now."""

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any,
        allocated: Callable[[], int] = torch.cuda.memory_allocated,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._allocated = model, optimizer, allocated
        self._memory = Memory()
        self._handles: list[Any] = []
        for chunk in model:
            for layer in _layers(chunk):
                self._follow(layer)

    def _follow(self, layer: torch.nn.Module) -> None:
        kind, before = kind_of(layer), []

        def enter(module: torch.nn.Module, inputs: Any) -> None:
            before.append(self._allocated())

        def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._memory.layers[kind] += 1
            self._memory.kept[kind] += self._allocated() - before.pop()
            first.remove()
            last.remove()

        first = layer.register_forward_pre_hook(enter)
        last = layer.register_forward_hook(leave)
        self._handles += [first, last]

    def stop(self) -> None:
        """Follow no more layers; what was measured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def measure(self) -> Memory:
        """What is there now."""
        found, seen = self._memory, set()
        found.parameters = found.gradients = found.optimizer = 0
        found.modules.clear()
        for chunk in self._model:
            for kind, parameter in _parameters(chunk):
                found.parameters += _size([parameter], seen)
                # its own size: Megatron puts many parameters into one storage
                found.modules[kind] += parameter.numel() * parameter.element_size()
        for chunk in self._model:
            gradients = (
                gradient
                for parameter in chunk.parameters()
                for gradient in (getattr(parameter, "main_grad", None), parameter.grad)
                if gradient is not None
            )
            found.gradients += _size(gradients, seen)
        found.optimizer = _size(_states(self._optimizer), seen)
        return found


def report(memory: Memory, stats: Mapping[str, int], total: int, rank: int) -> str:
    """The largest consumers, one line each, the largest first.

    stats: of `torch.cuda.memory_stats`. total: bytes of the device.
    """
    used = stats.get("allocated_bytes.all.current", 0)
    kept = sum(memory.kept.values())
    other = used - memory.parameters - memory.gradients - memory.optimizer
    rows = [
        (memory.optimizer, "optimizer states, with the main parameters", ""),
        (memory.gradients, "gradients", ""),
        (memory.parameters, "parameters", _largest(memory.modules)),
        (other, "other: activations, logits, temporaries", ""),
    ]
    lines = [_totals(f"GPU memory of rank {rank}", stats, total)]
    for size, name, more in sorted(rows, reverse=True):
        lines.append(f"  {_gib(size):>10}  {name}{f' ({more})' if more else ''}")
    if kept:
        each = ", ".join(
            f"{kind} {memory.layers[kind]} x {_gib(size / memory.layers[kind])}"
            for kind, size in memory.kept.most_common(_SHOWN)
        )
        lines.append(f"  a micro batch keeps {_gib(kept)} for its backward pass: {each}")
    lines.append(
        "  smaller: schedule.micro_batch_size, [recompute], more ranks with "
        "parallel.use_distributed_optimizer or expert_model_parallel_size"
    )
    return "\n".join(lines)


def unfinished_report(stats: Mapping[str, int], total: int, rank: int, device: str = "cuda") -> str:
    """The same where the model, its buffers or its optimizer are not all there yet: the tensors
    that Python knows, by the class of the module whose parameters they are."""
    lines = [_totals(f"GPU memory of rank {rank} as the model was built", stats, total)]
    for name, size in _alive(device).most_common(2 * _SHOWN):
        lines.append(f"  {_gib(size):>10}  {name}")
    lines.append(
        "  smaller: more ranks with parallel.use_distributed_optimizer, expert_, tensor_ or "
        "pipeline_model_parallel_size; optimizer.optimizer_cpu_offload"
    )
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Also where it is a library's call that got none."""
    words = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _alive(device: str) -> Counter[str]:
    """Bytes on devices of a type. By the objects' own types: to ask a proxy's may import it."""
    objects, owners = gc.get_objects(), {}
    for module in objects:
        if issubclass(type(module), torch.nn.Module):
            parameters = vars(module).get("_parameters") or {}
            owners |= {id(p): type(module).__name__ for p in parameters.values() if p is not None}
    found: Counter[str] = Counter()
    tensors = [t for t in objects if issubclass(type(t), Tensor) and _lies_on(t, device)]
    seen: set[tuple[Any, int]] = set()
    for tensor in sorted(tensors, key=lambda t: id(t) not in owners):  # a storage is its owner's
        owner = owners.get(id(tensor))
        name = f"parameters of {owner}" if owner else "buffers, main parameters, states, others"
        found[name] += _size([tensor], seen)
    return +found


def _lies_on(tensor: Tensor, device: str) -> bool:
    """Not those that only stand for a tensor, as torch.compile's: their storages are meta's, or
    refuse to tell their place."""
    try:
        storage = getattr(tensor, "_data", tensor).untyped_storage()
        return storage.device.type == device and storage.data_ptr() is not None
    except (AttributeError, RuntimeError):  # sparse, and other kinds without a storage
        return False


def _totals(what: str, stats: Mapping[str, int], total: int) -> str:
    used, reserved, peak = (
        stats.get(f"{name}_bytes.all.{when}", 0)
        for name, when in (("allocated", "current"), ("reserved", "current"), ("allocated", "peak"))
    )
    return (
        f"{what}: {_gib(total)} on the device, {_gib(used)} in use, {_gib(peak)} at most, "
        f"{_gib(reserved - used)} held by torch and free"
    )


def _largest(sizes: Counter[str]) -> str:
    return ", ".join(f"{kind} {_gib(size)}" for kind, size in sizes.most_common(_SHOWN) if size)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def kind_of(layer: torch.nn.Module) -> str:
    """The name of the block in a layer: `Mamba3Mixer`, `MoELayer`, `MLASelfAttention`."""
    for name in ("mixer", "self_attention", "mlp"):
        block = getattr(layer, name, None)
        if block is not None and type(block).__name__ != "IdentityOp":
            return type(block).__name__
    return type(layer).__name__


def _layers(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of every stack in the chunk, MTP's too: those that have a number."""
    for module in chunk.modules():
        if isinstance(module, torch.nn.ModuleList):
            yield from (layer for layer in module if hasattr(layer, "layer_number"))


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(kind of block, parameter); what is in no layer by the name of its module."""
    inside: dict[int, str] = {}
    for layer in _layers(chunk):
        for parameter in layer.parameters():
            inside.setdefault(id(parameter), kind_of(layer))
    for name, parameter in chunk.named_parameters():
        owner = name.rpartition(".")[0].rpartition(".")[2] or name
        yield inside.get(id(parameter), owner), parameter


def _states(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and states of one or many of Megatron's optimizers, or of torch's."""
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(one, "optimizer", one)
        if inner is None:  # a rank without parameters of this kind
            continue
        for group in getattr(inner, "param_groups", ()):
            yield from group["params"]
        for state in getattr(inner, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _size(tensors: Iterable[Tensor], seen: set[tuple[Any, int]]) -> int:
    """Bytes of the tensors' storages on their device, each storage once. seen: those counted."""
    total = 0
    for tensor in tensors:
        # Transformer Engine's quantised tensors are wrappers, without a storage of their own.
        tensor = getattr(tensor, "_data", tensor)
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen and tensor.device.type != "meta":
            seen.add(key)
            total += storage.nbytes()
    return total
