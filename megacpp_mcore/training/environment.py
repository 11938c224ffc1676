"""Set a launch's environment variables, except those that the user has set already."""

import os
import sys
from collections.abc import Mapping


def apply_environment(wanted: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Set the variables in this process, but keep the user's values; rank 0 reports them.

    Returns {"applied": ..., "kept": ...}, as a receipt has it.
    """
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    applied = {name: value for name, value in wanted.items() if name not in kept}
    os.environ.update(applied)
    for name, value in kept.items():
        if value != wanted[name] and os.environ.get("RANK", "0") == "0":
            print(
                f"megacpp: kept {name}={value} from the environment; the recipe has {wanted[name]}",
                file=sys.stderr,
            )
    return {"applied": applied, "kept": kept}
