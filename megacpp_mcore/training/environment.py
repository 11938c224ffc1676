"""The variables of a launch: its own are set, but the user's own are kept and reported."""

import os
import sys
from collections.abc import Mapping

from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE


def apply_environment(wanted: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Set the variables in this process, but keep what the user has set; rank 0 says so.

    MEGACPP_RECIPE is set in any case: one that an earlier launch left is not what was asked for.
    Returns {"applied": ..., "kept": ...}, as a receipt has it.
    """
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    kept.pop(ENVIRONMENT_VARIABLE, None)
    applied = {name: value for name, value in wanted.items() if name not in kept}
    os.environ.update(applied)
    for name, value in kept.items():
        if value != wanted[name] and os.environ.get("RANK", "0") == "0":
            print(
                f"megacpp: kept {name}={value} of the environment; this launch has {wanted[name]}",
                file=sys.stderr,
            )
    return {"applied": applied, "kept": kept}
