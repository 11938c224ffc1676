"""Tables of whole runs, each figure from a committed receipt."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.pages.tables import (
    GIB,
    digits,
    interval,
    link,
    parts_of,
    table,
)
from megacpp_mcore.receipts.judge import judge_runs
from megacpp_mcore.receipts.reader import Receipt, read, warm, warm_median, warm_power
from megacpp_mcore.receipts.show import training_loss
from megacpp_mcore.training.cpu.progress import held_out_line, step_line

_LAST = 8  # steps at a run's end, of which the slowest is compared with their median
_SMOOTH = 20  # losses that a curve's end is the mean of, and that a step's is compared with
_EARLY = 50  # steps in which a loss falls too fast for a median of those before it


def runs(words: str, folder: Path) -> str:
    """A row a run. words: lines `RECEIPT | what it is`."""
    head = ["run", "layout", "steps", "tokens a step", "median step", "tokens/s per GPU",
            "TFLOP/s per GPU", "MFU", "power",
            "peak memory", "slowest of the last 8", "loss"]  # fmt: skip
    rows = []
    for name, label in parts_of(words, 2):
        rows.append(_run(name, label, read(folder / f"{name}.json")))
    return table(head, rows)


def _run(name: str, label: str, run: Receipt) -> list[str]:
    result, series, gpus = run["result"], run["series"], run["topology"]["world_size"]
    times = warm(run, "ms")
    last = times[-_LAST:]
    losses = [loss for loss in series["loss"] if loss is not None]
    ours = result.get("tflops_per_s_per_device")
    return [
        link(label, name), _layout(run), f"{result['steps']:,}",
        f"{series['tokens'][0]:,}", f"{warm_median(run, 'ms'):,.0f} ms",
        f"{result['tokens_per_s_median'] / gpus:,.0f}",
        "" if ours is None else f"{ours:.0f}",
        f"{100 * result['mfu']:.1f} %" if result.get("mfu") else "", _power(run),
        f"{result['peak_memory_bytes'] / GIB:.1f} GiB",
        f"{max(last) / statistics.median(last):.3f} x the median",
        f"{losses[0]:.2f} to {losses[-1]:.2f}",
    ]  # fmt: skip


def _power(run: Receipt) -> str:
    """ "690 of 700 W" of a median step; "" of a receipt that has not counted it."""
    watts, limit = warm_power(run, "power_w"), run["result"].get("power_limit_w")
    of = "" if limit is None else f" of {limit:.0f}"
    return "" if watts is None else f"{watts:.0f}{of} W"


def _layout(run: Receipt) -> str:
    """ "DP 2, graph": the degrees above 1, and whether a step is one CUDA graph."""
    topology, content = run["topology"], run["recipe"]["content"]
    found = [f"{way.upper()} {topology[way]}" for way in ("dp", "tp", "pp", "cp", "ep")
             if topology[way] > 1]  # fmt: skip
    graph = content["launch"]["cuda_graph_impl"] == "full_iteration"
    return ", ".join([*(found or ["one GPU"]), *(["graph"] if graph else [])])


def pair(words: str, folder: Path) -> str:
    """Runs B compared with A as by `report compare`. words: lines `A | B | what the pair is`."""
    head = ["B against A", "tokens/s, B / A", "time, B / A, 99 % interval", "loss", "verdict"]
    rows = []
    for a, b, label in parts_of(words, 3):
        first, second = read(folder / f"{a}.json"), read(folder / f"{b}.json")
        judged = judge_runs(first, second)
        rates = [run["result"]["tokens_per_s_median"] for run in (first, second)]
        links = f"{link('B', b)} against {link('A', a)}"
        rows.append([
            f"{label}: {links}", f"{rates[1] / rates[0]:.3f}",
            interval(judged.time, 2), judged.loss.judgement if judged.loss else "",
            judged.verdict,
        ])  # fmt: skip
    return table(head, rows)


def layouts(words: str, folder: Path) -> str:
    """The losses of runs compared with one run of the same data. words: lines `FOLDER/RECEIPT |
    FOLDER/RECEIPT it is compared with | what`."""
    head = ["run", "compared with", "steps in common", "largest difference of a step's loss"]
    rows = []
    for name, other, label in parts_of(words, 3):
        ours, theirs = read(folder / f"{name}.json"), read(folder / f"{other}.json")
        pairs = [*_common(ours, theirs)]
        worst = max(abs(a / b - 1) for a, b in pairs)
        rows.append([
            link(label, name),
            link(other.rpartition("/")[2], other), str(len(pairs)),
            f"{100 * worst:.2f} %" if worst else "none: equal to the bit",
        ])  # fmt: skip
    return table(head, rows)


def _common(a: Receipt, b: Receipt) -> Iterator[tuple[float, float]]:
    """Losses of steps that both runs have."""
    known = dict(zip(b["series"]["step"], b["series"]["loss"], strict=True))
    for step, loss in zip(a["series"]["step"], a["series"]["loss"], strict=True):
        if step in known:
            yield loss, known[step]


def curves(words: str, folder: Path) -> str:
    """The losses of runs. words: lines `RECEIPT | what it is`. A rise of the first 50 steps is a
    step's loss above the lowest before it, and later above the median of the 20 before it."""
    head = ["run", "steps", "tokens a step", "highest learning rate", "warm-up",
            f"mean loss of the last {_SMOOTH}", f"greatest rise in the first {_EARLY} steps",
            "after them", "greatest gradient norm after them"]  # fmt: skip
    rows = []
    for name, label in parts_of(words, 2):
        run = read(folder / f"{name}.json")
        series = run["series"]
        rows.append([
            link(label, name), f"{len(series['step']):,}",
            f"{series['tokens'][0]:,}", f"{max(series['lr']):.2g}",
            f"{run['recipe']['content']['schedule']['lr_warmup_iters']:,} steps",
            *_losses(series),
        ])  # fmt: skip
    return table(head, rows)


def _losses(series: Any) -> tuple[str, str, str, str]:
    """The mean of the last, the greatest rises with their steps, and the greatest gradient norm; or
    the first loss that is no number."""
    steps, losses = series["step"], series["loss"]
    if None in losses:
        return f"not finite at step {steps[losses.index(None)]:,}", "", "", ""
    at = range(1, len(losses))
    early = [(losses[n] - min(losses[:n]), steps[n]) for n in at[: _EARLY - 1]]
    later = [(losses[n] - statistics.median(losses[n - _SMOOTH : n]), steps[n])
             for n in at[_EARLY - 1 :]]  # fmt: skip
    norms = list(zip(series["grad_norm"], steps, strict=True))[_EARLY:]
    norm, step = max(norms, default=(0.0, 0))
    return (
        f"{statistics.fmean(losses[-_SMOOTH:]):.4f}", _greatest(early), _greatest(later),
        f"{digits(norm)} at step {step:,}" if norms else "",
    )  # fmt: skip


def _greatest(rises: Sequence[tuple[float, int]]) -> str:
    rise, step = max(rises, default=(0.0, 0))
    return f"{rise:.3f} at step {step:,}" if rise > 0 else "none"


def starts(words: str, folder: Path) -> str:
    """How runs started. words: lines `RECEIPT | what it is`."""
    head = ["run", "from the command to the end of the first step", "before the ranks start",
            "the first step", "Triton kernels compiled in it"]  # fmt: skip
    rows = []
    for name, label in parts_of(words, 2):
        run = read(folder / f"{name}.json")
        result = run["result"]
        rows.append([
            link(label, name),
            f"{result['launch_s'] + result['cold_start_s']:.1f} s", f"{result['launch_s']:.1f} s",
            f"{result['first_step_ms']:,.0f} ms",
            f"{result['triton_kernels_compiled']:,}",
        ])  # fmt: skip
    return table(head, rows)


def training(words: str, folder: Path) -> str:
    """The last lines that a run on the CPU has printed, but for the time left. words: its receipt
    next to `folder`, without `.json`."""
    run = read(folder.parent / f"{words.strip()}.json")
    series, schedule = run["series"], run["recipe"]["content"]["schedule"]
    last, since = len(series["step"]) - 1, schedule["log_interval"]
    counted = series["tokens"]  # from the first step on
    seconds, tokens = sum(series["ms"][-since:]) / 1000, counted[-1] - counted[-since - 1]
    lines = [
        step_line(
            series["step"][last], schedule["train_iters"], series["loss"][last],
            f"{tokens / seconds:,.0f} tokens/s", series["lr"][last], series["grad_norm"][last],
        ),
        held_out_line(run["evaluations"]["step"][-1], run["evaluations"]["loss"][-1]),
        training_loss(run),
    ]  # fmt: skip
    return "\n".join(["```", *lines, "```"])
