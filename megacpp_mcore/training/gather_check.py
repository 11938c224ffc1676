"""With overlap_param_gather: no weight may be read before it is gathered."""

from collections.abc import Sequence

import torch

from megacpp_mcore.errors import MegacppError


class GatherError(MegacppError):
    """Some weights are read without the wait for their gather."""


class GatherCheck:
    """Watches one step of a model for parameters that nobody would wait for.

    Megatron's data parallelism waits for a bucket of gathered parameters in a forward pre-hook of
    any module that has one of them. Where a whole bucket belongs to modules that are never called,
    because others read their weights without `layers.gathered.gathered`, the model trains from the
    second step on with parts of the weights of the step before.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """chunks: this rank's, each in Megatron's DistributedDataParallel."""
        self._buckets: dict[int, list[str]] = {}
        self._bucket_of: dict[torch.nn.Parameter, int] = {}
        self._hooks = []
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                bucket = chunk.param_to_bucket_group.get(parameter)
                if bucket is not None:  # a frozen parameter is in none
                    self._bucket_of[parameter] = id(bucket)
                    self._buckets.setdefault(id(bucket), []).append(name)
            self._hooks += [
                module.register_forward_pre_hook(self._mark) for module in chunk.modules()
            ]

    def _mark(self, module: torch.nn.Module, args: tuple) -> None:
        for parameter in module.parameters(recurse=False):
            self._buckets.pop(self._bucket_of.get(parameter, 0), None)

    def finish(self) -> None:
        """Raises GatherError naming the parameters of the buckets that nobody waits for."""
        for hook in self._hooks:
            hook.remove()
        unseen = [name for names in self._buckets.values() for name in names]
        if unseen:
            more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
            raise GatherError(
                f"parallel.overlap_param_gather: the first step read {', '.join(unseen[:5])}{more} "
                "without a call of the module that has it, so that later steps would not wait for "
                "its update; set parallel.overlap_param_gather=false, or let the layer take the "
                "weight through megacpp_mcore.layers.gathered"
            )
