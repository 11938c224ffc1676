"""A receipt, and two of them side by side, as text for people."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megacpp_mcore.receipts import ReceiptError
from megacpp_mcore.receipts.goodput import parse_utc
from megacpp_mcore.receipts.run import warm_rows
from megacpp_mcore.report.comparison import (
    MARGIN,
    ROW_RULE,
    RUN_RULE,
    differing,
    judge_rows,
    judge_runs,
    unlike,
)
from megacpp_mcore.report.intervals import Effect
from megacpp_mcore.report.text import duration, gib, number, percent, rate, table, wrapped

_BAR = 30
_HEADLINE = ("status", "reason", "steps", "tokens")  # of a result; shown in the first lines


def show(receipt: Mapping[str, Any], path: str) -> str:
    """A valid receipt as one page."""
    lines = [f"receipt   {path}: a {receipt['kind']}, {receipt['created']}"]
    if receipt["kind"] == "run":
        lines += _status(receipt["result"])
    lines += _provenance(receipt)
    if receipt["kind"] == "run":
        lines += ["", *_goodput(receipt["goodput"]), "", *_series(receipt), "", *_result(receipt)]
    else:
        lines += ["", *_bench(receipt)]
    for name, values in receipt["environment"].items():
        lines += [f"{name:<9} {key}={value}" for key, value in values.items()]
    lines += [f"note      {note}" for note in receipt["notes"]]
    return "\n".join(lines)


def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    margin: float = MARGIN,
    allow_unlike: bool = False,
) -> str:
    """What B changes against A, with intervals, and keep, drop or undecided.

    The rule is the comparison module's, and is printed. margin: the share by which a time must
    differ to count. Raises ReceiptError for receipts of unlike lanes, recipes, topologies or
    problems, naming each difference, unless `allow_unlike`; always for a run and a bench.
    """
    if not 0 <= margin < 1:
        raise ReceiptError(f"margin {margin}: it is a share, 0 or more and below 1")
    reasons = unlike(a, b)
    if reasons and not allow_unlike:
        listed = "\n  ".join(reasons)
        raise ReceiptError(
            f"A and B are not alike (A | B):\n  {listed}\n"
            "Compare receipts of one lane, recipe and topology, or say --allow-unlike"
        )
    lines = [f"UNLIKE   {reason}" for reason in reasons]
    lines += [f"differs  {difference}" for difference in differing(a, b)]
    for name, receipt in (("A", a), ("B", b)):
        lines += [f"note {name}   {note}" for note in receipt["notes"]]
    lines += [""] if lines else []
    if a["kind"] == "bench":
        return "\n".join(lines + _compare_benches(a, b, margin))
    return "\n".join(lines + _compare_runs(a, b, margin))


def _status(result: Mapping[str, Any]) -> list[str]:
    reason = f" ({result['reason']})" if result["reason"] else ""
    return [
        f"status    {result['status']}{reason}, {result['steps']:,} steps, "
        f"{result['tokens']:,} tokens"
    ]


def _provenance(receipt: Mapping[str, Any]) -> list[str]:
    lane, code, recipe = receipt["lane"], receipt["code"], receipt["recipe"]
    topology, device = receipt["topology"], lane["device"]
    commit = f", commit {code['commit'][:12]}" if code["commit"] else ", no checkout"
    commit += " + changes" * bool(code["dirty"])
    digest = f", sha256 {code['sha256'][:16]}" if "sha256" in code else ""  # older receipts: none
    lines = [f"code      megacpp-mcore {code['version']}{commit}{digest}"]
    gpu = f", driver {lane['driver']}, CUDA {lane['cuda']}, cuDNN {lane['cudnn']}"
    lines.append(
        f"lane      {device['count']} x {device['name']} ({device['type']}"
        f"{gpu if device['type'] == 'cuda' else ''})"
    )
    there = [f"{name} {version}" for name, version in lane["packages"].items() if version]
    lines.append(f"          Python {lane['python']}, {', '.join(there)}")
    cpu = lane["cpu"]
    lines.append(f"          {lane['os']}, {cpu['count']} CPUs, torch threads {cpu['threads']}")
    if recipe:
        lines.append(f"recipe    {recipe['name']}, sha256 {recipe['sha256'][:16]}")
    ways = ", ".join(f"{name} {topology[name]}" for name in ("dp", "tp", "pp", "cp", "ep"))
    lines.append(f"topology  world size {topology['world_size']}: {ways}")
    if plan := receipt.get("plan"):
        counts = ", ".join(f"{count} {letter}" for letter, count in plan["counts"].items())
        lines.append(f"plan      {plan['source_pattern']} -> {plan['megatron_pattern']} ({counts})")
    if receipt["backends"]:
        rows = [["backends", "surface", "requested", "observed", "reason"]]
        rows += [
            ["", b["surface"], b["requested"], b["observed"] or "none", b["reason"]]
            for b in receipt["backends"]
        ]
        lines += ["", *table(rows, align="lllll")]
    return lines


def _goodput(goodput: Mapping[str, Any]) -> list[str]:
    wall = goodput["wall_s"]
    lines = [f"goodput   {percent(goodput['useful'])} of {duration(wall)} in useful steps"]
    for name, seconds in goodput["seconds"].items():
        share = seconds / wall if wall else 0.0
        bar = "#" * round(_BAR * share)
        lines.append(
            f"          {name:<11}{duration(seconds):>10}{percent(share):>9}  {bar}".rstrip()
        )
    if (count := len(goodput["segments"])) > 1:
        lines.append(f"          {count} processes; {duration(_between(goodput))} between them")
    return lines


def _between(goodput: Mapping[str, Any]) -> float:
    """Seconds between the segments, by the wall clock: no process was there to measure them."""
    starts = [parse_utc(segment["started"]) for segment in goodput["segments"]]
    span = (starts[-1] - starts[0]).total_seconds()
    measured = sum(segment["wall_s"] for segment in goodput["segments"][:-1])
    return max(0.0, span - measured)


def _series(receipt: Mapping[str, Any]) -> list[str]:
    series, info = receipt["series"], receipt["series_info"]
    rows = warm_rows(receipt)
    kept = f", every {info['stride']}th kept" if info["stride"] > 1 else ""
    lines = [f"series    {len(series['step']):,} rows{kept}, {len(rows):,} of them warm"]
    if len(rows) > 1:
        for name, label in (("ms", "ms a step"), ("tokens_per_s", "tokens/s")):
            low, median, high = statistics.quantiles(
                [series[name][row] for row in rows], n=4, method="inclusive"
            )
            lines.append(
                f"          {label:<10}{median:>14,.1f}  quartiles {low:,.1f} to {high:,.1f}"
            )
    lines += [
        f"          {gap['column']} of step {gap['step']} is {gap['value']}"
        for gap in info["gaps"][:5]
    ]
    return lines


def _result(receipt: Mapping[str, Any]) -> list[str]:
    result = receipt["result"]
    lines = []
    for name, value in result.items():
        if name in _HEADLINE or value is None:
            continue
        text = f"{gib(value)} GiB" if name.endswith("_bytes") else number(value)
        if name in ("unigram_entropy", "bigram_entropy") and result["final_loss"] is not None:
            below = value - result["final_loss"]
            text += f"  final loss is {abs(below):.3f} {'below' if below >= 0 else 'above'}"
        lines.append(f"{'result' if not lines else '':<9} {name:<24}{text}")
    return lines


def _bench(receipt: Mapping[str, Any]) -> list[str]:
    problem = receipt["problem"]
    sizes = ", ".join(f"{name} {value}" for name, value in problem["sizes"].items())
    lines = [f"problem   {problem['surface']}, {problem['dtype']}, {sizes}", ""]
    for phase in dict.fromkeys(row["phase"] for row in receipt["rows"]):
        rows = [row for row in receipt["rows"] if row["phase"] == phase]
        lines += [*_bench_table(rows, phase, receipt["baseline"]), ""]
    return [*lines, *wrapped(f"rule: margin {percent(MARGIN)}. {ROW_RULE}.")]


def _bench_table(rows: Sequence[Mapping[str, Any]], phase: str, baseline: str) -> list[str]:
    base = next((row for row in rows if row["backend"] == baseline), None)
    head = [phase, "median ms", "q1 .. q3", "n", "cold ms", "peak GiB", "TFLOP/s", "GB/s"]
    cells = [[*head, "error", f"/ {baseline}", "99 % interval", "verdict"]]
    for row in rows:
        line = [row["backend"], number(row["median_ms"])]
        line += [f"{number(row['q1_ms'])} .. {number(row['q3_ms'])}", str(row["n"])]
        line += [number(row["cold_ms"]), gib(row["peak_memory_bytes"])]
        line += [rate(row["flops"], row["median_ms"], 1e12)]
        line += [rate(row["bytes_floor"], row["median_ms"], 1e9), number(row["error"])]
        if base is None or row is base:
            line += ["", "", ""]
        else:
            judgement = judge_rows(base, row, MARGIN, in_turns=True)
            line += [number(judgement.time.value), _interval(judgement.time), judgement.verdict]
        cells.append(line)
    return table(cells, align="l" + "r" * 10 + "l")


def _compare_benches(a: Mapping[str, Any], b: Mapping[str, Any], margin: float) -> list[str]:
    rows_a = {(row["backend"], row["phase"]): row for row in a["rows"]}
    rows_b = {(row["backend"], row["phase"]): row for row in b["rows"]}
    both = [key for key in rows_a if key in rows_b]
    if not both:
        raise ReceiptError(
            "A and B have no backend and phase in common: "
            f"{', '.join(map(' '.join, rows_a))} | {', '.join(map(' '.join, rows_b))}"
        )
    judged = {key: judge_rows(rows_a[key], rows_b[key], margin, in_turns=False) for key in both}
    rows = [["backend", "phase", "A ms", "B ms", "B / A", "99 % interval", "A GiB", "B GiB", ""]]
    for key, judgement in judged.items():
        first, second = rows_a[key], rows_b[key]
        rows.append(
            [
                *key,
                number(first["median_ms"]),
                number(second["median_ms"]),
                number(judgement.time.value),
                _interval(judgement.time),
                gib(first["peak_memory_bytes"]),
                gib(second["peak_memory_bytes"]),
                f"{judgement.verdict}: {judgement.reasons[0]}",
            ]
        )
    lines = table(rows, align="llrrrrrrl")
    lines += [f"only in A: {' '.join(key)}" for key in rows_a if key not in rows_b]
    lines += [f"only in B: {' '.join(key)}" for key in rows_b if key not in rows_a]
    return [*lines, "", *wrapped(f"rule: margin {percent(margin)}. {ROW_RULE}.")]


def _compare_runs(a: Mapping[str, Any], b: Mapping[str, Any], margin: float) -> list[str]:
    judgement = judge_runs(a, b, margin)
    ratio, loss = judgement.time, judgement.loss
    rows = [["", "A", "B", "B / A", "B - A", "99 % interval"]]
    rows.append(
        [
            "ms per 1,000 tokens, warm",
            *(number(1e6 / _warm_median(receipt, "tokens_per_s")) for receipt in (a, b)),
            number(ratio.value),
            "",
            _interval(ratio),
        ]
    )
    for label, of in _FIGURES:
        rows.append(_figure_row(label, of(a), of(b)))
    if loss:
        label = f"loss, {loss.pairs} paired steps from {loss.first_step:,}"
        rows.append(
            [label, "", "", "", f"{loss.effect.value:+.4f}", _interval(loss.effect, signed=True)]
        )
    lines = table(rows, align="lrrrrr")
    if pays := _payback(a, b):
        lines += ["", pays]
    lines += ["", f"verdict: {judgement.verdict}", *(f"  {why}" for why in judgement.reasons)]
    return [*lines, "", *wrapped(f"rule: margin {percent(margin)}. {RUN_RULE}.")]


_FIGURES = (
    ("tokens/s, warm median", lambda r: r["result"]["tokens_per_s_median"]),
    ("TFLOP/s a device", lambda r: r["result"].get("tflops_per_s_per_device")),
    ("MFU", lambda r: r["result"].get("mfu")),
    ("peak memory, GiB", lambda r: (r["result"]["peak_memory_bytes"] or 0) / 2**30 or None),
    ("final loss", lambda r: r["result"]["final_loss"]),
    ("final evaluation loss", lambda r: r["result"]["final_eval_loss"]),
    ("useful share", lambda r: r["goodput"]["useful"]),
    ("compile, s", lambda r: r["goodput"]["seconds"]["compile"]),
    ("wall, s", lambda r: r["goodput"]["wall_s"]),
)


def _figure_row(label: str, a: float | None, b: float | None) -> list[str]:
    if a is None or b is None:
        return [label, number(a), number(b), "", "", ""]
    return [label, number(a), number(b), number(b / a) if a else "", f"{b - a:+.4g}", ""]


def _warm_median(receipt: Mapping[str, Any], column: str) -> float:
    return statistics.median(receipt["series"][column][row] for row in warm_rows(receipt))


def _payback(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """After how many steps a longer compilation has paid for itself."""
    more_s = b["goodput"]["seconds"]["compile"] - a["goodput"]["seconds"]["compile"]
    ms_a, ms_b = _warm_median(a, "ms"), _warm_median(b, "ms")
    if more_s <= 0 or ms_b >= ms_a:
        return None
    steps = more_s * 1000 / (ms_a - ms_b)
    return (
        f"B compiles {more_s:.1f} s longer, which its faster steps win back in {steps:,.0f} steps"
    )


def _interval(effect: Effect, signed: bool = False) -> str:
    if effect.low is None or effect.high is None:
        return "too few"
    form = "+.4f" if signed else ".4f"
    return f"{effect.low:{form}} .. {effect.high:{form}}"
