"""Backends that serve where dispatch would not let them, as kernels in Triton's interpreter do."""

from dataclasses import replace

from megacpp_mcore.surfaces.backend import Surface
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always


def anywhere(surface: str, backend: str) -> Surface:
    """The surface, of which this backend serves everything. Dispatch remembers that it could."""
    found = REGISTRY[surface]
    backends = (replace(b, supports=always) if b.name == backend else b for b in found.backends)
    return replace(found, backends=tuple(backends))
