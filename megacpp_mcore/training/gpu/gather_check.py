"""Detect weights that are read before overlap_param_gather has gathered them."""

from collections.abc import Sequence

import torch

from megacpp_mcore.errors import MegacppError


class GatherError(MegacppError):
    """Some weights are read without waiting for their all-gather."""


class GatherCheck:
    """Watches one training step for parameters that are read without waiting for their gather.

    Megatron's data parallelism waits for a bucket of gathered parameters in a forward pre-hook of
    every module that owns one of them. A weight that is read without calling its module, and
    without `layers.param_gather.wait_for_param_gather`, may be stale from the second step on if no
    other module of its bucket happened to run earlier.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """chunks: this rank's model chunks, each in Megatron's DistributedDataParallel."""
        self._unseen: dict[torch.nn.Parameter, str] = {}
        self._hooks = []
        for chunk in chunks:
            self._unseen |= {
                parameter: name
                for name, parameter in chunk.named_parameters()
                if parameter in chunk.param_to_bucket_group  # frozen parameters are in no bucket
            }
            self._hooks += [
                module.register_forward_pre_hook(self._mark) for module in chunk.modules()
            ]

    def _mark(self, module: torch.nn.Module, args: tuple) -> None:
        for parameter in module.parameters(recurse=False):
            self._unseen.pop(parameter, None)

    def finish(self) -> None:
        """Raises GatherError, which names the parameters that were not waited for."""
        for hook in self._hooks:
            hook.remove()
        if unseen := list(self._unseen.values()):
            more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
            raise GatherError(
                f"parallel.overlap_param_gather: the first step read {', '.join(unseen[:5])}{more} "
                "without calling the module that owns it, so later steps would not wait for its "
                "update; set parallel.overlap_param_gather=false, or call "
                "megacpp_mcore.layers.param_gather.wait_for_param_gather before the read"
            )
