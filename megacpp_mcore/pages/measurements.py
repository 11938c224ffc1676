"""Tables of docs/performance.md and README.md, each figure from a committed receipt.

Receipts are named by their path below the folder of receipts, without `.json`; a row of a table
links to its receipt. A row whose receipt is from before receipts had the code's digest says
"history": what was measured then, with kernels that may since be others.
"""

import collections
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts.judge import MARGIN, judge_rows, judge_runs
from megacpp_mcore.receipts.kernel_families import family
from megacpp_mcore.receipts.reader import Receipt, read, rows_by_key, warm, warm_median, warm_power
from megacpp_mcore.receipts.show import training_loss
from megacpp_mcore.training.cpu.progress import held_out_line, step_line

_GIB = 2**30
_LAST = 8  # steps at a run's end, of which the slowest is compared with their median
_SMOOTH = 20  # losses that a curve's end is the mean of, and that a step's is compared with
_EARLY = 50  # steps in which a loss falls too fast for a median of those before it
_FOLDER = "examples/receipts/h200"


def runs(words: str, folder: Path) -> str:
    """A row a run. words: lines `RECEIPT | what it is`."""
    head = ["run", "layout", "steps", "tokens a step", "median step", "tokens/s per GPU",
            "TFLOP/s per GPU", "MFU", "power",
            "peak memory", "slowest of the last 8", "loss"]  # fmt: skip
    rows = []
    for line in _lines(words):
        name, label = _words(line, 2)
        rows.append(_run(name, label, read(folder / f"{name}.json")))
    return _table(head, rows)


def _run(name: str, label: str, run: Receipt) -> list[str]:
    result, series, gpus = run["result"], run["series"], run["topology"]["world_size"]
    times = warm(run, "ms")
    last = times[-_LAST:]
    losses = [loss for loss in series["loss"] if loss is not None]
    ours = result.get("tflops_per_s_per_device")
    return [
        f"[{label}]({_FOLDER}/{name}.json){_history(run)}", _layout(run), f"{result['steps']:,}",
        f"{series['tokens'][0]:,}", f"{warm_median(run, 'ms'):,.0f} ms",
        f"{result['tokens_per_s_median'] / gpus:,.0f}",
        "" if ours is None else f"{ours:.0f}",
        f"{100 * result['mfu']:.1f} %" if result.get("mfu") else "", _power(run),
        f"{result['peak_memory_bytes'] / _GIB:.1f} GiB",
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
    for line in _lines(words):
        a, b, label = _words(line, 3)
        first, second = read(folder / f"{a}.json"), read(folder / f"{b}.json")
        judged = judge_runs(first, second)
        rates = [run["result"]["tokens_per_s_median"] for run in (first, second)]
        links = f"[B]({_FOLDER}/{b}.json) against [A]({_FOLDER}/{a}.json)"
        history = _history(first) or _history(second)
        rows.append([
            f"{label}: {links}{history}", f"{rates[1] / rates[0]:.3f}",
            _interval(judged.time, 2), judged.loss.judgement if judged.loss else "",
            judged.verdict,
        ])  # fmt: skip
    return _table(head, rows)


def benches(words: str, folder: Path) -> str:
    """Rows of benches. words: lines `RECEIPT | what | BACKEND[@PHASE] | BACKEND: what, ...`, the
    backends compared with being in the same receipt; none after the last bar."""
    head = [
        "layer or operator",
        "ms",
        "sustained ms",
        "J",
        "GiB",
        "compared with",
        "time, 99 % interval",
    ]
    rows = []
    for line in _lines(words):
        name, label, ours, others = _words(line, 4)
        rows.append(_bench(folder, name, label, ours, others))
    return _table(head, rows)


def _bench(folder: Path, name: str, label: str, ours: str, others: str) -> list[str]:
    receipt = read(folder / f"{name}.json")
    backend, _, phase = ours.partition("@")
    phase = phase or "forward_backward"
    table = rows_by_key(receipt)
    row, compared, ratios = table[backend, phase], [], []
    for other in filter(None, (part.strip() for part in others.split(";"))):
        theirs, _, what = other.partition(": ")
        their_row = table[theirs, phase]
        ratio = judge_rows(their_row, row, MARGIN, in_turns=True).time
        without_pause, energy = _sustained(their_row)
        loaded = f" ({without_pause} sustained, {energy} J)" if without_pause else ""
        compared.append(f"{_ms(their_row)} ms{loaded}, {_memory(their_row)} GiB: {what}")
        ratios.append(_interval(ratio, 3))
    return [
        f"[{label}]({_FOLDER}/{name}.json){_history(receipt)}", _ms(row),
        *_sustained(row), _memory(row),
        "; ".join(compared) or "timed alone", "; ".join(ratios),
    ]  # fmt: skip


def layouts(words: str, folder: Path) -> str:
    """The losses of runs compared with one run of the same data. words: lines `FOLDER/RECEIPT |
    FOLDER/RECEIPT it is compared with | what`."""
    head = ["run", "compared with", "steps in common", "largest difference of a step's loss"]
    rows = []
    for line in _lines(words):
        name, other, label = _words(line, 3)
        ours, theirs = read(folder / f"{name}.json"), read(folder / f"{other}.json")
        pairs = [*_common(ours, theirs)]
        worst = max(abs(a / b - 1) for a, b in pairs)
        rows.append([
            f"[{label}]({_FOLDER}/{name}.json){_history(ours)}",
            f"[{other.rpartition('/')[2]}]({_FOLDER}/{other}.json)", str(len(pairs)),
            f"{100 * worst:.2f} %" if worst else "none: equal to the bit",
        ])  # fmt: skip
    return _table(head, rows)


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
    for line in _lines(words):
        name, label = _words(line, 2)
        run = read(folder / f"{name}.json")
        series = run["series"]
        rows.append([
            f"[{label}]({_FOLDER}/{name}.json){_history(run)}", f"{len(series['step']):,}",
            f"{series['tokens'][0]:,}", f"{max(series['lr']):.2g}",
            f"{run['recipe']['content']['schedule']['lr_warmup_iters']:,} steps",
            *_losses(series),
        ])  # fmt: skip
    return _table(head, rows)


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
        f"{_digits(norm)} at step {step:,}" if norms else "",
    )  # fmt: skip


def _greatest(rises: Sequence[tuple[float, int]]) -> str:
    rise, step = max(rises, default=(0.0, 0))
    return f"{rise:.3f} at step {step:,}" if rise > 0 else "none"


def starts(words: str, folder: Path) -> str:
    """How runs started. words: lines `RECEIPT | what it is`."""
    head = ["run", "launcher", "then to the end of the first step", "the first step",
            "Triton kernels compiled in it"]  # fmt: skip
    rows = []
    for line in _lines(words):
        name, label = _words(line, 2)
        run = read(folder / f"{name}.json")
        result = run["result"]
        rows.append([
            f"[{label}]({_FOLDER}/{name}.json){_history(run)}", f"{result['launch_s']:.1f} s",
            f"{result['cold_start_s']:.1f} s", f"{result['first_step_ms']:,.0f} ms",
            f"{result['triton_kernels_compiled']:,}",
        ])  # fmt: skip
    return _table(head, rows)


def profile(words: str, folder: Path) -> str:
    """What the kernels of a profiled step do, a row a kind of work. words: the run's receipt."""
    name = words.strip()
    run = read(folder / f"{name}.json")
    found, kinds = run["profile"], collections.defaultdict(lambda: [0.0, 0])
    for kernel in found["kernels"]:
        total = kinds[family(kernel["name"])]
        total[0] += kernel["ms"]
        total[1] += kernel["launches"]
    passes = _micro_batches(run)
    rows = [
        [kind, f"{ms / passes:.2f}", f"{launches / passes:,.1f}"]
        for kind, (ms, launches) in sorted(kinds.items(), key=lambda kind: -kind[1][0])
    ]
    idle = found["span_ms"] - found["busy_ms"]
    rows += [
        ["an exchange between GPUs and nothing else",
         f"{(found['busy_ms'] - found['compute_ms']) / passes:.2f}", ""],
        ["nothing", f"{idle / passes:.2f}", ""],
        ["from the first to the last", f"{found['span_ms'] / passes:.2f}", ""],
    ]  # fmt: skip
    head = ["kernels", "ms a micro batch", "launches a micro batch"]
    return f"[Its receipt]({_FOLDER}/{name}.json), step {found['step']}:\n\n{_table(head, rows)}"


def _micro_batches(run: Receipt) -> int:
    """Of one rank, in a step."""
    schedule, ranks = run["recipe"]["content"]["schedule"], run["topology"]["dp"]
    return schedule["global_batch_size"] // (schedule["micro_batch_size"] * ranks)


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


def dispatch(words: str, folder: Path) -> str:
    """A row a dispatcher, from the JSON of `tests/gpu/dispatch_over_ranks.py time`. words: the
    file, next to `folder`."""
    path = folder.parent / words.strip()
    times = json.loads(path.read_text())
    head = ["dispatcher, experts", "ms", "forward", "peak MiB beyond what it began with"]
    rows = []
    for name, milliseconds in sorted(times["forward_backward"].items(), key=lambda item: item[1]):
        way, _, experts = name.partition("+")
        forward, peak = times["forward"][name], times["peak MiB"][name]
        label = f"`{way}`, `{experts}`" if experts else f"`{way}`"
        rows.append([label, f"{milliseconds:.2f}", f"{forward:.2f}", f"{peak:,.0f}"])
    return f"[Its file](examples/receipts/{words.strip()}):\n\n{_table(head, rows)}"


def gpu_tests(words: str, folder: Path) -> str:
    """The code that the logs of `tests/gpu/run.sh` are of, and a row for each. words: the
    folder of them, next to `folder`."""
    rows, logs_of = [], collections.Counter()
    place = folder.parent / words.strip()
    for path in sorted(place.glob("*.log")):
        lines = path.read_text().splitlines()
        of = re.search(r"commit (\S{1,12})\S*( \+ changes)?, tree (\S{12})", lines[0])
        code = f"commit {of[1]}{of[2] or ''}, tree {of[3]}"
        logs_of[code] += 1
        rows.append([
            f"[{path.stem}](examples/receipts/{place.name}/{path.name})", lines[-1],
            code, lines[1].partition(",")[0],
        ])  # fmt: skip
    if not rows:
        return "No log is committed."
    return f"{_origin(logs_of)}\n\n{_table(['tests', 'outcome', 'code', 'machine'], rows)}"


def _origin(logs_of: collections.Counter[str]) -> str:
    """logs_of: the code -> the number of its logs."""
    if len(logs_of) == 1:
        return f"All are of one commit and tree: {next(iter(logs_of))}."
    each = "; ".join(f"{number} of {code}" for code, number in logs_of.most_common())
    states = f"The logs are of {len(logs_of)} states of the code, {each}"
    return f"{states}: what passed on one may fail on another."


def _lines(words: str) -> list[str]:
    return [line.strip() for line in words.splitlines() if line.strip()]


def _words(line: str, count: int) -> list[str]:
    words = [word.strip() for word in line.split("|")]
    if len(words) != count:
        raise ValueError(f"{line!r} has {len(words)} parts between bars, {count} are needed")
    return words


def _history(receipt: Receipt) -> str:
    return " (history)" if "history" in receipt["code"] else ""


def _interval(effect: Any, digits: int) -> str:
    if effect.low is None:
        return "too few samples"
    return f"{effect.low:.{digits}f} to {effect.high:.{digits}f}"


def _ms(row: Any) -> str:
    return _digits(row["median_ms"])


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _sustained(row: Any) -> tuple[str, str]:
    """Milliseconds and joules of calls without a pause; "" where they were not measured."""
    ms, joules = row.get("sustained_ms"), row.get("joules")
    return tuple("" if value is None else _digits(value) for value in (ms, joules))


def _memory(row: Any) -> str:
    return f"{row['peak_memory_bytes'] / _GIB:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        raise ValueError("no row")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
