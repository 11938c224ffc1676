"""Running a case forward and backward, and its distance from the truth."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacpp_mcore.kernels import regions
from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors


@dataclass(frozen=True)
class Error:
    """How far output or gradient `name` is from the truth, in units of the truth's largest value
    or of what it is the sum of (`Case.sums`, `Case.summands`).

    Or in one region of it, `where`, in units of the truth's size there (`kernels.regions`).

    what: why the error is infinite: a value that is not finite, no gradient, another shape or
    dtype than the truth's.
    """

    name: str
    error: float
    tolerance: float
    what: str = ""
    where: str = ""

    @property
    def share(self) -> float:
        """The error in units of the tolerance: above 1 is wrong."""
        return self.error / self.tolerance

    def __str__(self) -> str:
        figures = f"error {self.error:.3e}, tolerance {self.tolerance:.3e}"
        place = f" in {self.where}" if self.where else ""
        return f"{self.name}: {self.what or figures + place}"


@dataclass(frozen=True)
class Truth:
    """Outputs and, under `d<name>`, gradients along `directions`, one for each output.

    sums, floors: see `Case`; the spreads of its summands are in both. links: of its `links`.
    rounding: by name, where regions are to be judged.
    """

    values: Tensors
    directions: Tensors
    sums: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, regions.Rounding] = field(default_factory=dict)
    floors: Mapping[str, float | Tensor] = field(default_factory=dict)
    links: "Links | None" = None


_MAY_ALL_CANCEL = 4  # values, of which the largest is at most twice the rms
# Errors of the terms of a sum, each at most half an epsilon of its term, and as often up as down,
# come to more than n half epsilons of the terms' spread once in exp(n^2 / 2) / 2 values, at any
# number of terms (Hoeffding's inequality): with 6 once in 33 million.
_CHANCE = 6.0


@dataclass(frozen=True)
class Links:
    """Whether a backend's sums over tokens are those of its own terms, which it returns as well.

    A sum's bound must be wide where the terms' errors are not independent, as those of a state that
    later tokens read; but of its own terms it is the sum, but for their rounding to the dtype, one
    each, and the sum's in float32. spreads: of the truth's terms, by name.
    """

    case: Case
    directions: Tensors
    tensors: Tensors
    spreads: Tensors

    def error(self, name: str, actual: Tensors, dtype: torch.dtype) -> Error | None:
        """The error in units of the terms' spread; None where there are no such terms."""
        source = self.case.links.get(name, "")
        terms = actual.get(source)
        if terms is None or terms.shape != self.tensors[source.removeprefix("d")].shape:
            return None
        wide = actual | {source: terms.to(self.spreads[name].dtype)}
        summed = self.case.summands(wide, self.directions, **self.tensors)[name]
        distance = (actual[name] - summed.flatten(0, -2).sum(0)).abs() / self.spreads[name]
        accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
        bound = _CHANCE * torch.finfo(dtype).eps / 2 + self.case.terms(name) * accumulator.eps
        return Error(name, _largest(distance.nan_to_num(0.0)), bound, where=f"the sum of {source}")


def drawn(case: Case, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    """The case's tensors on `device`, in `dtype` but for its fp32_tensors."""
    tensors = case.make_inputs(torch.Generator(device).manual_seed(seed))
    return {
        name: tensor.to(device, dtype_of(case, name, dtype) if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }


def dtype_of(case: Case, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of input or output `name` in a model of `dtype`."""
    return torch.promote_types(dtype, torch.float32) if name in case.fp32_tensors else dtype


def truth_of(
    case: Case,
    tensors: Tensors,
    dtype: torch.dtype,
    wide: torch.dtype,
    directions: Tensors | None = None,
    *,
    by_region: bool = False,
) -> Truth:
    """The definition in dtype `wide`, from the values that the tensors of `dtype` hold.

    directions: one gradient an output; by default random ones, rounded to the outputs' dtypes so
    that a backend gets the same. by_region: also computed in `dtype`, several times, so that
    `errors` judges each region of each tensor.
    """
    widened = {n: t.to(wide) if t.is_floating_point() else t for n, t in tensors.items()}
    leaves = {name: widened[name].detach().requires_grad_() for name in case.inputs}
    outputs = case.reference(**{**widened, **leaves})
    if directions is None:
        directions = {n: _direction(y).to(dtype_of(case, n, dtype)) for n, y in outputs.items()}
    values = _values(outputs, {n: d.to(wide) for n, d in directions.items()}, leaves)
    spreads = {
        name: terms.flatten(0, -2).norm(dim=0)
        for name, terms in case.summands(values, directions, **widened).items()
    }
    sums = case.sums(directions, **widened) | {n: _largest(x) for n, x in spreads.items()}
    draws = _draws(case, tensors, directions) if by_region else {}
    rounding = {
        name: regions.Rounding([regions.Draw.of(value, values[name]) for value in found])
        for name, found in draws.items()
        if name in values and values[name].numel()
    }
    floors = {name: case.usual_tolerance(name, dtype) * x for name, x in spreads.items()}
    floors |= case.floors(values, directions, dtype, **widened)
    links = Links(case, directions, tensors, spreads)
    return Truth(values, directions, sums, rounding, floors, links)


def _draws(case: Case, tensors: Tensors, directions: Tensors) -> dict[str, list[Tensor]]:
    """The definition in the tensors' own dtypes, rounded as a backend may: of the tensors, and of
    others in which one value in four of each input is the next to it, up or down."""
    bound, found = BoundBackend(case.rounded_reference), {}
    values = sum(tensors[name].numel() for name in case.inputs)
    for number in range(regions.number_of_draws(values)):
        given = dict(tensors)
        for name in case.inputs if number else ():
            given[name] = regions.jittered(tensors[name], number)
        for name, value in run(case, bound, given, directions).items():
            found.setdefault(name, []).append(value)
    return found


def _direction(y: Tensor) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=y.device)


def run(case: Case, bound: BoundBackend, tensors: Tensors, directions: Tensors) -> Tensors:
    """A backend's outputs and, under `d<name>`, its gradients along `directions`."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in case.inputs}
    bound.put(tensors)
    outputs = bound.call(**{**tensors, **leaves})
    return _values(outputs, directions, leaves, bound.parameters)


def errors(case: Case, actual: Tensors, truth: Truth, dtype: torch.dtype) -> list[Error]:
    """One entry an output and a gradient, the worst first."""
    largest = {name: _largest(expected) for name, expected in truth.values.items()}
    found = []
    for name, expected in truth.values.items():
        source = name if name in truth.directions else name.removeprefix("d")
        what = _difference(actual.get(name), expected, dtype_of(case, source, dtype))
        # Values that cancel to rounding noise in the truth have no size of their own.
        noise = 1000 * torch.finfo(expected.dtype).eps * max(largest.values())
        size = largest[name] if largest[name] > noise else max(largest.values()) or 1.0
        size = max(size, truth.sums.get(name, 0.0))
        distance = math.inf if what else _largest(actual[name].to(expected.dtype) - expected)
        one = Error(name, distance / size, case.tolerance(name, dtype), what)
        if name in truth.rounding and not what and largest[name] > noise:
            rounding, allowed = truth.rounding[name], case.usual_tolerance(name, dtype)
            floor = truth.floors.get(name, 0.0)
            far = regions.worst(actual[name], expected, rounding, allowed, floor)
            region = Error(name, far.error, far.bound, where=far.where)
            # So few values may all cancel: what is left of them is no size to judge an error by.
            cancel = expected.numel() <= _MAY_ALL_CANCEL and name not in truth.sums
            one = region if cancel else max(one, region, key=_share)
        linked = truth.links.error(name, actual, dtype) if truth.links and not what else None
        found.append(max(one, linked or one, key=_share))
    return sorted(found, key=lambda error: -error.share)


def _share(error: Error) -> float:
    return error.share


def _values(
    outputs: Tensors, directions: Tensors, leaves: Tensors,
    parameters: Mapping[str, list[Tensor]] | None = None,
) -> Tensors:  # fmt: skip
    """Outputs and gradients; a tensor that nothing depends on has no entry."""
    sources = {name: [leaf] for name, leaf in leaves.items()} | dict(parameters or {})
    flat = [tensor for tensors in sources.values() for tensor in tensors]
    along = [directions[name].to(y.dtype) for name, y in outputs.items()]
    gradients = iter(torch.autograd.grad(list(outputs.values()), flat, along, allow_unused=True))
    values = {name: y.detach() for name, y in outputs.items()}
    for name, tensors in sources.items():
        parts = [next(gradients) for _ in tensors]
        if all(part is not None for part in parts):
            whole = parts[0] if len(parts) == 1 else torch.stack(parts)
            values[f"d{name}"] = whole.reshape(leaves[name].shape)
    return values


def _difference(actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> str:
    if actual is None:
        return "there is none"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.dtype != dtype:
        return f"{actual.dtype}, expected {dtype}"
    if not actual.isfinite().all():
        return f"{int((~actual.isfinite()).sum())} of {actual.numel()} values are not finite"
    return ""


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
