"""Arguments of Megatron's training scripts that its hooks on modules serve.

Fused layers read the weights of modules that they do not call, so that what such hooks save would
lack some of the model without a word.
"""

import sys
from argparse import Namespace

from megacpp_mcore.errors import MegacppError

HOOKED = ("save_activations_interval", "save_tokens_per_expert_interval", "save_dgrads_interval")


class HookedArgumentError(MegacppError):
    """An argument whose result would lack modules that our layers do not call."""


def flags(args: Namespace, names: tuple[str, ...]) -> str:
    """Those of the names that are set, as on the command line."""
    asked = [name for name in names if getattr(args, name, None)]
    return ", ".join("--" + name.replace("_", "-") for name in asked)


def refuse(args: Namespace, names: tuple[str, ...] = HOOKED) -> None:
    """Raises HookedArgumentError where one of the names is set."""
    if asked := flags(args, names):
        raise HookedArgumentError(
            f"{asked} saves what hooks on modules see, but fused layers read weights without "
            "calling all of their modules, so that some would be missing; remove it, or use "
            "Megatron's own model"
        )


def refuse_of_this_process() -> None:
    """As `refuse`, of the arguments that a script has parsed in this process, if one has."""
    script = sys.modules.get("megatron.training.global_vars")
    args = getattr(script, "_GLOBAL_ARGS", None)
    if args is not None:
        refuse(args)
