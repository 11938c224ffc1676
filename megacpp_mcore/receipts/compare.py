"""Two receipts compared: like with like, what differs, and the verdicts of `judge`, as text."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megacpp_mcore.receipts.checks import ReceiptError
from megacpp_mcore.receipts.judge import MARGIN, ROW_RULE, RUN_RULE, judge_rows, judge_runs
from megacpp_mcore.receipts.reader import Receipt, observed, rows_by_key, warm_median
from megacpp_mcore.receipts.text import gib, interval, number, percent, rule, table


def compare(a: Receipt, b: Receipt, *, margin: float = MARGIN, allow_unlike: bool = False) -> str:
    """What B changes against A, with intervals, and keep, drop or undecided.

    margin: the share by which a time must differ to count. Raises ReceiptError for receipts of
    unlike lanes, recipes, topologies or problems, naming each difference, unless `allow_unlike`;
    always for a run and a bench.
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
    compared = _compare_benches if a["kind"] == "bench" else _compare_runs
    return "\n".join(lines + compared(a, b, margin))


def document(
    a: Receipt, b: Receipt, *, margin: float = MARGIN, allow_unlike: bool = False
) -> dict[str, Any]:
    """As `compare`, as plain data: the verdict of two runs, or one a backend and phase of two
    benches, with the ratio of times B / A. Raises ReceiptError as `compare`."""
    compare(a, b, margin=margin, allow_unlike=allow_unlike)  # refuses
    about = {"kind": a["kind"], "margin": margin, "unlike": unlike(a, b),
             "differs": differing(a, b)}  # fmt: skip
    if a["kind"] == "run":
        return about | asdict(judge_runs(a, b, margin))
    rows_a, rows_b = rows_by_key(a), rows_by_key(b)
    judged = [
        {"backend": key[0], "phase": key[1]}
        | asdict(judge_rows(rows_a[key], rows_b[key], margin, in_turns=False))
        for key in rows_a
        if key in rows_b
    ]
    return about | {"rows": judged}


def unlike(a: Receipt, b: Receipt) -> list[str]:
    """Every reason why two receipts are not alike: lane, recipe, topology, problem of a bench.

    A recipe's `[backends]` are what a comparison is about, and where a run keeps the index files
    that it derives from its data changes no figure: they may differ. Raises ReceiptError for a run
    and a bench, which have no figure in common.
    """
    if a["kind"] != b["kind"]:
        raise ReceiptError(f"A is a {a['kind']}, B a {b['kind']}: they have no figure in common")
    found = list(_differences("lane", a["lane"], b["lane"]))
    found += _differences("topology", a["topology"], b["topology"])
    found += _differences("recipe", _figures_of(a), _figures_of(b))
    if a["kind"] == "bench":
        found += _differences("problem", a["problem"], b["problem"])
    return found


def differing(a: Receipt, b: Receipt) -> list[str]:
    """What two receipts may differ in and still be alike: the thing that is compared."""
    found = list(_differences("code", a["code"], b["code"]))
    if "patches" in a and "patches" in b:
        found += _differences("patches", a["patches"], b["patches"])
    elif "patches" in a or "patches" in b:
        told = ("recorded" if "patches" in receipt else "not recorded" for receipt in (a, b))
        found.append(f"patches: {' | '.join(told)}")
    found += _differences("backends", observed(a), observed(b))
    return found + list(_differences("environment", a["environment"], b["environment"]))


def _figures_of(receipt: Receipt) -> dict[str, Any] | None:
    """What of a recipe can change a figure of runs with the same backends."""
    if receipt["recipe"] is None:
        return None
    content = {k: v for k, v in receipt["recipe"]["content"].items() if k != "backends"}
    if "data" in content:
        content["data"] = {k: v for k, v in content["data"].items() if k != "data_cache_path"}
    return content


def _differences(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(f"{path}.{key}", a.get(key), b.get(key))
    elif a != b:
        yield f"{path}: {_brief(a)} | {_brief(b)}"


def _brief(value: Any) -> str:
    if value is None:
        return "none"
    return "{...}" if isinstance(value, dict) else str(value)


def _compare_benches(a: Receipt, b: Receipt, margin: float) -> list[str]:
    rows_a, rows_b = rows_by_key(a), rows_by_key(b)
    both = [key for key in rows_a if key in rows_b]
    if not both:
        raise ReceiptError(
            "A and B have no backend and phase in common: "
            f"{', '.join(map(' '.join, rows_a))} | {', '.join(map(' '.join, rows_b))}"
        )
    cells = [["backend", "phase", "A ms", "B ms", "time, B / A", "99 % interval", "B is", "A GiB",
              "B GiB", ""]]  # fmt: skip
    for key in both:
        first, second = rows_a[key], rows_b[key]
        judgement = judge_rows(first, second, margin, in_turns=False)
        cells.append([
            *key, number(first["median_ms"]), number(second["median_ms"]),
            number(judgement.time.value), interval(judgement.time),
            _direction(judgement.time.value),
            gib(first["peak_memory_bytes"]), gib(second["peak_memory_bytes"]),
            f"{judgement.verdict}: {judgement.reasons[0]}",
        ])  # fmt: skip
    lines = table(cells, align="llrrrrlrrl")
    lines += [f"only in A: {' '.join(key)}" for key in rows_a if key not in rows_b]
    lines += [f"only in B: {' '.join(key)}" for key in rows_b if key not in rows_a]
    return [*lines, "", *rule(ROW_RULE, margin)]


def _compare_runs(a: Receipt, b: Receipt, margin: float) -> list[str]:
    judgement = judge_runs(a, b, margin)
    times = [number(1e6 / warm_median(run, "tokens_per_s")) for run in (a, b)]
    ratio, loss = judgement.time, judgement.loss
    cells = [["", "A", "B", "B / A", "B - A", "99 % interval", "B is"]]
    row = ["ms per 1,000 tokens, warm", *times, number(ratio.value), "", interval(ratio)]
    cells.append([*row, _direction(ratio.value)])
    cells += [_figure_row(label, of(a), of(b), higher) for label, of, higher in _FIGURES]
    if loss:
        label = f"loss, {loss.pairs} paired steps from {loss.first_step:,}"
        change = interval(loss.effect, signed=True)
        better = _better(0.0, loss.effect.value, higher=False)
        cells.append([label, "", "", "", f"{loss.effect.value:+.4f}", change, better])
    lines = table(cells, align="lrrrrrl")
    if pays := _payback(a, b):
        lines += ["", pays]
    lines += ["", f"verdict: {judgement.verdict}", *(f"  {why}" for why in judgement.reasons)]
    return [*lines, "", *rule(RUN_RULE, margin)]


_FIGURES = (
    ("tokens/s, warm median", lambda r: r["result"]["tokens_per_s_median"], True),
    ("TFLOP/s a device", lambda r: r["result"].get("tflops_per_s_per_device"), True),
    ("MFU", lambda r: r["result"].get("mfu"), True),
    ("peak memory, GiB", lambda r: (r["result"]["peak_memory_bytes"] or 0) / 2**30 or None, False),
    ("training loss, last steps", lambda r: r["result"]["final_loss"], False),
    ("held-out loss, last", lambda r: r["result"]["final_eval_loss"], False),
    ("useful share", lambda r: r["goodput"]["useful"], True),
    ("compile, s", lambda r: r["goodput"]["seconds"]["compile"], False),
    ("wall, s", lambda r: r["goodput"]["wall_s"], False),
)  # label, figure, whether higher is better


def _figure_row(label: str, a: float | None, b: float | None, higher: bool) -> list[str]:
    if a is None or b is None:
        return [label, number(a), number(b), "", "", "", ""]
    change = [number(b / a) if a else "", f"{b - a:+.4g}", ""]
    return [label, number(a), number(b), *change, _better(a, b, higher=higher)]


def _better(a: float, b: float, *, higher: bool) -> str:
    if a == b:
        return "equal"
    return "better" if (b > a) == higher else "worse"


def _direction(ratio: float) -> str:
    """The direction of B's time over A's, independent of the interval."""
    if ratio == 1:
        return "equal"
    return f"{percent(abs(1 - ratio))} {'faster' if ratio < 1 else 'slower'}"


def _payback(a: Receipt, b: Receipt) -> str | None:
    """After how many steps a longer compilation has paid for itself."""
    more_s = b["goodput"]["seconds"]["compile"] - a["goodput"]["seconds"]["compile"]
    saved_ms = warm_median(a, "ms") - warm_median(b, "ms")
    if more_s <= 0 or saved_ms <= 0:
        return None
    steps = f"{more_s * 1000 / saved_ms:,.0f} steps"
    return f"B compiles {more_s:.1f} s longer, which its faster steps win back in {steps}"
