"""What `megacpp evaluate` has found as one self-contained HTML page."""

import html
from collections.abc import Mapping
from typing import Any

from megacpp_mcore.receipts.html import bars, chart, document, side_by_side


def page(result: Mapping[str, Any]) -> str:
    """result: of `evaluate.judge`, with run, iteration, recipe and data.

    The loss by position stands over the tokens of context, the n-gram models as levels in it; bits
    per byte are those of the model and the n-gram models, and of the model by kind of file.
    """
    title = f"{result['recipe']}, iteration {result['iteration']}, on {result['data']}"
    said = (
        f"{result['run']}: {result['documents']:,} documents ({result['selection']['why']}), "
        f"{result['tokens']:,} tokens, {result['bytes']:,} bytes"
    )
    positions, baselines = result["positions"], result["baselines"]
    places = [row["to"] for row in positions], [row["loss"] for row in positions]
    levels = {row["name"]: row["loss"] for row in baselines}
    models = [("model", result["bits_per_byte"])]
    models += [(row["name"], row["bits_per_byte"]) for row in baselines]
    kinds = [(row["kind"], row["bits_per_byte"]) for row in result["kinds"]]
    figures = [
        (caption, bars([(name, bits) for name, bits in rows if bits is not None]))
        for caption, rows in (("Bits per byte", models), ("Bits per byte by kind", kinds))
    ]
    if positions:
        curve = chart([places], levels, across="token", in_octaves=True)
        figures.insert(0, ("Loss by tokens of context, nats a token", curve))
    heading = f"<h1>{html.escape(title)}</h1><p>{html.escape(said)}</p>"
    return document(title, [heading, side_by_side(figures)])
