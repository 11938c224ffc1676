"""Predicted time of a step, from a recipe's operations and bytes and from measured rates.

A micro batch on a pipeline stage is the sum of its products, its attention and recurrences, the
bytes that everything else moves and the collectives inside layers; the launches of its layers, the
host's or a captured graph's, count where they take longer. A step is its micro batches with the
pipeline's bubble, the part of the data-parallel collectives that is not hidden, and the optimizer.
"""

from dataclasses import dataclass, fields

from megacpp_mcore.hybrid.letters.experts import share_that_arrives
from megacpp_mcore.hybrid.letters.letter import BF16
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner.activations import Sizes, bytes_per_token
from megacpp_mcore.planner.backends import PASSES_OF_OTHERS, passes_rate
from megacpp_mcore.planner.memory import optimized, parameters, summed_bytes
from megacpp_mcore.planner.pipeline import (
    costs,
    is_last,
    kinds_of,
    layers_of,
    micro_batches,
    name_of,
    planned_of,
)
from megacpp_mcore.planner.rates import Rates
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_dispatch
from megacpp_mcore.surfaces.support import TE

_EXCHANGES = 4  # dispatch and combine, each way
_GATHERS = 5  # of a layer's tokens under sequence parallelism: 2 forward, 3 backward
_HEADS = ("head", "MTP head", "MTP projection")
_BUCKET = 40_000_000, 1_000_000  # Megatron's ddp_bucket_size: at least, and a rank

# name of `costs` -> operations a token, and those of them that are no attention
Flops = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Step:
    """Seconds of a step, in the parts that add up to `total`. stage: the slowest one.

    host, gaps: what launches take beyond all the rest, of the host or inside a captured graph.
    """

    products: float = 0.0
    attention: float = 0.0
    recurrences: float = 0.0
    moved: float = 0.0
    recomputed: float = 0.0
    exchange: float = 0.0
    tensor_parallel: float = 0.0
    pipeline: float = 0.0
    host: float = 0.0
    gaps: float = 0.0
    data_parallel: float = 0.0
    optimizer: float = 0.0
    stage: int = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "stage")

    @property
    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}


@dataclass(frozen=True)
class Link:
    """How the ranks of a group are joined: the rate of a rank, and seconds a hop."""

    ranks: int
    bytes_per_s: float
    latency: float

    @classmethod
    def of(
        cls, recipe: Recipe, rates: Rates, ranks: int, stride: int, nvlink: str = "nvlink"
    ) -> "Link":
        """The link of a group whose ranks are `stride` GPUs apart. nvlink: the rate on one host."""
        if ranks == 1:
            return cls(1, float("inf"), 0.0)
        here = max(1, recipe.launch.nproc_per_node // stride)  # of the group, on one host
        if ranks <= here:
            return cls(ranks, rates[nvlink], rates["nvlink_latency"])
        rate = min(rates[nvlink], here * rates["network"])
        return cls(ranks, rate, rates["network_latency"])

    def ring(self, size: float, messages: float = 1) -> float:
        """Seconds of an all-gather to `size` bytes, or a reduce-scatter of them."""
        others = self.ranks - 1
        return others / self.ranks * size / self.bytes_per_s + messages * others * self.latency

    def exchange(self, size: float) -> float:
        """Seconds of an all-to-all of `size` bytes a rank."""
        return (self.ranks - 1) / self.ranks * size / self.bytes_per_s + self.latency


def step(recipe: Recipe, rates: Rates) -> Step:
    """The predicted step: that of the slowest pipeline stage."""
    sizes, stages = Sizes.of(recipe), range(recipe.parallel.pipeline_model_parallel_size)
    found = (_of_stage(recipe, rates, sizes, stage) for stage in stages)
    return max(found, key=lambda s: s.total)


def _of_stage(recipe: Recipe, rates: Rates, sizes: Sizes, stage: int) -> Step:
    batches, plan = micro_batches(recipe), recipe.plan
    one = micro_batch(recipe, rates, sizes, stage)
    device = sum(one.values())
    captured = recipe.launch.cuda_graph_impl == "full_iteration"
    launches = rates["captured" if captured else "host"] * len(layers_of(recipe, stage))
    waits = max(0.0, launches - device)
    bubble = (plan.pp - 1) / plan.vpp * (device + waits)
    own = {name: batches * seconds for name, seconds in one.items()}
    own["pipeline"] += bubble
    dense, experts = parameters(recipe, sizes, stage)
    return Step(
        **own,
        **{"gaps" if captured else "host": batches * waits},
        data_parallel=_data_parallel(recipe, rates, sizes, dense, experts, device),
        optimizer=_optimizer(recipe, rates, sizes, dense, experts),
        stage=stage,
    )


def micro_batch(recipe: Recipe, rates: Rates, sizes: Sizes, stage: int) -> dict[str, float]:
    """Seconds of a micro batch's forward and backward on a stage, by `Step`'s names."""
    found = dict.fromkeys(
        ("products", "attention", "recurrences", "moved", "recomputed", "exchange",
         "tensor_parallel", "pipeline"), 0.0,
    )  # fmt: skip
    flops = flops_of(recipe)
    for layer, number in kinds_of(recipe, stage):
        parts = layer_seconds(recipe, rates, sizes, layer, flops)
        recomputed = _recomputed_share(recipe, rates, layer) * sum(parts.values()) / 3
        parts |= _collectives(recipe, rates, sizes, layer) | {"recomputed": recomputed}
        for name, seconds in parts.items():
            found[name] += number * seconds
    if is_last(recipe, stage):
        heads = sum(flops[name][1] for name in _HEADS if name in flops)
        found["products"] += sizes.tokens * heads / sizes.tp / rates["products"]
    found["moved"] += adding_gradients(recipe, rates, sizes, stage)
    if recipe.plan.pp > 1:
        size = BF16 * recipe.model.hidden_size * sizes.tokens / sizes.cut
        link = Link.of(recipe, rates, 2, recipe.world_size // recipe.plan.pp)
        found["pipeline"] += 2 * recipe.plan.vpp * (size / link.bytes_per_s + link.latency)
    return found


def adding_gradients(recipe: Recipe, rates: Rates, sizes: Sizes, stage: int) -> float:
    """Seconds in which a micro batch's weight gradients are added to the main gradient.

    Those that Transformer Engine's products have not added themselves: a bf16 gradient is read, and
    the one that is summed is read and written.
    """
    dense, experts = parameters(recipe, sizes, stage)
    if recipe.precision.gradient_accumulation_fusion:
        dense = 0.0
        added = sizes.serving["moe_experts"] == TE or sizes.serving.gathers_tokens
        experts = 0.0 if added else experts
    return (dense + experts) * (BF16 + 2 * summed_bytes(recipe)) / rates["bytes"]


def flops_of(recipe: Recipe) -> Flops:
    without = costs(recipe, keys=0.0)
    return {name: (cost.flops, without[name].flops) for name, cost in costs(recipe).items()}


def layer_seconds(
    recipe: Recipe, rates: Rates, sizes: Sizes, layer: Layer, flops: Flops
) -> dict[str, float]:
    """Forward and backward of one layer on one rank, without collectives and recomputation."""
    tokens, tp, planned = sizes.tokens, sizes.tp, planned_of(layer)
    whole, products = flops[name_of(layer)]
    routed = planned.experts.flops(recipe) if planned.experts else 0.0
    projections = "products_fp8" if recipe.precision.fp8 else "products"
    experts = f"experts_{sizes.serving['moe_experts']}"
    core = f"attention_{sizes.serving['core_attention']}"
    kept = bytes_per_token(recipe, sizes, layer, recompute=False)
    served = passes_rate(layer.letter, sizes.serving.of_layer(layer))
    passes = _rate(rates, served, PASSES_OF_OTHERS)
    return {
        "products": tokens / tp * ((products - routed) / rates[projections]
                                   + routed / _rate(rates, experts, "experts_te")),
        "attention": tokens / tp * (whole - products) / _rate(rates, core, "attention_sdpa_cudnn"),
        "recurrences": planned.recurrence(recipe, sizes, rates) if planned.recurrence else 0.0,
        "moved": tokens * kept * passes / rates["bytes"],
    }  # fmt: skip


def _rate(rates: Rates, name: str, otherwise: str) -> float:
    return rates[name if name in rates.measured else otherwise]


def _recomputed_share(recipe: Recipe, rates: Rates, layer: Layer) -> float:
    """The share of a layer's forward pass that its backward pass repeats."""
    if recipe.parallel.recompute_granularity == "full":
        return 1.0
    can = (name.partition(".") for name in planned_of(layer).recomputes)
    parts = {part for key, _, part in can if part in recipe.recompute.asked(key)}
    if {"layer", "mixer"} & parts:
        return 1.0
    return max((rates[f"again_{part}"] for part in parts), default=0.0)


def _collectives(recipe: Recipe, rates: Rates, sizes: Sizes, layer: Layer) -> dict[str, float]:
    row = BF16 * recipe.model.hidden_size
    within = Link.of(recipe, rates, sizes.tp, 1)
    found = {"tensor_parallel": _GATHERS * within.ring(sizes.tokens * row), "exchange": 0.0}
    if planned_of(layer).experts and sizes.serving.gathers_tokens:
        ranks = sizes.ep * sizes.etp
        arriving = sizes.tokens / sizes.cut * row * ranks * share_that_arrives(recipe, sizes)
        by_allgather = sizes.serving[moe_dispatch.NAME] == moe_dispatch.ALLGATHER
        link = Link.of(recipe, rates, ranks, 1, "nvlink_allgather" if by_allgather else "nvlink")
        found["exchange"] = _EXCHANGES * link.ring(arriving)
    elif planned_of(layer).experts:
        rows = sizes.tokens / sizes.cut * recipe.moe.moe_router_topk * row
        over = Link.of(recipe, rates, sizes.ep, sizes.etp)
        found["exchange"] = _EXCHANGES * over.exchange(rows)
        joined = Link.of(recipe, rates, sizes.etp, 1)
        found["tensor_parallel"] += _EXCHANGES * joined.ring(rows * sizes.etp)
    return found


def _data_parallel(
    recipe: Recipe, rates: Rates, sizes: Sizes, dense: float, experts: float, device: float
) -> float:
    """What the reduction of gradients and the gather of weights add to a step."""
    p = recipe.parallel
    summed = summed_bytes(recipe)
    reduced = gathered = 0.0
    groups = ((dense, sizes.dp, sizes.tp), (experts, sizes.expert_dp, sizes.ep * sizes.etp))
    for numbers, ranks, stride in groups:
        bucket = p.ddp_bucket_size or max(_BUCKET[0], _BUCKET[1] * ranks)
        link, messages = Link.of(recipe, rates, ranks, stride), -(-numbers // bucket)
        reduced += link.ring(summed * numbers, messages)
        gathered += link.ring(BF16 * numbers, messages)
    if not p.use_distributed_optimizer:  # an all-reduce: gradients are gathered, weights are not
        reduced, gathered = 2 * reduced, 0.0

    def exposed(seconds: float, overlapped: bool, window: float) -> float:
        if not overlapped:
            return seconds
        return max(rates["exposed"] * seconds, seconds - window)

    return exposed(reduced, p.overlap_grad_reduce, device * 2 / 3) + exposed(
        gathered, p.overlap_param_gather, device / 3
    )


def _optimizer(recipe: Recipe, rates: Rates, sizes: Sizes, dense: float, experts: float) -> float:
    own = optimized(recipe, sizes, dense, experts)
    zeroed = summed_bytes(recipe) * (dense + experts)
    return (rates["optimizer_bytes"] * own + zeroed) / rates["bytes"]
