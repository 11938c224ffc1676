"""One layer as it stands in the model: norm, mixer or experts, residual; backends side by side.

`bench_layer` builds a recipe's model of that one layer once for every contender, with the same
weights, and times its decoder without the final norm.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore import bench, dispatch, receipts
from megacpp_mcore.bench.clock import Clock, clock_for, interleave
from megacpp_mcore.bench.contenders import Contender, build, contenders, take_weights
from megacpp_mcore.bench.subject import in_half_precision, weight_flops
from megacpp_mcore.bench.surface import environment
from megacpp_mcore.kernels.core_attention.case import CoreAttentionCase
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces import problems

# What is asked for -> letter of the source pattern, and the kind of attention where it says so.
_LAYERS = {"A": ("A", None), "+": ("A", "mla"), "*": ("A", "gqa"), "E": ("E", None),
           "M": ("M", None), "R": ("R", None)}  # fmt: skip
AS_IT_IS = "recipe"
_SECONDS_A_PHASE = 8.0
_PHASES = ("forward", "forward_backward")
_SETS = 2
_ROUNDINGS = 64  # from a weight or input to the output, and from there to a gradient
_ERROR_NOTE = (
    "error: norm of the difference from the baseline, of the norm, worst of output and gradients, "
    "with the baseline's weights; none where the parameters are others"
)


def layer_overrides(name: str) -> list[str]:
    """What makes a recipe's model one layer: A, E, M, R, or by its symbol + (MLA) or * (GQA).

    Raises BenchError for another name.
    """
    if name not in _LAYERS:
        raise bench.BenchError(f"layer {name!r} is unknown; choose {', '.join(_LAYERS)}")
    letter, kind = _LAYERS[name]
    overrides = [
        f"model.pattern={letter}", "model.depth=1", "mtp.mtp_num_layers=0", "mtp.pattern=",
        "parallel.expert_model_parallel_size=1",
    ]  # fmt: skip
    return overrides + ([f"attention.kind={kind}"] if kind else [])


def bench_layer(
    recipe: Recipe, against: Sequence[str] = (), say: Callable[[str], None] = bench.to_stderr
) -> tuple[dict[str, Any], list[str]]:
    """Time the only layer of `recipe`, forward and forward with backward.

    recipe: from `load_for_bench` with `layer_overrides`. against: what `contenders` takes, to be
    timed beside the layer as the recipe has it, in turns; the first is the baseline.

    Returns the bench receipt, and which contenders are further from the baseline than rounding
    explains. Raises DispatchError for a backend that is unknown or cannot serve, and what building
    and running the layer raises.
    """
    bench.check_receipts()
    asked = contenders(recipe, AS_IT_IS, against)
    bridges.before_megatron()
    from megacpp_mcore.training.cpu import megatron_setup as setup

    device = problems.current_device()
    clock = clock_for(device)
    with setup.single_process(recipe.schedule.seed, device), setup.quiet():
        layers, decisions = {}, []
        for name, contender in asked.items():
            say(f"{name}: building {recipe.plan.megatron_pattern} on {device}")
            dispatch.forget()
            layers[name] = _layer(contender, clock)
            decisions += [asdict(decision) for decision in dispatch.decisions()]
        baseline = next(iter(against), AS_IT_IS)
        say(f"all against {baseline}, with its weights")
        errors, wrong = _compare(layers, baseline)
        rows = _rows(recipe, layers, errors, clock, say)
        dtype = layers[baseline].sets[0].dtype
    receipt = receipts.bench_receipt(
        problem={"surface": "layer", "dtype": str(dtype).removeprefix("torch."),
                 "sizes": _sizes(recipe)},
        rows=rows,
        baseline=baseline,
        backends=[d for i, d in enumerate(decisions) if d not in decisions[:i]],
        lane=lane("cpu" if device == "cpu" else None),
        topology=bench.TOPOLOGY,
        environment=environment(recipe),
        recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
        notes=[bench.ONE_RANK_NOTE, _ERROR_NOTE],
    )  # fmt: skip
    return receipt, wrong


@dataclass(frozen=True)
class _Layer:
    """A layer with what it is called with. sets: inputs in turn. direction: the gradient sent
    back. kept: other arguments."""

    module: torch.nn.Module
    sets: list[Tensor]
    direction: Tensor
    kept: Mapping[str, Any]

    def forward(self, turn: int) -> Tensor:
        """As the first micro batch after an update of the weights."""
        self.module.set_is_first_microbatch()
        return self.module(self.sets[turn % len(self.sets)], attention_mask=None, **self.kept)

    def forward_backward(self, turn: int) -> None:
        self.forward(turn).backward(self.direction)
        self.forget()

    def forget(self) -> None:
        for tensor in (*self.sets, *self.module.parameters()):
            tensor.grad = None

    def values(self) -> dict[str, Tensor]:
        """Output and gradients of one call."""
        y = self.forward(0)
        y.backward(self.direction)
        values = {"y": y.detach(), "dx": self.sets[0].grad}
        values |= {f"d {n}": p.grad for n, p in self.module.named_parameters()}
        self.forget()
        return values


def _layer(contender: Contender, clock: Clock) -> _Layer:
    recipe, (model, args) = contender.recipe, build(contender)
    in_half_precision(model, args)
    stack = model.decoder
    stack.post_layer_norm = False
    stack.final_norm = None
    seq, batch = args.seq_length, args.micro_batch_size
    packed = recipe.data.dataloader_inter_document_masking
    shape = (seq * batch, 1) if packed else (seq, batch)
    generator = torch.Generator(clock.device).manual_seed(recipe.schedule.seed)
    *sets, direction = (
        torch.randn(*shape, args.hidden_size, generator=generator, device=clock.device).to(
            args.params_dtype
        )
        for _ in range(_SETS + 1)
    )
    kept = _packed(seq, batch, clock.device) if packed else {}
    if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
        kept["rotary_pos_emb"] = model.rotary_pos_emb(seq, packed_seq=packed)
    return _Layer(stack, [x.requires_grad_() for x in sets], direction, kept)


def _packed(seq: int, batch: int, device: str) -> dict[str, Any]:
    """Documents as Megatron's loop hands them on, those of all rows in one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = document_bounds(batch, seq, BENCHED_DOCUMENTS)
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    documents = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
        max_seqlen_q=longest, max_seqlen_kv=longest,
        total_tokens=seq * batch, tokens_per_sample=seq,
    )  # fmt: skip
    return {"packed_seq_params": documents}


def _compare(
    layers: Mapping[str, _Layer], baseline: str
) -> tuple[dict[str, float | None], list[str]]:
    """Error of each with the baseline's weights, None where it has other parameters than those,
    and what is wrong."""
    expected = layers[baseline].values()
    weights = dict(layers[baseline].module.named_parameters())
    errors: dict[str, float | None] = {baseline: None}
    wrong = []
    for name, layer in layers.items():
        if name == baseline or not take_weights(layer.module, weights):
            errors[name] = None
            continue
        found = layer.values()
        far = {key: _distance(found[key], x) for key, x in expected.items()}
        what = max(far, key=lambda key: math.inf if math.isnan(far[key]) else far[key])
        errors[name] = far[what] if math.isfinite(far[what]) else None
        if not far[what] <= (allowed := _tolerance(expected["y"])):
            wrong.append(
                f"{name}: {what} is {far[what]:.2e} from {baseline}, allowed {allowed:.2e}"
            )
    return errors, wrong


def _tolerance(y: Tensor) -> float:
    """Of the norm of a difference: independent roundings turn a vector by the root of their number
    times half an epsilon, in both layers; and sums over all tokens, in the accumulator's dtype."""
    accumulator = torch.finfo(torch.promote_types(y.dtype, torch.float32)).eps
    tokens = y.shape[0] * y.shape[1]
    return (2 * _ROUNDINGS) ** 0.5 * torch.finfo(y.dtype).eps / 2 + tokens**0.5 * accumulator


def _distance(found: Tensor, expected: Tensor) -> float:
    norm = expected.float().norm()
    return ((found.float() - expected.float()).norm() / norm).item() if norm else 0.0


def _rows(
    recipe: Recipe,
    layers: Mapping[str, _Layer],
    errors: Mapping[str, float | None],
    clock: Clock,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    rows = []
    first = next(iter(layers.values()))
    flops, tolerance = _flops(recipe, first.module), _tolerance(first.direction)
    for phase in _PHASES:
        say(f"{phase}: {', '.join(layers)}, in turns")
        calls = {name: getattr(layer, phase) for name, layer in layers.items()}
        peaks = {n: clock.peak_memory_bytes(lambda call=call: call(0)) for n, call in calls.items()}
        for name, taken in interleave(clock, calls, _SECONDS_A_PHASE).items():
            rows.append(
                receipts.bench_row(
                    name, phase, taken.ms, rounds=taken.rounds,
                    peak_memory_bytes=peaks[name], error=errors[name],
                    tolerance=None if errors[name] is None else tolerance,
                    flops=flops * (1 if phase == "forward" else 3),
                )
            )  # fmt: skip
    return rows


def _flops(recipe: Recipe, module: torch.nn.Module) -> int:
    """Of the products with the weights and of whole rows' causal attention."""
    tokens = recipe.schedule.micro_batch_size * recipe.model.seq_length
    attention = CoreAttentionCase.of(recipe)
    return int(weight_flops(module, recipe, tokens)) + (attention.flops() if attention else 0)


def _sizes(recipe: Recipe) -> dict[str, Any]:
    packed = recipe.data.dataloader_inter_document_masking
    return {
        "pattern": recipe.plan.megatron_pattern,
        "hidden_size": recipe.model.hidden_size,
        "micro_batch_size": recipe.schedule.micro_batch_size,
        "seq_length": recipe.model.seq_length,
        "documents_a_row": BENCHED_DOCUMENTS if packed else 0,
    }
