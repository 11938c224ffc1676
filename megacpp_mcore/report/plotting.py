"""A receipt as a PNG: a run's curves and its goodput, or a bench's medians."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts import ReceiptError, ReceiptWriteError
from megacpp_mcore.receipts.run import warm_rows
from megacpp_mcore.report.text import duration, percent, wrapped

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_GREY = "#7f7f7f"
_PARTS = {
    "step": _GREEN,
    "compile": _ORANGE,
    "data": "#56B4E9",
    "checkpoint": _BLUE,
    "evaluation": "#CC79A7",
    "lost": _RED,
    "idle": "#BBBBBB",
}


def plot(receipt: Mapping[str, Any], out: Path) -> None:
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
        _draw_bench(figure, receipt)
    try:
        figure.savefig(out, format="png", dpi=120)
    except OSError as error:
        raise ReceiptWriteError(f"cannot write the plot {out}: {error.strerror}") from error


def _draw_run(figure: Any, receipt: Mapping[str, Any]) -> None:
    recipe, lane, result = receipt["recipe"], receipt["lane"], receipt["result"]
    device = lane["device"]
    figure.suptitle(
        f"{recipe['name']}: {result['steps']:,} steps, {result['tokens']:,} tokens on "
        f"{receipt['topology']['world_size']} x {device['name']} ({result['status']})",
        fontsize=13,
    )
    axes = figure.subplots(2, 2, width_ratios=(3, 2))
    _loss(axes[0][0], receipt)
    _speed(axes[1][0], receipt)
    _memory(axes[0][1], receipt)
    _goodput(axes[1][1], receipt["goodput"])
    for ax in (axes[0][0], axes[1][0], axes[0][1]):
        ax.set_xlabel("step")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)


def _loss(ax: Any, receipt: Mapping[str, Any]) -> None:
    series, result, evaluations = receipt["series"], receipt["result"], receipt["evaluations"]
    rows = [row for row, loss in enumerate(series["loss"]) if loss is not None]
    steps = [series["step"][row] for row in rows]
    losses = [series["loss"][row] for row in rows]
    ax.plot(steps, losses, color=_BLUE, alpha=0.4, linewidth=0.9)
    ax.plot(steps, _smooth(losses), color=_BLUE, linewidth=1.8, label="training, running median")
    held_out = [
        (step, loss)
        for step, loss in zip(evaluations["step"], evaluations["loss"], strict=True)
        if loss is not None
    ]
    if held_out:
        ax.plot(*zip(*held_out, strict=True), "o-", color=_RED, markersize=5, label="held-out")
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


def _speed(ax: Any, receipt: Mapping[str, Any]) -> None:
    series, warm = receipt["series"], warm_rows(receipt)
    ax.plot(
        [series["step"][row] for row in warm],
        [series["tokens_per_s"][row] for row in warm],
        color=_GREEN,
        linewidth=0.9,
    )
    cold = sorted(set(range(len(series["step"]))) - set(warm))
    if cold:
        ax.plot(
            [series["step"][row] for row in cold],
            [series["tokens_per_s"][row] for row in cold],
            "x",
            color=_ORANGE,
            label="cold",
        )
    title = "tokens/s"
    if (median := receipt["result"]["tokens_per_s_median"]) is not None:
        ax.axhline(median, color=_GREY, linestyle="--", linewidth=1.2, label="median, warm")
        title += f", warm median {median:,.0f}"
    ax.set_title(title, loc="left")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend(frameon=False, loc="lower right")


def _memory(ax: Any, receipt: Mapping[str, Any]) -> None:
    series = receipt["series"]
    points = [
        (step, value / 2**30)
        for step, value in zip(series["step"], series["peak_memory_bytes"], strict=True)
        if value is not None
    ]
    if points:
        ax.plot(*zip(*points, strict=True), color=_RED, linewidth=1.4)
        highest = max(value for _, value in points)
        ax.set_title(f"peak memory, {highest:.2f} GiB", loc="left")
        ax.set_ylim(top=1.15 * highest)
    else:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        ax.set_title("peak memory", loc="left")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("GiB")


def _goodput(ax: Any, goodput: Mapping[str, Any]) -> None:
    wall = goodput["wall_s"]
    names = list(_PARTS)
    shares = [100 * goodput["seconds"][name] / wall if wall else 0.0 for name in names]
    bars = ax.barh(names, shares, color=[_PARTS[name] for name in names])
    labels = [
        f"{percent(share / 100)}  {duration(goodput['seconds'][name])}"
        for name, share in zip(names, shares, strict=True)
    ]
    ax.bar_label(bars, labels, padding=4, fontsize=9)
    ax.set_xlim(0, 135)  # room for the labels beside a bar of 100 %
    ax.set_xticks(range(0, 101, 20))
    ax.set_xlabel("% of the wall time")
    ax.invert_yaxis()
    title = f"goodput, {percent(goodput['useful'])} of {duration(wall)} in useful steps"
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_bench(figure: Any, receipt: Mapping[str, Any]) -> None:
    rows = receipt["rows"]
    ax = figure.subplots()
    medians = [row["median_ms"] for row in rows]
    spread = [
        [row["median_ms"] - row["q1_ms"] for row in rows],
        [row["q3_ms"] - row["median_ms"] for row in rows],
    ]
    places = range(len(rows))
    colors = [_GREY if row["backend"] == receipt["baseline"] else _BLUE for row in rows]
    bars = ax.barh(places, medians, xerr=spread, color=colors, ecolor="black", capsize=3)
    ax.bar_label(bars, [f"{median:,.4g} ms" for median in medians], padding=8, fontsize=9)
    ax.set_yticks(places, [f"{row['backend']}, {row['phase']}" for row in rows])
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"ms, median and quartiles; grey: the baseline, {receipt['baseline']}")
    problem, device = receipt["problem"], receipt["lane"]["device"]
    sizes = ", ".join(f"{name} {value}" for name, value in problem["sizes"].items())
    ax.set_title(
        "\n".join(wrapped(f"{problem['surface']}, {problem['dtype']}, {sizes}; {device['name']}")),
        loc="left",
        fontsize=11,
    )
    ax.spines[["top", "right"]].set_visible(False)
