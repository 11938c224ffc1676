"""A receipt as one page of text."""

import statistics
import textwrap
from collections.abc import Mapping
from typing import Any

from megacpp_mcore.receipts.goodput import parse_utc
from megacpp_mcore.receipts.judge import MARGIN, ROW_RULE, judge_rows
from megacpp_mcore.receipts.reader import (
    Receipt,
    observed,
    problem_text,
    warm,
    warm_power,
    warm_rows,
)
from megacpp_mcore.receipts.run import FINAL_WINDOW, SLOW
from megacpp_mcore.receipts.text import (
    WIDTH,
    duration,
    gib,
    interval,
    number,
    percent,
    rate,
    rule,
    table,
)

_BAR = 30
# Of a result: shown in the lines before it.
_HEADLINE = ("status", "reason", "steps", "tokens", "power_limit_w")
_LABELS = {  # a result's name -> what it is, where the name alone does not say it
    "final_loss": "training loss, mean of the last {window} steps",
    "final_eval_loss": "held-out loss, last evaluation",
    "test_loss": "test loss",
    "tokens_per_s_median": "tokens/s, median warm step",
    "tokens_per_s_mean": "tokens/s, mean of warm steps",
    "tokens_per_s_wall": "tokens/s, of all time",
    "slow_steps": f"steps slower than {SLOW} medians",
    "peak_memory_bytes": "peak memory",
    "flops_per_token": "operations a token",
    "flops_formula": "counted as",
    "tflops_per_s_per_device": "TFLOP/s a device",
    "mfu": "MFU",
    "mfu_peak_tflops": "peak of the MFU, TFLOP/s",
    "mfu_peak": "which peak",
    "unigram_entropy": "unigram entropy of the corpus",
    "bigram_entropy": "bigram entropy of the corpus",
    "cold_start_s": "process start to end of step 1, s",
    "launch_s": "launcher before that, s",
    "first_step_ms": "first step, ms",
    "triton_cache_entries_at_start": "Triton's kernels in the cache before",
    "triton_kernels_compiled": "Triton's kernels compiled by the end of step 1",
    "triton_compile_s": "time to compile them, s",
    "slowest_kernels_compiled": "the slowest to compile",
    "torch_compile_s": "time of torch.compile by then, s",
    "rank_parameters": "parameters of rank 0",
}
_DETAILS = ("flops_formula", "mfu_peak", "flops_per_token", "mfu_peak_tflops")  # with verbose only
_MOST_SLOW, _MOST_KERNELS = 5, 20


def show(receipt: Receipt, path: str, *, verbose: bool = False) -> str:
    """A valid receipt as one page. verbose: with the reason of every backend, all slow steps and
    profiled kernels, and the formulas."""
    lines = [f"receipt   {path}: a {receipt['kind']}, {receipt['created']}"]
    if receipt["kind"] == "run":
        lines += [_status(receipt["result"]), *_provenance(receipt, verbose)]
        lines += ["", *_goodput(receipt["goodput"]), "", *_series(receipt), ""]
        lines += _result(receipt, verbose)
        if profile := receipt.get("profile"):
            lines += ["", *_profile(profile, verbose)]
    else:
        lines += [*_provenance(receipt, verbose=True), "", *_bench(receipt)]
    for name, values in receipt["environment"].items():
        lines += [f"{name:<9} {key}={value}" for key, value in values.items()]
    lines += [f"note      {note}" for note in receipt["notes"]]
    return "\n".join(lines)


def _status(result: Mapping[str, Any]) -> str:
    reason = f" ({result['reason']})" if result["reason"] else ""
    counts = f"{result['steps']:,} steps, {result['tokens']:,} tokens"
    return f"status    {result['status']}{reason}, {counts}"


def _provenance(receipt: Receipt, verbose: bool) -> list[str]:
    lane, code, recipe = receipt["lane"], receipt["code"], receipt["recipe"]
    topology, device, cpu = receipt["topology"], lane["device"], lane["cpu"]
    commit = f", commit {code['commit'][:12]}" if code["commit"] else ", no checkout"
    commit += " + changes" * bool(code["dirty"])
    digest = f", sha256 {code['sha256'][:16]}" if "sha256" in code else ""  # older receipts: none
    gpu = f", driver {lane['driver']}, CUDA {lane['cuda']}, cuDNN {lane['cudnn']}"
    gpu = gpu if device["type"] == "cuda" else ""
    packages = [f"{name} {version}" for name, version in lane["packages"].items() if version]
    lines = [
        f"code      megacpp-mcore {code['version']}{commit}{digest}",
        f"lane      {device['count']} x {device['name']} ({device['type']}{gpu})",
        f"          Python {lane['python']}, {', '.join(packages)}",
        f"          {lane['os']}, {cpu['count']} CPUs, torch threads {cpu['threads']}",
    ]
    for package, found in receipt.get("patches", {}).items():  # older receipts: not recorded
        applied = found["applied"]
        lines.append(f"patches   {package} {found['version']}: {len(applied) or 'none'} applied")
        lines += [f"          {name} (sha256 {digest[:16]})" for name, digest in applied.items()]
    if recipe:
        lines.append(f"recipe    {recipe['name']}, sha256 {recipe['sha256'][:16]}")
    ways = ", ".join(f"{name} {topology[name]}" for name in ("dp", "tp", "pp", "cp", "ep"))
    lines.append(f"topology  world size {topology['world_size']}: {ways}")
    if plan := receipt.get("plan"):
        counts = ", ".join(f"{count} {letter}" for letter, count in plan["counts"].items())
        lines.append(f"plan      {plan['source_pattern']} -> {plan['megatron_pattern']} ({counts})")
    if receipt["backends"] and not verbose:
        served: dict[str, list[str]] = {}
        for surface, names in observed(receipt).items():
            served.setdefault(names, []).append(surface)
        listed = "; ".join(f"{names}: {', '.join(served[names])}" for names in served)
        lines += textwrap.wrap(
            f"backends  {listed} (why: -v)", WIDTH, subsequent_indent=" " * 10,
            break_on_hyphens=False,
        )  # fmt: skip
    elif receipt["backends"]:
        rows = [["backends", "surface", "requested", "observed", "reason"]]
        for b in receipt["backends"]:
            reason = b["reason"] + (f" [ranks {b['ranks']}]" if "ranks" in b else "")
            rows.append(["", b["surface"], b["requested"], b["observed"] or "none", reason])
        lines += ["", *table(rows, align="lllll")]
    return lines


def _goodput(goodput: Mapping[str, Any]) -> list[str]:
    wall = goodput["wall_s"]
    lines = [f"goodput   {percent(goodput['useful'])} of {duration(wall)} in useful steps"]
    for name, seconds in goodput["seconds"].items():
        share = seconds / wall if wall else 0.0
        figures = f"{name:<11}{duration(seconds):>10}{percent(share):>9}"
        lines.append(f"          {figures}  {'#' * round(_BAR * share)}".rstrip())
    if (count := len(goodput["segments"])) > 1:
        lines.append(f"          {count} processes; {duration(_between(goodput))} between them")
    return lines


def _between(goodput: Mapping[str, Any]) -> float:
    """Seconds between the segments, by the wall clock: no process was there to measure them."""
    starts = [parse_utc(segment["started"]) for segment in goodput["segments"]]
    span = (starts[-1] - starts[0]).total_seconds()
    measured = sum(segment["wall_s"] for segment in goodput["segments"][:-1])
    return max(0.0, span - measured)


def _series(run: Receipt) -> list[str]:
    series, info, count = run["series"], run["series_info"], len(warm_rows(run))
    kept = f", every {info['stride']}th kept" if info["stride"] > 1 else ""
    lines = [f"series    {len(series['step']):,} rows{kept}, {count:,} of them warm"]
    if count > 1:
        for name, label in (("ms", "ms a step"), ("tokens_per_s", "tokens/s")):
            low, median, high = statistics.quantiles(warm(run, name), n=4, method="inclusive")
            quartiles = f"quartiles {low:,.1f} to {high:,.1f}"
            lines.append(f"          {label:<10}{median:>14,.1f}  {quartiles}")
    if (watts := warm_power(run, "power_w")) is not None:
        limit, limited = run["result"].get("power_limit_w"), warm_power(run, "power_limited")
        of = "" if limit is None else f"  of {limit:.0f}"
        share = "" if limited is None else f"; {percent(limited)} of the time at the limit"
        lines.append(f"          {'W a GPU':<10}{watts:>14,.1f}{of}{share}")
    for gap in info["gaps"][:5]:
        lines.append(f"          {gap['column']} of step {gap['step']} is {gap['value']}")
    return lines


def _result(run: Receipt, verbose: bool) -> list[str]:
    result, lines = run["result"], []
    shown = [name for name in result if name not in _HEADLINE and result[name] is not None]
    shown = [name for name in shown if verbose or name not in _DETAILS]
    window = min(FINAL_WINDOW, len(run["series"]["step"]))
    labels = {name: _LABELS.get(name, name).format(window=window) for name in shown}
    width = max(map(len, labels.values()), default=0) + 2
    for name, label in labels.items():
        value = result[name]
        text = _value(name, value, verbose)
        if name in ("unigram_entropy", "bigram_entropy") and result["final_loss"] is not None:
            text += f"  the training loss is {beside(result['final_loss'], value, 3)} it"
        lines.append(f"{'result' if not lines else '':<9} {label:<{width}}{text}")
    return lines


def _profile(profile: Mapping[str, Any], verbose: bool) -> list[str]:
    """The kernels of one step, those that take longest first."""
    kernels, busy = profile["kernels"], profile["busy_ms"]
    launches = sum(kernel["launches"] for kernel in kernels)
    most = len(kernels) if verbose else _MOST_KERNELS
    lines = [
        f"profile   step {profile['step']}: {launches:,} kernels in {profile['span_ms']:,.1f} ms, "
        f"{busy:,.1f} with one running, {busy - profile['compute_ms']:,.1f} with collectives alone"
    ]
    rows = [["", "ms", "launches", "kernel"]]
    rows += [["", f"{kernel['ms']:,.2f}", f"{kernel['launches']:,}", kernel["name"]]
             for kernel in kernels[:most]]  # fmt: skip
    lines += [f"         {line}" for line in table(rows, align="lrrl")]
    if len(kernels) > most:
        lines.append(f"          and {len(kernels) - most} more (-v)")
    return lines


def training_loss(run: Receipt) -> str:
    """The end of a CPU run: the loss of its last steps compared with the corpus's entropies; "" for
    a run without them."""
    result, steps = run["result"], len(run["series"]["step"])
    if "unigram_entropy" not in result or result["final_loss"] is None:
        return ""
    loss, entropy = result["final_loss"], result["unigram_entropy"]
    return (
        f"training loss {loss:.4f} nats per token, the mean of the last "
        f"{min(FINAL_WINDOW, steps)} steps: {beside(loss, entropy, 4)} the corpus's unigram "
        f"entropy {entropy:.4f} (bigram {result['bigram_entropy']:.4f})"
    )


def beside(loss: float, entropy: float, digits: int) -> str:
    """ "0.123 below" or "0.123 above": where a loss is of an entropy."""
    return f"{abs(entropy - loss):.{digits}f} {'below' if loss <= entropy else 'above'}"


def _value(name: str, value: Any, verbose: bool) -> str:
    if name == "slow_steps":
        most = len(value) if verbose else _MOST_SLOW
        told = [f"step {step:.0f} {duration(ms / 1000)}" for step, ms in value[:most]]
        more = [f"{len(value) - most} more"] if len(value) > most else []
        return ", ".join([*told, *more]) or "none"
    return f"{gib(value)} GiB" if name.endswith("_bytes") else number(value)


def _bench(bench: Receipt) -> list[str]:
    lines = [f"problem   {problem_text(bench)}", ""]
    for phase in dict.fromkeys(row["phase"] for row in bench["rows"]):
        lines += [*_bench_table(bench, phase), ""]
    return [*lines, *rule(ROW_RULE, MARGIN)]


def _bench_table(bench: Receipt, phase: str) -> list[str]:
    baseline = bench["baseline"]
    rows = [row for row in bench["rows"] if row["phase"] == phase]
    base = next((row for row in rows if row["backend"] == baseline), None)
    cells = [[
        phase, "median ms", "q1 .. q3", "n", "sustained", "J", "cold ms", "peak GiB", "kept GiB",
        "TFLOP/s", "GB/s", "error", f"/ {baseline}", "99 % interval", "verdict",
    ]]  # fmt: skip
    for row in rows:
        judged = ["", "", ""]
        if base is not None and row is not base:
            judgement = judge_rows(base, row, MARGIN, in_turns=True)
            judged = [number(judgement.time.value), interval(judgement.time), judgement.verdict]
        cells.append([
            row["backend"], number(row["median_ms"]),
            f"{number(row['q1_ms'])} .. {number(row['q3_ms'])}", str(row["n"]),
            number(row.get("sustained_ms")), number(row.get("joules")), number(row["cold_ms"]),
            gib(row["peak_memory_bytes"]), gib(row.get("kept_memory_bytes")),
            rate(row["flops"], row["median_ms"], 1e12),
            rate(row["bytes_floor"], row["median_ms"], 1e9), number(row["error"]), *judged,
        ])  # fmt: skip
    return table(cells, align="l" + "r" * 13 + "l")
