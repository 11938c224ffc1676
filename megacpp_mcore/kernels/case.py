"""A case: one size of a surface with everything that a bench and a test need to know about it.

The inputs, the reference, how close a backend must come to it, what a call costs at least, and how
a backend that has been loaded is called. The bench and the admission suite know nothing of a
surface but its case.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.surfaces.backend import Backend, load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import Workload

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.recipe import Recipe

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class BoundBackend:
    """A backend, ready to run one case.

    call: the case's tensors by name -> its outputs by name. parameters: tensors of the case that
    the backend keeps as parameters of its own, one each, or one for each slice of the first axis.
    """

    call: Callable[..., Tensors]
    parameters: Mapping[str, Sequence[torch.nn.Parameter]] = field(default_factory=dict)

    def put(self, tensors: Tensors) -> None:
        """Copy the case's values of the backend's own parameters into them."""
        with torch.no_grad():
            for name, parameters in self.parameters.items():
                slices = tensors[name].chunk(len(parameters))
                for parameter, value in zip(parameters, slices, strict=True):
                    parameter.copy_(value.reshape(parameter.shape))


class Case(ABC):
    """Base of the cases; a subclass is a frozen dataclass whose fields are the sizes.

    inputs: tensors with a gradient. fp32_tensors: inputs and outputs that are float32 in a bf16
    model too. backward_flops: operations of a backward pass in units of a forward pass's; 0 for one
    that hands on the gradient as it is, and moves no bytes either. backward_reads_inputs: it needs
    the inputs again; not where the outputs are linear in them. links: names of `summands` ->
    gradient that holds the terms: a backend's sum must be that of its own terms. variants: other
    forms of the same call, for `as_variant`, the first of them the one that `of` gives. yardsticks:
    what a bench times with the backends, and nothing else can ask for.
    """

    surface: ClassVar[str]
    inputs: tuple[str, ...]
    fp32_tensors: ClassVar[tuple[str, ...]] = ()
    backward_flops: ClassVar[int] = 2
    backward_reads_inputs: ClassVar[bool] = True
    links: ClassVar[Mapping[str, str]] = {}
    variants: ClassVar[tuple[str, ...]] = ()

    @property
    def yardsticks(self) -> tuple[Backend, ...]:
        return ()

    @classmethod
    @abstractmethod
    def of(cls, recipe: "Recipe") -> Self | None:
        """One micro batch of `recipe` in one process; None when no layer has the surface."""

    def as_variant(self, name: str) -> Self:
        """The same sizes in the form `name`, one of the class's variants."""
        raise KeyError(f"{type(self).__name__} has no variants")

    @classmethod
    @abstractmethod
    def samples(cls) -> dict[str, Self]:
        """Small ones for tests: "plain", "odd..." (no multiples of a tile), "empty..."."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name, as a receipt keeps them."""
        return asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        """What a layer of these sizes asks of dispatch."""

    @abstractmethod
    def make_inputs(self, generator: torch.Generator) -> Tensors:
        """Random tensors such as a model would hold, on the generator's device, and integers."""

    @staticmethod
    def normal(generator: torch.Generator, *shape: int) -> Tensor:
        """Standard normal, float64 on a CPU, where it is checked to float64, else float32."""
        dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

    @abstractmethod
    def reference(self, **tensors: Tensor) -> Tensors:
        """The outputs by the definition, in the dtype of the tensors; differentiable."""

    def rounded_reference(self, **tensors: Tensor) -> Tensors:
        """The definition, with what a right backend may keep in the tensors' dtype rounded to it:
        what rounding does to it is measured so."""
        return self.reference(**tensors)

    @abstractmethod
    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        """What `Decision.load` returned, ready to be called with this case's tensors.

        Needs Megatron's process groups where the backends are Megatron modules.
        """

    @abstractmethod
    def roundings(self, name: str) -> float:
        """How many roundings to the dtype lie on the way to output or gradient (`d...`) `name`."""

    @abstractmethod
    def terms(self, name: str) -> int:
        """The length of the sums on the way to a value of output or gradient `name`."""

    def sums(self, directions: Tensors, **tensors: Tensor) -> dict[str, float]:
        """The largest sum of absolute terms on the way to an output, or to a gradient along
        `directions` (`d...`), by its name, where the terms may cancel and be rounded one by one:
        its error is then in units of that."""
        return {}

    def floors(
        self, truth: Tensors, directions: Tensors, dtype: torch.dtype, **tensors: Tensor
    ) -> dict[str, float | Tensor]:
        """The root mean square, by name, of an error that a right backend may have in any region,
        however small the truth is there: of a rounding that does not get smaller with it.

        One for all values, or a tensor that broadcasts to them. truth: outputs and gradients.
        """
        return {}

    def summands(
        self, values: Tensors, directions: Tensors, **tensors: Tensor
    ) -> dict[str, Tensor]:
        """Terms by the name of a gradient each of whose few values is a sum over tokens of terms
        that may cancel: the terms, (..., values). Those of `links` from the gradients in `values`.

        Roundings of the terms are independent, so that they move the sum by as many times the root
        of the sum of the squared terms as they move a term, however little is left of the sum: it
        is judged in units of that. (The sum of absolute terms is larger by the root of their
        number, and allows as much more.)
        """
        return {}

    def unread_bytes(self, tensors: Tensors) -> int:
        """Bytes of the inputs that a forward call does not have to read."""
        return 0

    @abstractmethod
    def flops(self) -> int:
        """Operations that a forward call needs at least."""

    def tolerance(self, name: str, dtype: torch.dtype) -> float:
        """The bound of the error of output or gradient `name`, in units of its largest value, or
        of its `sums`.

        A rounding to the dtype moves a value by half an epsilon of it; a sum of n terms in float32
        (float64 for float64) is off by up to n epsilons of its largest partial sum.
        """
        accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
        rounded = self.roundings(name) * torch.finfo(dtype).eps / 2
        return rounded + self.terms(name) * accumulator.eps

    def usual_tolerance(self, name: str, dtype: torch.dtype) -> float:
        """The tolerance of a region's root mean square, in units of the truth's there: roundings
        and sums are as `tolerance` has them, but independent, so that the root of their number
        counts."""
        accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
        rounded = self.roundings(name) ** 0.5 * torch.finfo(dtype).eps / 2
        return rounded + self.terms(name) ** 0.5 * accumulator.eps


class OperatorCase(Case):
    """The case of a surface whose backends are called as its definition is.

    definition: the operator in plain torch.
    """

    definition: ClassVar[Any]

    @abstractmethod
    def call(self, operator: Any, **tensors: Tensor) -> Tensors:
        """The outputs of the definition, or of a backend that has been loaded."""

    def reference(self, **tensors: Tensor) -> Tensors:
        return self.call(self.definition, **tensors)

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        return BoundBackend(functools.partial(self.call, implementation))


def transformer_config(device: str, dtype: torch.dtype, **fields: Any) -> "TransformerConfig":
    """Megatron's, of one layer with these fields on a device."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=device == "cpu",
        **fields,
    )


class CaseError(MegacppError):
    """A surface that has no case."""


def case_class(surface: str) -> type[Case]:
    """The surface's case class. Raises CaseError naming the surfaces that have one."""
    known = {name: found.case for name, found in REGISTRY.items() if found.case}
    if surface not in known:
        raise CaseError(f"surface {surface!r} has no case; choose {', '.join(known)}")
    return load(known[surface])
