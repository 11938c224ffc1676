"""Runs as one self-contained page: no script, no font, no picture from elsewhere."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megacpp_mcore.files import write_atomically
from megacpp_mcore.receipts.checks import ReceiptError
from megacpp_mcore.receipts.compare import compare
from megacpp_mcore.receipts.reader import Receipt, points, warm_rows
from megacpp_mcore.receipts.show import show
from megacpp_mcore.receipts.text import duration, gib, number, percent
from megacpp_mcore.receipts.writer import ReceiptWriteError
from megacpp_mcore.terminal import printable

PAGE = "report.html"  # in a run's folder
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
_PARTS = {"step": 2, "compile": 4, "data": 5, "checkpoint": 0, "evaluation": 3, "lost": 1}
_WARM = ", warm steps"  # the caption's end where the cold ones are left out
_MOST_POINTS = 400  # of a curve
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 400, 180, 60, 24  # of a chart, in its own units
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 75rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: currentColor; font: 13px system-ui, sans-serif;
  paint-order: stroke; stroke: Canvas; stroke-width: 4px; }
.scroll { overflow-x: auto; margin: .7rem 0 1.2rem; } table { border-collapse: collapse; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; min-width: 5rem; }
th { overflow-wrap: normal; } td:first-child { min-width: 10.5rem; } td:last-child { min-width: 14rem; }
.runs th, .runs td, .runs td:last-child { min-width: 3.5rem; } .runs td:first-child { min-width: 14rem; }
.runs td:not(:first-child) { overflow-wrap: normal; } .runs .key { margin-left: 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; font-size: 12px; }
@media (min-width: 60rem) { pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
.bar { display: flex; height: 1.2rem; border-radius: .3rem; overflow: hidden; background: var(--soft); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .8em; }
"""  # noqa: E501


def write_page(text: str, out: Path) -> None:
    """Write a `document` to `out`. Raises ReceiptWriteError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, printable(text))
    except OSError as error:
        raise ReceiptWriteError(f"cannot write {out}: {error.strerror}") from error


def page(runs: Sequence[tuple[str, Receipt]]) -> str:
    """The page of some runs: their curves together, each one's facts, and each compared with the
    first. Raises ReceiptError for a receipt of another kind."""
    for name, receipt in runs:
        if receipt["kind"] != "run":
            raise ReceiptError(f"{name} is a {receipt['kind']}; a page is of runs")
    title = ", ".join(name for name, _ in runs)
    parts = [f"<h1>{_text(title)}</h1>", _summary(runs), _charts(runs)]
    parts += [_comparison(runs[0], other) for other in runs[1:]]
    parts += [_run(name, run) for name, run in runs]
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of `parts`, which are HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _summary(runs: Sequence[tuple[str, Receipt]]) -> str:
    head = ("run", "status", "steps", "training loss, last steps", "held-out loss", "tokens/s",
            "TFLOP/s a device", "MFU", "peak memory, GiB", "useful", "time")  # fmt: skip
    rows = []
    for at, (name, run) in enumerate(runs):
        result, mfu = run["result"], run["result"].get("mfu")
        cells = [
            result["status"], f"{result['steps']:,}", number(result["final_loss"]),
            number(result["final_eval_loss"]), number(result["tokens_per_s_median"]),
            number(result.get("tflops_per_s_per_device")), "" if mfu is None else percent(mfu),
            gib(result["peak_memory_bytes"]), percent(run["goodput"]["useful"]),
            duration(run["goodput"]["wall_s"]),
        ]  # fmt: skip
        rows.append([f'<span class="key" style="background:{_colour(at)}"></span>{_text(name)}',
                     *map(_text, cells)])  # fmt: skip
    told = [at for at in range(len(head)) if any(row[at] for row in rows)]
    table = _table([head[at] for at in told], [[row[at] for at in told] for row in rows])
    return f'<div class="runs">{table}</div>'


def _charts(runs: Sequence[tuple[str, Receipt]]) -> str:
    asked = (
        ("Training loss, nats a token", "series", "loss", 1),
        ("Held-out loss, nats a token", "evaluations", "loss", 1),
        (f"Tokens a second{_WARM}", "series", "tokens_per_s", 1),
        (f"Time of a step, ms{_WARM}", "series", "ms", 1),
        ("Gradient norm", "series", "grad_norm", 1),
        ("Peak memory, GiB", "series", "peak_memory_bytes", 2**30),
        ("Power of a GPU, W", "series", "power_w", 1),
    )
    figures = []
    for caption, group, column, unit in asked:
        curves = [_points(run, group, column, unit, caption.endswith(_WARM)) for _, run in runs]
        levels = _entropies(runs) if (group, column) == ("series", "loss") else {}
        if any(steps for steps, _ in curves):
            figures.append((caption, chart(curves, levels)))
    return side_by_side(figures)


def side_by_side(figures: Sequence[tuple[str, str]]) -> str:
    """Figures (caption, HTML) in as many columns as the screen has room for."""
    each = (f"<figure><figcaption>{_text(c)}</figcaption>{body}</figure>" for c, body in figures)
    return f'<div class="charts">{"".join(each)}</div>'


def _entropies(runs: Sequence[tuple[str, Receipt]]) -> dict[str, float]:
    """The entropies of the corpus that the runs have in common: what counting its tokens would
    reach."""
    names = ("unigram_entropy", "bigram_entropy")
    found = {tuple(run["result"].get(name) for name in names) for _, run in runs}
    if len(found) > 1:
        return {}
    named = zip(names, *found, strict=True)
    return {name.replace("_", " "): value for name, value in named if value is not None}


def _points(
    run: Receipt, group: str, column: str, unit: int, of_warm_steps: bool
) -> tuple[list[int], list[float]]:
    columns = run[group]
    if column not in columns:
        return [], []
    if of_warm_steps:
        rows = warm_rows(run)
        columns = {name: [columns[name][row] for row in rows] for name in ("step", column)}
    steps, values = points(columns, column)
    return steps, [value / unit for value in values]


def chart(
    curves: Sequence[tuple[list[int], list[float]]], levels: Mapping[str, float] | None = None, *,
    across: str = "step", in_octaves: bool = False,
) -> str:  # fmt: skip
    """Lines over the steps, one a run, with the ends of both axes told. levels: dashed lines across
    the chart, by name. across: what the lines go over, where not over steps. in_octaves: its axis
    is logarithmic, and its values are at least 1."""
    levels = levels or {}
    scale = math.log2 if in_octaves else float
    steps = [step for xs, _ in curves for step in xs]
    values = [*(value for _, ys in curves for value in ys), *levels.values()]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    tall, wide = (high - low) or 1.0, (scale(last) - scale(first)) or 1

    def place(step: int, value: float) -> str:
        x = _LEFT + (scale(step) - scale(first)) / wide * (_WIDTH - _LEFT - 8)
        y = 8 + (high - value) / tall * (_HEIGHT - _BOTTOM - 16)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for at, (xs, ys) in enumerate(curves):
        stride = max(1, math.ceil(len(xs) / _MOST_POINTS))
        kept = [*range(0, len(xs), stride), *([len(xs) - 1] if xs else [])]
        dots = " ".join(place(xs[i], ys[i]) for i in dict.fromkeys(kept))
        if len(xs) == 1:
            x, y = dots.split(",")
            lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{_colour(at)}"/>')
        elif xs:
            lines.append(f'<polyline fill="none" stroke-width="1.5" stroke="{_colour(at)}" '
                         f'points="{dots}"/>')  # fmt: skip
    for name, value in levels.items():
        y = place(first, value).split(",")[1]
        lines.append(f'<path d="M{_LEFT} {y}H{_WIDTH - 8}" fill="none" stroke="currentColor" '
                     'stroke-dasharray="4 3" stroke-opacity=".6"/>'
                     f'<text x="{_WIDTH - 8}" y="{float(y) - 3:.1f}" text-anchor="end">'
                     f"{_text(name)} {number(value)}</text>")  # fmt: skip
    base = _HEIGHT - _BOTTOM
    words = [(_LEFT - 6, 14, "end", number(high)), (_LEFT - 6, base - 4, "end", number(low)),
             (_LEFT, _HEIGHT - 6, "start", f"{across} {first:,}"),
             (_WIDTH - 8, _HEIGHT - 6, "end", f"{last:,}")]  # fmt: skip
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{side}">{_text(said)}</text>'
        for x, y, side, said in words
    )
    axis = (f'<path d="M{_LEFT} 8V{base}H{_WIDTH - 8}" fill="none" stroke="currentColor" '
            'stroke-opacity=".4"/>')  # fmt: skip
    return (f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{axis}{"".join(lines)}{labels}'
            "</svg>")  # fmt: skip


def _comparison(first: tuple[str, Receipt], other: tuple[str, Receipt]) -> str:
    """What `report compare` says of the two, unlike or not."""
    (name_a, a), (name_b, b) = first, other
    try:
        said = compare(a, b, allow_unlike=True)
    except ReceiptError as error:
        said = str(error)
    heading = f"<h2>{_text(name_b)} (B) compared with {_text(name_a)} (A)</h2>"
    return f"{heading}<pre>{_text(said)}</pre>"


def _run(name: str, run: Receipt) -> str:
    decisions = [[d["surface"], d["requested"], d["observed"] or "none", d["reason"]]
                 for d in run["backends"]]  # fmt: skip
    patches = [
        [package, found["version"], ", ".join(found["applied"]) or "none"]
        for package, found in run.get("patches", {}).items()
    ]
    environment = [[kind, key, value] for kind, values in run["environment"].items()
                   for key, value in values.items()]  # fmt: skip
    keys = [[f"{section}.{key}", value] for section, table in run["recipe"]["content"].items()
            for key, value in table.items() if value is not None]  # fmt: skip
    parts = [f"<h2>{_text(name)}</h2>", _goodput(run),
             f"<pre>{_text(show(run, name))}</pre>",
             "<h3>Backends, and why</h3>",
             _escaped(("surface", "requested", "observed", "reason"), decisions)]  # fmt: skip
    for title, head, rows in (
        ("Patches", ("package", "version", "applied"), patches),
        ("Environment", ("", "variable", "value"), environment),
        ("Recipe", ("key", "value"), keys),
    ):
        if rows:
            parts.append(f"<details><summary>{title}</summary>{_escaped(head, rows)}</details>")
    return "\n".join(parts)


def _goodput(run: Receipt) -> str:
    seconds, wall = run["goodput"]["seconds"], run["goodput"]["wall_s"] or 1.0
    pieces, keys = [], []
    for name, spent in seconds.items():
        colour = _COLOURS[_PARTS[name]] if name in _PARTS else "#8888"
        pieces.append(f'<span style="width:{100 * spent / wall:.2f}%;background:{colour}"></span>')
        if spent:
            keys.append(f'<span class="key" style="background:{colour}"></span>{_text(name)} '
                        f"{percent(spent / wall)}")  # fmt: skip
    return f'<div class="bar">{"".join(pieces)}</div><p>{"".join(keys)}</p>'


def bars(rows: Sequence[tuple[str, float]]) -> str:
    """Names with their values, at least 0, as a table of bars."""
    most = max((value for _, value in rows), default=0.0) or 1.0
    cells = [
        [_text(name), number(value), f'<div class="bar"><span style="width:{100 * value / most:.1f}'
         f'%;background:{_colour(0)}"></span></div>']
        for name, value in rows
    ]  # fmt: skip
    return _table(("", "", ""), cells)


def _colour(at: int) -> str:
    return _COLOURS[at % len(_COLOURS)]


def _escaped(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return _table(head, [[_text(cell) for cell in row] for row in rows])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(row: Sequence[str], tag: str) -> Iterator[str]:
        for cell in row:
            yield f"<{tag}>{cell}</{tag}>"

    body = "".join(f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows)
    header = f"<tr>{''.join(cells([_text(h) for h in head], 'th'))}</tr>"
    return f'<div class="scroll"><table><thead>{header}</thead><tbody>{body}</tbody></table></div>'
