"""What a rank's GPU memory is used for; printed after an out-of-memory error.

Parameters, gradients and optimizer states are counted by their storages. What a layer keeps for the
backward pass is measured once, in the first micro batch: the difference in allocated memory before
and after its forward pass. The rest of torch's allocations is reported as other: activations of
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
    """Bytes on one rank. modules: bytes of parameters by kind of block. layers, kept: by kind, the
    number of layers that ran forward in the first micro batch, and the bytes they kept."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    modules: Counter[str] = field(default_factory=Counter)
    layers: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)


class MemoryWatch:
    """Measures the memory of one rank's model. allocated: returns the bytes in use now."""

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
        """Remove the hooks; the measurements stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def measure(self) -> Memory:
        """The memory in use now."""
        found, seen = self._memory, set()
        found.parameters = found.gradients = found.optimizer = 0
        found.modules.clear()
        for chunk in self._model:
            for kind, parameter in _parameters(chunk):
                found.parameters += _size([parameter], seen)
                # the parameter's own size: Megatron puts many into one storage
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


def report(
    memory: Memory, stats: Mapping[str, int], total: int, rank: int, captured: int | None = None
) -> str:
    """The largest consumers, one line each, the largest first.

    stats: `torch.cuda.memory_stats()`. total: bytes of the device. captured: bytes of the pools of
    CUDA graphs, None without graphs.
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
    if captured is not None:
        lines.append(
            f"  CUDA graphs hold {_gib(captured)} of what torch has reserved, for nothing else; "
            "launch.cuda_graph_impl=none takes none"
        )
    lines.append(
        "  to use less: a smaller schedule.micro_batch_size, [recompute], more ranks with "
        "parallel.use_distributed_optimizer or expert_model_parallel_size"
    )
    return "\n".join(lines)


def unfinished_report(stats: Mapping[str, int], total: int, rank: int, device: str = "cuda") -> str:
    """The same before the model, its buffers and its optimizer are complete: all live tensors, by
    the class of the module that owns them."""
    lines = [_totals(f"GPU memory of rank {rank} while the model was being built", stats, total)]
    for name, size in _live_tensors(device).most_common(2 * _SHOWN):
        lines.append(f"  {_gib(size):>10}  {name}")
    lines.append(
        "  to use less: more ranks with parallel.use_distributed_optimizer, expert_, tensor_ or "
        "pipeline_model_parallel_size; optimizer.optimizer_cpu_offload"
    )
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Also true for library calls that could not allocate memory."""
    messages = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    )


def _live_tensors(device: str) -> Counter[str]:
    """Bytes of live tensors on devices of a type, by owner.

    type(x) instead of isinstance: asking a lazy-import proxy for its class may import the module.
    """
    objects, owners = gc.get_objects(), {}
    for module in objects:
        if issubclass(type(module), torch.nn.Module):
            parameters = vars(module).get("_parameters") or {}
            owners |= {id(p): type(module).__name__ for p in parameters.values() if p is not None}
    found: Counter[str] = Counter()
    tensors = [t for t in objects if issubclass(type(t), Tensor) and _is_on(t, device)]
    seen: set[tuple[Any, int]] = set()
    # Owned tensors first, so that a storage shared with others is counted for its owner.
    for tensor in sorted(tensors, key=lambda t: id(t) not in owners):
        owner = owners.get(id(tensor))
        name = f"parameters of {owner}" if owner else "buffers, main parameters, states, others"
        found[name] += _size([tensor], seen)
    return +found


def _is_on(tensor: Tensor, device: str) -> bool:
    """False for placeholders such as torch.compile's: their storage is on meta or unreadable."""
    try:
        storage = getattr(tensor, "_data", tensor).untyped_storage()
        return storage.device.type == device and storage.data_ptr() is not None
    except (AttributeError, RuntimeError):  # sparse tensors and other kinds without a storage
        return False


def _totals(what: str, stats: Mapping[str, int], total: int) -> str:
    used, reserved, peak = (
        stats.get(f"{name}_bytes.all.{when}", 0)
        for name, when in (("allocated", "current"), ("reserved", "current"), ("allocated", "peak"))
    )
    return (
        f"{what}: {_gib(total)} on the device, {_gib(used)} in use, {_gib(peak)} at most, "
        f"{_gib(reserved - used)} reserved by torch but free"
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
    """The layers of every stack in the chunk, MTP's too: modules in lists with a layer_number."""
    for module in chunk.modules():
        if isinstance(module, torch.nn.ModuleList):
            yield from (layer for layer in module if hasattr(layer, "layer_number"))


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(kind of block, parameter); a parameter outside of layers has its module's name as kind."""
    inside: dict[int, str] = {}
    for layer in _layers(chunk):
        for parameter in layer.parameters():
            inside.setdefault(id(parameter), kind_of(layer))
    for name, parameter in chunk.named_parameters():
        owner = name.rpartition(".")[0].rpartition(".")[2] or name
        yield inside.get(id(parameter), owner), parameter


def _states(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and states of Megatron's optimizers, one or chained, or of a torch one."""
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(one, "optimizer", one)
        if inner is None:  # no parameters of this kind on the rank
            continue
        for group in getattr(inner, "param_groups", ()):
            yield from group["params"]
        for state in getattr(inner, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _size(tensors: Iterable[Tensor], seen: set[tuple[Any, int]]) -> int:
    """Bytes of the tensors' storages, each storage once. seen: those already counted."""
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
