"""`megacpp recipe plan`: the layouts of a recipe on a number of GPUs, as text or JSON."""

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megacpp_mcore.hybrid.flops import PEAKS, training_flops
from megacpp_mcore.planner.rates import Rates, h200
from megacpp_mcore.planner.search import Layout, Plan, checked, plan
from megacpp_mcore.recipe.source import split_override

_WIDTH = 100
_GIB = 2**30
EPILOG = """\
Memory and step are predictions, from shapes and from rates measured on H200s (docs/layouts.md has
the formulas and what they are held to). Layouts are ranked by the predicted step; which are legal
the recipe's own rules say. --gpus is the number on all hosts together; a host has 8 unless --nodes
says otherwise.

examples:
  megacpp recipe plan nam56r --gpus 4
  megacpp recipe plan nam56r --gpus 512 --set schedule.global_batch_size=2048
  megacpp recipe plan nam56r --gpus 8 --memory 75 --json
"""
# part of a step -> the beginning of a sentence that ends with its time
_TOLD = {
    "products": "matrix products take",
    "attention": "attention takes",
    "recurrences": "the recurrences take",
    "moved": "memory traffic outside products and attention takes",
    "recomputed": "recomputation takes",
    "exchange": "the exchange of tokens between expert-parallel ranks takes",
    "tensor_parallel": "collectives between tensor-parallel ranks take",
    "pipeline": "the pipeline's bubble and sends take",
    "host": "waiting for the host's launches takes",
    "gaps": "waiting between the kernels of the captured step takes",
    "data_parallel": "the reduction of gradients and the gather of weights delay the step by",
    "optimizer": "the optimizer takes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, required=True, help="on all hosts together")
    parser.add_argument("--nodes", type=int, help="hosts; by default 8 GPUs are one")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="a GPU's; by default an H200's, less a reserve"
    )
    parser.add_argument("--top", type=int, default=8, help="how many layouts to print; 0: all")
    parser.add_argument("--json", action="store_true", help="as JSON, with every part")


def run(args: argparse.Namespace) -> int:
    rates = h200()
    budget = rates.usable_memory if args.memory is None else args.memory * _GIB
    found = plan(args.recipe, args.overrides, args.gpus, args.nodes, budget, rates)
    shown = found.layouts[: args.top] if args.top > 0 else found.layouts
    shown = checked(args.recipe, args.overrides, shown)
    request = [word for override in args.overrides for word in ("--set", override)]
    if args.json:
        print(json.dumps(_document(args.recipe, request, found, shown, rates), indent=2))
    else:
        print("\n".join(_text(args.recipe, request, found, shown, rates)))
    return 0


# --- for JSON and text ---


def _degrees(layout: Layout) -> dict[str, Any]:
    p, recipe = layout.recipe.parallel, layout.recipe
    return {
        "dp": recipe.data_parallel_size,
        "ep": p.expert_model_parallel_size,
        "tp": p.tensor_model_parallel_size,
        "etp": p.expert_tensor_parallel_size or p.tensor_model_parallel_size,
        "pp": p.pipeline_model_parallel_size,
        "vpp": recipe.plan.vpp,
        "micro_batch_size": recipe.schedule.micro_batch_size,
        "recompute": layout.recompute,
        "gradients": "bf16" if recipe.precision.grad_reduce_in_bf16 else "fp32",
        "sharded_optimizer": p.use_distributed_optimizer,
    }


def slower_because(layout: Layout, best: Layout) -> str:
    """One sentence: the part of the step with the largest difference."""
    ours, theirs = layout.step.parts, best.step.parts
    part = max(ours, key=lambda name: ours[name] - theirs[name])
    more = 1e3 * (ours[part] - theirs[part])
    slower = 1e3 * (layout.step.total - best.step.total)
    return f"{slower:,.0f} ms slower: {_TOLD[part]} {more:,.0f} ms more"


def expert_parallelism(found: Plan) -> str:
    """Whether experts have to be spread over ranks."""
    best, unsplit = found.layouts[0], found.unsplit
    if not best.recipe.moe.num_experts:
        return "the recipe has no experts"
    if unsplit is None:
        return "expert parallelism is needed: no layout without it is legal"
    if unsplit.memory.total > found.budget:
        return (
            "expert parallelism is needed: without it the smallest layout takes "
            f"{unsplit.memory.total / _GIB:.1f} GiB a GPU of {found.budget / _GIB:.1f}"
        )
    if best.recipe.parallel.expert_model_parallel_size == 1:
        return "expert parallelism is not needed"
    for layout in found.layouts:
        if layout.recipe.parallel.expert_model_parallel_size == 1:
            more = 1e3 * (layout.step.total - best.step.total)
            return (
                "expert parallelism is not needed for memory, but the fastest layout without it "
                f"takes {more:,.0f} ms a step more"
            )
    raise AssertionError("a layout without expert parallelism fits and is not among those that do")


def _not_kept(request: list[str], found: Plan) -> list[str]:
    """Keys of the request's `--set` that the search has set itself."""
    asked = (split_override(word)[0] for word in request[1::2])
    searched = {split_override(word)[0] for layout in found.layouts for word in layout.words}
    return [key for key in dict.fromkeys(asked) if key in searched]


def _memory(layout: Layout) -> dict[str, float]:
    memory = layout.memory
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        **{f"activations {name}": size for name, size in memory.activations.items()},
        "workspace": memory.workspace,
    }


# --- JSON ---


def _document(
    recipe: str, request: list[str], found: Plan, shown: Sequence[Layout], rates: Rates
) -> dict[str, Any]:
    best = found.layouts[0]
    return {
        "recipe": recipe,
        "overrides": request[1::2],
        "not_kept": _not_kept(request, found),
        "gpus": found.gpus,
        "nodes": found.nodes,
        "memory_bytes": found.budget,
        "legal": found.legal,
        "fit": len(found.layouts),
        "expert_parallelism": expert_parallelism(found),
        "layouts": [
            {
                "set": list(layout.words),
                **_degrees(layout),
                "memory_bytes": {name: round(size) for name, size in _memory(layout).items()},
                "total_bytes": round(layout.memory.total),
                "step_ms": {name: 1e3 * s for name, s in layout.step.parts.items()},
                "total_ms": 1e3 * layout.step.total,
                "tokens_per_s_per_gpu": layout.tokens_per_s,
                "slower_because": None if layout is best else slower_because(layout, best),
            }
            for layout in shown
        ],
        "rates": rates.measured,
        "assumptions": rates.assumed,
    }


# --- text ---


def _text(
    name: str, request: list[str], found: Plan, shown: Sequence[Layout], rates: Rates
) -> Iterator[str]:
    recipe = found.layouts[0].recipe
    tokens = recipe.schedule.global_batch_size * recipe.model.seq_length
    hosts = "1 host" if found.nodes == 1 else f"{found.nodes} hosts"
    gpus = "1 GPU" if found.gpus == 1 else f"{found.gpus} GPUs"
    asked = shlex.join([name, *request])
    yield from _wrapped("", f"{asked} on {gpus} of {hosts}, {tokens:,} tokens a step")
    yield from _wrapped(
        "",
        f"{found.legal} layouts are legal, {len(found.layouts)} fit into {found.budget / _GIB:.1f} "
        f"GiB a GPU; {expert_parallelism(found)}.",
    )
    for key in _not_kept(request, found):
        yield from _wrapped("note: ", f"--set {key} is not kept: layouts differ in this key")
    yield ""
    yield (
        f"{'':>3} {'DP':>4} {'EP':>3} {'TP':>3} {'ETP':>3} {'PP':>3} {'VPP':>3} {'rows':>4}  "
        f"{'recompute':9} {'optimizer':9} {'GiB':>6} {'step ms':>8} "
        f"{'tokens/s':>8} {'MFU':>6}"
    )
    flops = training_flops(recipe)
    for rank, layout in enumerate(shown, 1):
        yield _row(rank, layout, flops)
    if shown:
        yield from _best(name, request, shown)
    yield from _assumptions(found, rates)


def _row(rank: int, layout: Layout, flops: float) -> str:
    d, speed = _degrees(layout), layout.tokens_per_s
    optimizer = "sharded" if d["sharded_optimizer"] and d["dp"] > 1 else "whole"
    return (
        f"{rank:>3} {d['dp']:>4} {d['ep']:>3} {d['tp']:>3} {d['etp']:>3} {d['pp']:>3} "
        f"{d['vpp']:>3} {d['micro_batch_size']:>4}  {d['recompute']:9} "
        f"{optimizer:9} {layout.memory.total / _GIB:6.1f} {1e3 * layout.step.total:8,.0f} "
        f"{speed:8,.0f} {100 * flops * speed / PEAKS['NVIDIA H200']:4.1f} %"
    )


def _best(name: str, request: list[str], shown: Sequence[Layout]) -> Iterator[str]:
    best = shown[0]
    sizes = (f"{part} {size / _GIB:.1f}" for part, size in _memory(best).items())
    times = (f"{_said(part)} {1e3 * s:,.0f}" for part, s in best.step.parts.items() if s >= 5e-4)
    yield ""
    yield from _wrapped("1, GiB: ", ", ".join(sizes))
    yield from _wrapped("1, ms:  ", ", ".join(times))
    words = [word for override in best.words for word in ("--set", override)]
    yield from _wrapped("1:      ", " ".join(shlex.quote(word) for word in words) or "as it is")
    if len(shown) > 1:
        yield from _wrapped("2:      ", slower_because(shown[1], best) + ".")


def _said(part: str) -> str:
    return part.replace("_", " ")


def _assumptions(found: Plan, rates: Rates) -> Iterator[str]:
    yield ""
    if found.nodes == 1:
        yield "Predicted, not measured; docs/layouts.md has the formulas and the assumptions."
        return
    yield "On paper: no receipt spans hosts. Assumed, besides the rates of docs/layouts.md:"
    for name, entry in rates.assumed.items():
        if not name.startswith("again_"):
            yield from _wrapped(
                "  ", f"{_said(name)} {entry['value']:g} {entry['unit']}: {entry['why']}"
            )
    yield from _wrapped(
        "  ", "products of all sizes run at one rate; a layer's launches take the host the "
        "same time under every layout"
    )  # fmt: skip


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
