"""What `--spec megacpp_mcore.specs.nam56r NAME` names.

The backends come from the recipe in MEGACPP_RECIPE when it is set. On an ImportError Megatron would
silently use its default spec (spec_utils.import_module returns None), so SpecError is raised
instead.
"""

from megacpp_mcore.errors import MegacppError


class SpecError(MegacppError):
    """The stack spec could not be made; the message says what failed to import."""


try:
    from megacpp_mcore.layers.hybrid_stack import stack_spec
    from megacpp_mcore.recipe import recipe_from_environment

    _recipe = recipe_from_environment()
    _backends = _recipe.backends if _recipe else None

    # M2RNN in the G slot: patterns with R
    nam56r_stack_spec = stack_spec(_backends)
    # Megatron's GatedDeltaNet in the G slot: patterns with D
    nam56r_deltanet_stack_spec = stack_spec(_backends, letters="D")
except ImportError as error:
    raise SpecError(
        f"megacpp_mcore.specs.nam56r cannot be used: {error}. Without this error Megatron would "
        "train its default spec instead; run `megacpp doctor` or reinstall the pinned stack"
    ) from error
