"""The model of a GPU run, through Megatron's config and builder: ours only check the stack spec."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.layers.stack import MegacppStack


class StackSpecError(MegacppError):
    """The model would be built from another stack spec than the recipe's."""


@dataclass(kw_only=True)
class MegacppModelConfig(HybridModelConfig):
    """Megatron's HybridModelConfig with our builder."""

    builder: ClassVar[str] = "megacpp_mcore.training.gpu_model.MegacppModelBuilder"


class MegacppModelBuilder(HybridModelBuilder):
    """Megatron's builder, which takes its own default spec without a word where ours is missing."""

    def build_model(self, *args: Any, **kwargs: Any) -> HybridModel:
        """One stage of the model. Raises StackSpecError when the spec's stack is not ours."""
        spec = self._model_config.hybrid_stack_spec
        if spec is None or not issubclass(spec.module, MegacppStack):
            found = "none" if spec is None else spec.module.__name__
            raise StackSpecError(
                f"the stack spec is {found}, not one of megacpp_mcore.specs.nam56r: Megatron drops "
                "a --spec that fails to import; try `python -c 'import megacpp_mcore.specs.nam56r'`"
            )
        return super().build_model(*args, **kwargs)
