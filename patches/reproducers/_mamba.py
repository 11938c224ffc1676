"""Shared by mamba-ssm's reproducers: stand-ins for packages that a CPU machine does not have."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


def stand_in_for_unrelated_packages() -> None:
    """Let `import mamba_ssm` pass its imports of Hugging Face packages, which no kernel uses."""
    if importlib.util.find_spec("huggingface_hub") is None:
        stand_in("huggingface_hub")
        # a class is derived from it
        sys.modules["huggingface_hub"].PyTorchModelHubMixin = type("PyTorchModelHubMixin", (), {})
    if importlib.util.find_spec("transformers") is None:
        stand_in("transformers.generation")
        stand_in("transformers.utils.hub")


def stand_in_for_tilelang(kernels: dict) -> None:
    """Replace tilelang: a jitted factory called NAME then makes kernels[NAME](factory's args)."""
    for name in ("tilelang.language", "tilelang.autotuner", "tilelang.profiler"):
        stand_in(name)

    def jit(*args, **kwargs):
        return lambda factory: lambda *problem, **more: kernels[factory.__name__](*problem, **more)

    sys.modules["tilelang"].jit = jit


def stand_in_for_selective_scan() -> None:
    """Let `import mamba_ssm` pass where its CUDA extension is not built (defect 17)."""
    if importlib.util.find_spec("selective_scan_cuda") is None:
        stand_in("selective_scan_cuda")


class StandIn(ModuleType):
    """A package whose every attribute is a mock."""

    __path__: tuple = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def stand_in(name: str) -> None:
    """Put stand-ins for a dotted name and its parents into sys.modules."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        here = ".".join(parts[:end])
        if here not in sys.modules:
            sys.modules[here] = StandIn(here)
            sys.modules[here].__spec__ = ModuleSpec(here, None)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[here])
