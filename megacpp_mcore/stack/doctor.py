"""Examine a machine's software stack: versions against the pins, then known traps."""

from collections.abc import Mapping

from megacpp_mcore.stack import FAIL, NOT_APPLICABLE, OK, PINS, PYTHON, Check, Facts, Pin
from megacpp_mcore.stack.checks import TRAPS, imports, patch_lane, patches_of_recipe


def examine(facts: Facts, needs: Mapping[str, str] | None = None) -> list[Check]:
    """Every check on `facts`: versions against the pins, imports, then the known traps.

    needs: `patch_needs.needed` of the recipe to run; None without a recipe.
    """
    checks = [_python(facts), *(_pin(facts, pin) for pin in PINS), *imports(facts)]
    checks += [trap(facts) for trap in TRAPS]
    return [*checks, *patch_lane(facts), patches_of_recipe(facts, needs)]


def _python(facts: Facts) -> Check:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] == PYTHON:
        return Check("python", OK, found)
    return Check(
        "python", FAIL, f"{found}; megatron-core >= 0.17 has only Python 3.12 (pip on another "
        "version silently offers 0.16.1)", "make the environment with Python 3.12",
    )  # fmt: skip


def _pin(facts: Facts, pin: Pin) -> Check:
    found = facts.version(pin.name)
    get = pin.get or f"pip install {pin.name}=={pin.version}"
    if found is None and pin.cuda and facts.gpu is None:
        return Check(pin.name, NOT_APPLICABLE, "absent; not needed without a GPU")
    if found is None:
        return Check(pin.name, pin.missing, f"absent; pinned {pin.version}: {pin.why}", get)
    if found.split("+")[0] == pin.version:
        return Check(pin.name, OK, found)
    return Check(pin.name, pin.other, f"{found}; pinned {pin.version}: {pin.why}", get)
