"""Set a launch's environment variables, except those that the user has set already."""

import os
import sys
from collections.abc import Mapping

from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE


def apply_environment(wanted: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Set the variables in this process, but keep the user's values; rank 0 reports them.

    MEGACPP_RECIPE is always set: an existing value may come from an earlier launch. Returns
    {"applied": ..., "kept": ...}, as written to the receipt.
    """
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    kept.pop(ENVIRONMENT_VARIABLE, None)
    applied = {name: value for name, value in wanted.items() if name not in kept}
    os.environ.update(applied)
    for name, value in kept.items():
        if value != wanted[name] and os.environ.get("RANK", "0") == "0":
            print(
                f"megacpp: kept {name}={value} from the environment; the recipe has {wanted[name]}",
                file=sys.stderr,
            )
    return {"applied": applied, "kept": kept}
