"""What `--spec megacpp_mcore.specs.nam56r NAME` names; nothing is decided before a model is built.

On an ImportError in here Megatron would silently use its default spec (spec_utils.import_module
returns None), so SpecError is raised instead.
"""

from functools import partial

from megacpp_mcore.errors import MegacppError


class SpecError(MegacppError):
    """The stack spec could not be made; the message says what failed to import."""


try:
    from megacpp_mcore.layers.hybrid_stack import StackSpec, stack_spec
except ImportError as error:
    raise SpecError(
        f"megacpp_mcore.specs.nam56r cannot be used: {error}. Without this error Megatron would "
        "train its default spec instead; run `megacpp doctor` or reinstall the pinned stack"
    ) from error

# M2RNN in the G slot: patterns with R
nam56r_stack_spec = StackSpec(stack_spec)
# Megatron's GatedDeltaNet in the G slot: patterns with D
nam56r_deltanet_stack_spec = StackSpec(partial(stack_spec, letters="D"))
