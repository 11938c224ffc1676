"""Every layout that a recipe's rules admit on a number of GPUs, with its memory and its step.

Candidates are divisors; whether one is legal is asked of the rules, by loading the recipe with the
layout as `--set` words. Three choices need no loading each: how gradients are summed, whether the
optimizer is sharded, and what is recomputed. The last only costs time, so that a layout takes the
first of RECOMPUTE with which it fits.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.hybrid.pattern import PatternError
from megacpp_mcore.planner import PlanError
from megacpp_mcore.planner.memory import Memory, memory
from megacpp_mcore.planner.pipeline import planned_of
from megacpp_mcore.planner.rates import Rates
from megacpp_mcore.planner.step import Step, step
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.rules import cuda_graphs
from megacpp_mcore.recipe.schema import SECTIONS
from megacpp_mcore.recipe.source import RecipeError, read

_EXPERTS = ("experts", "shared_experts")
# name -> keys; each keeps less than the one before it
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "experts": {"recompute.moe": _EXPERTS},
    "inner": {
        "recompute.moe": _EXPERTS,
        "recompute.mamba3": "core",
        "recompute.m2rnn": "core",
        "recompute.attention": ("up_proj",),
    },
    "full": {
        "parallel.recompute_granularity": "full",
        "parallel.recompute_method": "uniform",
        "parallel.recompute_num_layers": 1,
        "recompute.moe": (),
        "recompute.mamba3": None,
        "recompute.m2rnn": None,
        "recompute.attention": (),
        "recompute.layernorm": False,
    },
}
_PP = "parallel.pipeline_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"
_MICRO = "schedule.micro_batch_size"
_CONNECTIONS = "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS"
_BATCH = "schedule.global_batch_size"
_SUMMED_IN_BF16 = "precision.grad_reduce_in_bf16"
_VIRTUAL = (1, 2, 4)
_ROWS = (1, 2, 4, 8, 16)
_MOST_GPUS = 10**6  # their divisors take a fraction of a second to find


@dataclass(frozen=True)
class Layout:
    """One legal layout. words: of `--set`, those that differ from the recipe."""

    recipe: Recipe
    recompute: str
    memory: Memory
    step: Step
    words: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of one GPU."""
        tokens = self.recipe.schedule.global_batch_size * self.recipe.model.seq_length
        return tokens / self.step.total / self.recipe.world_size


@dataclass(frozen=True)
class Plan:
    """layouts: those that fit, the fastest first. smallest: of all legal ones. unsplit: the
    smallest without expert parallelism, None where none is legal."""

    gpus: int
    nodes: int
    budget: float
    legal: int
    layouts: tuple[Layout, ...]
    smallest: Layout
    unsplit: Layout | None


def plan(
    name: str, overrides: Sequence[str], gpus: int, nodes: int | None, budget: float, rates: Rates
) -> Plan:
    """Search. budget: bytes that tensors may take on a GPU.

    Raises PlanError for numbers that make no sense, and where no layout is legal or none fits;
    RecipeError where the recipe itself is refused; DispatchError as `dispatch.check_read`.
    """
    nodes = _nodes(gpus, nodes, int(rates["host_gpus"]))
    if not budget > 0:
        raise PlanError(f"--memory leaves {budget / 2**30:g} GiB; it must be more than 0")
    base = _Asked(name, overrides)
    if base.get("launch.device") != "cuda":
        raise PlanError(
            f"{name} is for launch.device = {base.get('launch.device')!r}, not for GPUs"
        )
    found: list[Layout] = []
    recomputes: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for shape, recipe in _legal(name, overrides, _shapes(base, gpus, nodes), refused):
        recomputes = recomputes or _recomputes(name, (*overrides, *words_of(shape)), recipe)
        for choice in _choices(recipe):
            found.append(_fitted(base, recipe, shape, choice, recomputes, budget, rates))
    if not found:
        raise PlanError(
            f"no layout of {name} on {gpus} GPUs is legal: "
            + (f"{refused[0]}. " if refused else "")
            + f"With {_BATCH} = {base.get(_BATCH)} there are at most as many data-parallel ranks; "
            "a larger one has room for more GPUs"
        )
    dispatch.check_read(found[0].recipe)
    smallest = min(found, key=lambda layout: layout.memory.total)
    fitting = [layout for layout in found if layout.memory.total <= budget]
    if not fitting:
        raise PlanError(_too_little(smallest, gpus, budget, len(found), rates))
    unsplit = [x for x in found if x.recipe.parallel.expert_model_parallel_size == 1]
    return Plan(
        gpus, nodes, budget, len(found),
        tuple(sorted(fitting, key=lambda layout: layout.step.total)), smallest,
        min(unsplit, key=lambda layout: layout.memory.total, default=None),
    )  # fmt: skip


def checked(name: str, overrides: Sequence[str], layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that also load with all of their words, as they are printed."""
    found = []
    for layout in layouts:
        try:
            load_recipe(name, (*overrides, *layout.words))
        except RecipeError:
            continue
        found.append(layout)
    return found


def words_of(values: dict[str, Any]) -> tuple[str, ...]:
    """The values as `--set` takes them."""
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    )


def _nodes(gpus: int, nodes: int | None, of_host: int) -> int:
    if not 1 <= gpus <= _MOST_GPUS:
        raise PlanError(f"--gpus is {gpus}; a layout needs at least 1, at most {_MOST_GPUS:,}")
    nodes = -(-gpus // of_host) if nodes is None else nodes
    if nodes < 1 or gpus % nodes:
        raise PlanError(
            f"--gpus {gpus} is the number on all hosts together, and does not divide over {nodes} "
            "of them; give --nodes a divisor of it"
        )
    return nodes


class _Asked:
    """What a recipe's files and overrides say, whether or not its own layout is legal."""

    def __init__(self, name: str, overrides: Sequence[str]) -> None:
        self._values = read(name, overrides).values
        if _BATCH not in self._values or "model.depth" not in self._values:
            load_recipe(name, overrides)  # says which keys are missing

    def get(self, dotted: str) -> Any:
        """The value of `section.key`, or its default."""
        section, _, key = dotted.partition(".")
        field = SECTIONS[section].__dataclass_fields__.get(key)  # none: the entry of a table
        return self._values.get(dotted, field and field.default)


def _shapes(base: _Asked, gpus: int, nodes: int) -> Iterator[dict[str, Any]]:
    """Every combination of sizes that divide; the data-parallel size is what they leave."""
    here = gpus // nodes
    batch, experts = base.get(_BATCH), base.get("moe.num_experts")
    cp = base.get("parallel.context_parallel_size")
    rows = [rows for rows in _ROWS if not batch % rows]
    for tp, pp in itertools.product(_divisors(here), _divisors(gpus)):
        if gpus % (tp * pp * cp) or pp > base.get("model.depth"):
            continue
        etps = (None, 1) if tp > 1 and experts else (None,)
        virtual = _VIRTUAL if pp > 1 else (1,)
        dp = gpus // (tp * pp * cp)
        for vpp, etp, ep, row in itertools.product(virtual, etps, _divisors(experts or 1), rows):
            if gpus % (pp * ep * (etp or tp)) or batch % (row * dp):
                continue
            # Megatron asks for one connection with tensor or context parallelism
            yield ({_CONNECTIONS: "1"} if tp * cp > 1 else {}) | {
                "launch.nnodes": nodes,
                "launch.nproc_per_node": here,
                "parallel.tensor_model_parallel_size": tp,
                "parallel.sequence_parallel": tp > 1,
                _PP: pp,
                _VPP: vpp if vpp > 1 else None,
                "parallel.expert_model_parallel_size": ep,
                "parallel.expert_tensor_parallel_size": etp,
                _MICRO: row,
            }


def _choices(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Whether the optimizer is sharded."""
    sharded = recipe.parallel.use_distributed_optimizer
    for shard in (True, False) if recipe.data_parallel_size > 1 else (sharded,):
        choice = {"parallel.use_distributed_optimizer": shard}
        if not shard:
            choice["parallel.overlap_param_gather"] = False
        yield choice


def _recomputes(name: str, overrides: Sequence[str], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Those of RECOMPUTE that the rules admit, for what the model has; none where the recipe asks
    for CUDA graphs by name."""
    captured = recipe.launch.cuda_graph_impl != "none"
    if captured and not cuda_graphs.was_auto(recipe):
        return {"none": {}}
    can = {name for layer in recipe.plan.layers for name in planned_of(layer).recomputes}
    found: dict[str, dict[str, Any]] = {}
    for step_name, keys in RECOMPUTE.items():
        asked = {key: value for key, value in keys.items() if _is_of_a_layer(key, value, can)}
        if asked.get("recompute.moe") and not _has_own_shared_experts(recipe):
            asked["recompute.moe"] = ("experts",)
        try:
            loaded = load_recipe(name, (*overrides, *words_of(asked)))
        except RecipeError:
            continue
        if captured and loaded.launch.cuda_graph_impl == "none":
            asked[cuda_graphs.IMPL] = "none"
        found[step_name] = asked
    return found


def _is_of_a_layer(key: str, value: Any, can: set[str]) -> bool:
    """Whether a value of RECOMPUTE is about a layer of the model. can: its `recomputes`."""
    section, _, block = key.partition(".")
    if section != "recompute" or value is False:
        return True
    if not value:  # takes back what is asked of the block
        return any(name.startswith(f"{block}.") for name in can)
    parts = value if isinstance(value, tuple) else (value,)
    return any(f"{block}.{part}" in can for part in parts)


def _has_own_shared_experts(recipe: Recipe) -> bool:
    """Megatron does not recompute those that overlap the exchange."""
    moe = recipe.moe
    return bool(moe.moe_shared_expert_intermediate_size) and not moe.moe_shared_expert_overlap


def _fitted(
    base: _Asked, recipe: Recipe, shape: dict[str, Any], choice: dict[str, Any],
    recomputes: dict[str, dict[str, Any]], budget: float, rates: Rates,
) -> Layout:  # fmt: skip
    """The layout with the first of `recomputes` that fits, else with the last."""
    for recompute in recomputes:
        asked = choice | recomputes[recompute]
        whole = _with(recipe, asked)
        needed = memory(whole, rates["skew"])
        if needed.total <= budget:
            break
    words = words_of({key: value for key, value in (shape | asked).items()
                      if base.get(key) != value})  # fmt: skip
    return Layout(whole, recompute, needed, step(whole, rates), words)


def _with(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe with other values, as loading it with them would make it."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        if recipe.get(dotted) != value:
            sections.setdefault(section, {})[key] = value
    changed = {
        name: dataclasses.replace(getattr(recipe, name), **keys) for name, keys in sections.items()
    }
    return dataclasses.replace(recipe, **changed)


def _legal(
    name: str, overrides: Sequence[str], shapes: Iterator[dict[str, Any]], refused: list[str]
) -> Iterator[tuple[dict[str, Any], Recipe]]:
    """The shapes that the recipe's rules admit. refused: gets what the rules said of the others.

    What is refused with one row in a micro batch is not asked with more: every rule about the batch
    is that something divides it. Nor is a number of stages that the pattern cannot be cut into.
    """
    hopeless: set[tuple] = set()
    for shape in shapes:
        stages = (shape[_PP], shape[_VPP])
        sizes = tuple(value for key, value in shape.items() if key != _MICRO)
        if stages in hopeless or sizes in hopeless:
            continue
        try:
            yield shape, load_recipe(name, (*overrides, *words_of(shape)))
        except RecipeError as error:
            hopeless.add(stages if isinstance(error.__cause__, PatternError) else sizes)
            refused.append(str(error))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if not number % size]


def _too_little(smallest: Layout, gpus: int, budget: float, legal: int, rates: Rates) -> str:
    needed, gpu = smallest.memory.total, "GPU" if gpus == 1 else "GPUs"
    precision, in_bf16 = smallest.recipe.precision, ""
    if precision.bf16 and not precision.grad_reduce_in_bf16:
        halved = memory(_with(smallest.recipe, {_SUMMED_IN_BF16: True}), rates["skew"]).total
        in_bf16 = (
            f", and {halved / 2**30:.1f} GiB with --set {_SUMMED_IN_BF16}=true, which changes the "
            "numbers of a run"
        )
    return (
        f"none of the {legal} legal layouts on {gpus} {gpu} fits into {budget / 2**30:.1f} GiB a "
        f"GPU; the smallest takes {needed / 2**30:.1f} GiB ({needed:,.0f} bytes){in_bf16}: "
        + " ".join(f"--set {word}" for word in smallest.words)
    )
