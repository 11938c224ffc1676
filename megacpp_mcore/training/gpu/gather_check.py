"""With overlap_param_gather: no weight may be read before it is gathered."""

from collections.abc import Sequence

import torch

from megacpp_mcore.errors import MegacppError


class GatherError(MegacppError):
    """Some weights are read without the wait for their gather."""


class GatherCheck:
    """Watches one step of a model for parameters that nobody waits for.

    Megatron's data parallelism waits for a bucket of gathered parameters in a forward pre-hook of
    any module that has one of them. A weight that is read without a call of its module, and without
    `layers.gathered.gathered`, waits for nobody: from the second step on it may be the last step's,
    unless a module of the same bucket was called before, which no layer can know.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """chunks: this rank's, each in Megatron's DistributedDataParallel."""
        self._unseen: dict[torch.nn.Parameter, str] = {}
        self._hooks = []
        for chunk in chunks:
            self._unseen |= {
                parameter: name
                for name, parameter in chunk.named_parameters()
                if parameter in chunk.param_to_bucket_group  # a frozen one is in none
            }
            self._hooks += [
                module.register_forward_pre_hook(self._mark) for module in chunk.modules()
            ]

    def _mark(self, module: torch.nn.Module, args: tuple) -> None:
        for parameter in module.parameters(recurse=False):
            self._unseen.pop(parameter, None)

    def finish(self) -> None:
        """Raises GatherError naming the parameters that nobody waits for."""
        for hook in self._hooks:
            hook.remove()
        if unseen := list(self._unseen.values()):
            more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
            raise GatherError(
                f"parallel.overlap_param_gather: the first step read {', '.join(unseen[:5])}{more} "
                "without a call of the module that has it, so that later steps would not wait for "
                "its update; set parallel.overlap_param_gather=false, or let the layer take the "
                "weight through megacpp_mcore.layers.gathered"
            )
