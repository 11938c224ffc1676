"""A receipt as a PNG: a run's curves and its goodput, or a bench's medians."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts.checks import ReceiptError
from megacpp_mcore.receipts.reader import Receipt, points, problem_text, warm_rows
from megacpp_mcore.receipts.text import duration, percent, wrapped
from megacpp_mcore.receipts.writer import ReceiptWriteError

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_GREY = "#7f7f7f"
_PARTS = {
    "step": _GREEN, "compile": _ORANGE, "data": "#56B4E9", "checkpoint": _BLUE,
    "evaluation": "#CC79A7", "lost": _RED, "idle": "#BBBBBB",
}  # fmt: skip


def plot(receipt: Receipt, out: Path) -> None:
    """Draw a valid receipt into the PNG file `out`.

    A run: loss with the corpus's entropies, tokens/s, peak memory, goodput split. A bench: median
    and quartiles per backend and phase. Raises ReceiptError when `out` does not end in .png or the
    run has no step yet, ReceiptWriteError when the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    out = Path(out)
    if out.suffix.lower() != ".png":
        raise ReceiptError(f"{out}: a plot is a PNG; name a file that ends in .png")
    if receipt["kind"] == "run":
        if not receipt["series"]["step"]:
            raise ReceiptError("the receipt has no step yet: nothing to draw")
        figure = Figure(figsize=(12, 7.5), layout="constrained")
        _draw_run(figure, receipt)
    else:
        figure = Figure(figsize=(10, 1.8 + 0.45 * len(receipt["rows"])), layout="constrained")
        _draw_bench(figure.subplots(), receipt)
    try:
        figure.savefig(out, format="png", dpi=120)
    except OSError as error:
        raise ReceiptWriteError(f"cannot write the plot {out}: {error.strerror}") from error


def _draw_run(figure: Any, run: Receipt) -> None:
    result = run["result"]
    figure.suptitle(
        f"{run['recipe']['name']}: {result['steps']:,} steps, {result['tokens']:,} tokens on "
        f"{run['topology']['world_size']} x {run['lane']['device']['name']} ({result['status']})",
        fontsize=13,
    )
    (loss, memory), (speed, goodput) = figure.subplots(2, 2, width_ratios=(3, 2))
    _loss(loss, run)
    _speed(speed, run)
    _memory(memory, run)
    _goodput(goodput, run["goodput"])
    for ax in (loss, speed, memory):
        ax.set_xlabel("step")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)


def _loss(ax: Any, run: Receipt) -> None:
    result = run["result"]
    steps, losses = points(run["series"], "loss")
    ax.plot(steps, losses, color=_BLUE, alpha=0.4, linewidth=0.9)
    ax.plot(steps, _smooth(losses), color=_BLUE, linewidth=1.8, label="training, running median")
    steps, losses = points(run["evaluations"], "loss")
    if steps:
        ax.plot(steps, losses, "o-", color=_RED, markersize=5, label="held-out")
    for name, style in (("unigram_entropy", "--"), ("bigram_entropy", ":")):
        if (value := result.get(name)) is not None:
            label = f"{name.split('_')[0]} entropy {value:.3f}"
            ax.axhline(value, color=_GREY, linestyle=style, linewidth=1.4, label=label)
    final = result["final_loss"]
    ax.set_title("loss" if final is None else f"loss, final {final:.3f}", loc="left")
    ax.set_ylabel("nats per token")
    ax.legend(frameon=False)


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median over about a fortieth of the values; one spike does not bend it."""
    half = max(2, len(values) // 80)
    return [
        statistics.median(values[max(0, index - half) : index + half + 1])
        for index in range(len(values))
    ]


def _speed(ax: Any, run: Receipt) -> None:
    steps, speeds = points(run["series"], "tokens_per_s")
    warm = warm_rows(run)
    ax.plot([steps[r] for r in warm], [speeds[r] for r in warm], color=_GREEN, linewidth=0.9)
    if cold := sorted({*range(len(steps))} - {*warm}):
        rows = [steps[r] for r in cold], [speeds[r] for r in cold]
        ax.plot(*rows, "x", color=_ORANGE, label="cold")
    title = "tokens/s"
    if (median := run["result"]["tokens_per_s_median"]) is not None:
        ax.axhline(median, color=_GREY, linestyle="--", linewidth=1.2, label="median, warm")
        title += f", warm median {median:,.0f}"
    ax.set_title(title, loc="left")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend(frameon=False, loc="lower right")


def _memory(ax: Any, run: Receipt) -> None:
    title = "peak memory"
    steps, values = points(run["series"], "peak_memory_bytes")
    if steps:
        gib = [value / 2**30 for value in values]
        ax.plot(steps, gib, color=_RED, linewidth=1.4)
        title += f", {max(gib):.2f} GiB"
        ax.set_ylim(top=1.15 * max(gib))
    else:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
    ax.set_title(title, loc="left")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("GiB")


def _goodput(ax: Any, goodput: Mapping[str, Any]) -> None:
    wall, seconds = goodput["wall_s"], [goodput["seconds"][name] for name in _PARTS]
    shares = [part / wall if wall else 0.0 for part in seconds]
    bars = ax.barh([*_PARTS], [100 * share for share in shares], color=[*_PARTS.values()])
    labels = [f"{percent(s)}  {duration(part)}" for s, part in zip(shares, seconds, strict=True)]
    ax.bar_label(bars, labels, padding=4, fontsize=9)
    ax.set_xlim(0, 135)  # room for the labels beside a bar of 100 %
    ax.set_xticks(range(0, 101, 20))
    ax.set_xlabel("% of the wall time")
    ax.invert_yaxis()
    title = f"goodput, {percent(goodput['useful'])} of {duration(wall)} in useful steps"
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_bench(ax: Any, bench: Receipt) -> None:
    rows, baseline = bench["rows"], bench["baseline"]
    medians = [row["median_ms"] for row in rows]
    below = [row["median_ms"] - row["q1_ms"] for row in rows]
    above = [row["q3_ms"] - row["median_ms"] for row in rows]
    colors = [_GREY if row["backend"] == baseline else _BLUE for row in rows]
    places = range(len(rows))
    bars = ax.barh(places, medians, xerr=[below, above], color=colors, ecolor="black", capsize=3)
    ax.bar_label(bars, [f"{median:,.4g} ms" for median in medians], padding=8, fontsize=9)
    ax.set_yticks(places, [f"{row['backend']}, {row['phase']}" for row in rows])
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"ms, median and quartiles; grey: the baseline, {baseline}")
    title = wrapped(f"{problem_text(bench)}; {bench['lane']['device']['name']}")
    ax.set_title("\n".join(title), loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
