"""What a surface and a backend are, and what the catalog says of each.

Imports neither torch nor any optional package.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.workload import Workload

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

REFERENCE = "reference"
Role = Literal["chosen", "fallback", "vendor", "experimental"]


@dataclass(frozen=True)
class Backend:
    """One implementation of a surface, and its facts in the catalog.

    implementation: "module:attribute", imported when a layer takes the backend; where a layer then
    leaves its own path for Megatron's, the class of Megatron that has it. stand_in: what a bench
    and the admission suite call instead of such a class. supports: None when the backend can serve
    the workload, else a sentence saying why not. opt_in: it serves where it is named, and `auto`
    passes it over; or a function of the workload: why `auto` does, or None. ruled_out: as supports,
    but of the recipe that names the backend, and true on any machine: such a recipe is refused.

    role: chosen (what the pinned stack should run on an H200), fallback (plain torch), vendor
    (another package's that we may run) or experimental (runs only when named). removes: the
    whole-path cost that it takes away. layout, dtypes: what it takes and gives. fallback: the
    backend that serves when it cannot; None for the reference. tests: paths in the repository.
    receipt: a file in `figures.FOLDER`, or None and `no_receipt` says why. figures: what else was
    measured. exit_when: the condition under which the backend is decided anew. builds: "module:
    attribute" of the `nvcc.Library` that is compiled for it. skips: admission
    check or dtype -> why it is not run. before: a later backend that the receipt has as faster ->
    why `auto` takes this one first all the same.
    """

    name: str
    implementation: str
    supports: Callable[[Workload], str | None]
    opt_in: bool | Callable[[Workload], str | None] = False
    stand_in: str | None = None
    ruled_out: Callable[["Recipe", Workload], str | None] | None = None
    role: Role = "vendor"
    removes: str = ""
    layout: str = ""
    dtypes: str = ""
    fallback: str | None = None
    tests: tuple[str, ...] = ()
    receipt: str | None = None
    no_receipt: str | None = None
    figures: tuple[Figure, ...] = ()
    exit_when: str = ""
    builds: str | None = None
    skips: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)

    @property
    def benched(self) -> str:
        """What a bench and the admission suite call."""
        return self.stand_in or self.implementation

    def passed_over(self, workload: Workload) -> str | None:
        """Why `auto` does not take it though it can serve, or None."""
        if callable(self.opt_in):
            return self.opt_in(workload)
        return "serves only where it is named" if self.opt_in else None


@dataclass(frozen=True)
class Surface:
    """A place in the model where more than one implementation fits.

    backends: in order of preference; the last is `reference`, plain torch. workload: what a recipe
    asks of the surface on a device, or None when the recipe's model does not have the surface.
    blocks: letters of the block families it touches; without one, `outside` says what it is part
    of. case: the class that a bench and the admission suite need, "module:attribute"
    (`megacpp_mcore.kernels.case`).
    """

    name: str
    backends: tuple[Backend, ...]
    workload: Callable[["Recipe", str], Workload | None]
    blocks: str = ""
    outside: str = "the head"
    case: str | None = None

    def backend(self, name: str) -> Backend:
        """The backend of that name. Raises KeyError."""
        return {backend.name: backend for backend in self.backends}[name]


def reference(
    implementation: str, supports: Callable[[Workload], str | None], **facts: Any
) -> Backend:
    """The backend `reference`: the definition in plain torch, which every surface has."""
    exit_when = "never: it is the definition that the others are held to"
    common = {"role": "fallback", "exit_when": exit_when}
    return Backend(REFERENCE, implementation, supports, **common, **facts)


def load(implementation: str) -> Any:
    """Import "module:attribute" and return the attribute."""
    module, attribute = implementation.split(":")
    return getattr(importlib.import_module(module), attribute)
