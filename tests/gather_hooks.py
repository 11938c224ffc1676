"""Hooks as data parallelism registers them, which wait for a module's gathered parameters."""

from collections.abc import Callable

from megatron.core.distributed import DistributedDataParallel


def of_data_parallelism(hook: Callable) -> Callable:
    hook.__module__ = DistributedDataParallel.__module__
    return hook
