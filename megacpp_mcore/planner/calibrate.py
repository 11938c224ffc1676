"""h200.json from committed receipts: `python -m megacpp_mcore.planner.calibrate FOLDER`.

Each number has one receipt and one sentence that says how it follows. What a layer moves is what
its receipt leaves over once products, attention and recurrences have their time; a link, FP8's
products and Transformer Engine's experts have what a whole run leaves over.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner.activations import Sizes, bytes_per_token
from megacpp_mcore.planner.backends import Serving, passes_rate
from megacpp_mcore.planner.memory import memory
from megacpp_mcore.planner.pipeline import layers_of, micro_batches
from megacpp_mcore.planner.rates import Rates, assumptions
from megacpp_mcore.planner.step import flops_of, layer_seconds, step
from megacpp_mcore.receipts.reader import Receipt, observed, read, rows_by_key, warm_median
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.source import BACKENDS, KEYS
from megacpp_mcore.surfaces import linear_cross_entropy, m2rnn, mamba3_scan, norm
from megacpp_mcore.surfaces.moe_experts import TE
from megacpp_mcore.surfaces.registry import REGISTRY

_BOTH = "forward_backward"
# Surfaces whose backends differ in the planner's memory and rates
_SERVED = ("linear_cross_entropy", "router_gating", "core_attention", "mla_up", "moe_experts",
           "moe_dispatch", "mamba3_core", "m2rnn_core")  # fmt: skip
_DISPATCHER = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"  # what ran is observed
_LAUNCHES = {"host": "run-nam56r-quarter-short-rows.json", "captured": "layouts-2xh200/one.json"}
_RUN, _GATHERING_RUN = "run-nam56r-4xh200-ep4.json", "run-nam56r-4xh200-ep4-graph.json"
_TE_RUN, _FP8_RUN = "run-nam56r-quarter-100-te.json", "run-nam56r-quarter-100-fp8.json"


def recipe_of(receipt: Receipt) -> Recipe:
    """A receipt's recipe, as far as its keys are still known, with the backends that served."""
    overrides = []
    for section, keys in receipt["recipe"]["content"].items():
        for key, value in (keys or {}).items():
            dotted = f"{section}.{key}"
            if dotted in KEYS and not isinstance(value, dict) and key not in _DISPATCHER:
                overrides.append(f"{dotted}={json.dumps(value)}")
    served = observed(receipt)  # `auto` may have another order by now
    for surface in _SERVED:
        if served.get(surface) in dispatch.choices(surface):  # not a bench of several models
            overrides.append(f"{BACKENDS}.{surface}={served[surface]}")
    return load_recipe("nam56r", overrides)


class Calibration:
    """The rates so far; `rates` are what the planner's own formulas are asked with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, dict[str, Any]] = {}
        self.rates = Rates(self.found, assumptions())

    def put(self, name: str, value: float, unit: str, receipt: str, how: str) -> None:
        rounded = value if isinstance(value, int) else float(f"{value:.5g}")
        self.found[name] = {"value": rounded, "unit": unit, "receipt": receipt, "how": how}

    def receipt(self, name: str) -> Receipt:
        return read(self.folder / name)

    def row(self, name: str, backend: str) -> Any:
        return rows_by_key(self.receipt(name))[backend, _BOTH]

    def benched(self, surface: str) -> list[str]:
        """The surface's backends that its bench has timed forward and backward."""
        timed = rows_by_key(self.receipt(f"{surface}.json"))
        return [b.name for b in REGISTRY[surface].backends if (b.name, _BOTH) in timed]

    def seconds(self, name: str, backend: str) -> float:
        return _ms(self.row(name, backend)) / 1e3

    def speed(self, rate: str, receipt: str, backend: str) -> None:
        row = self.row(receipt, backend)
        how = f"operations over the time of {backend}, forward and backward"
        value = row["flops"] / _ms(row) * 1e3
        self.put(rate, value, "operations/s", receipt, how)

    def operators(self) -> None:
        name = "norm.json"
        row = self.row(name, norm.TRITON)
        self.put("bytes", row["bytes_floor"] / row["median_ms"] * 1e3, "bytes/s", name,
                 "bytes of the norm, forward and backward, over its median")  # fmt: skip
        memory_bytes = self.receipt(_RUN)["lane"]["device"]["memory_bytes"]
        self.put("memory", memory_bytes, "bytes", _RUN, "the device's memory, lane.device")
        self.speed("products", "linear_cross_entropy.json", linear_cross_entropy.CHUNKED)
        for surface, rate in (("moe_experts", "experts"), ("core_attention", "attention")):
            for backend in self.benched(surface):
                self.speed(f"{rate}_{backend}", f"{surface}.json", backend)
        self.speed("scan_siso", "mamba3_scan.json", mamba3_scan.MAMBA_SSM)
        self.speed("scan_mimo", "mamba3_scan-mimo.json", mamba3_scan.MAMBA_SSM_MIMO)
        self.m2rnn()

    def m2rnn(self) -> None:
        """A chain of tokens takes the same time for every batch; more heads and rows add to it."""
        one, four = "m2rnn-b1-h44.json", "m2rnn-b4-h44.json"
        sizes = self.receipt(one)["problem"]["sizes"]
        elements = sizes["heads"] * sizes["seq"] * sizes["k_head_dim"] * sizes["v_head_dim"]
        each = (self.seconds(four, m2rnn.CUDA) - self.seconds(one, m2rnn.CUDA)) / (3 * elements)
        self.put("m2rnn_element", each, "s an element of the state and token", four,
                 f"its time less that of {one}, over three rows")  # fmt: skip
        chain = (self.seconds(one, m2rnn.CUDA) - each * elements) / sizes["seq"]
        self.put("m2rnn_token", chain, "s a token of the row", one,
                 "its time less what its elements take")  # fmt: skip

    def left_over(self, recipe: Recipe, layer: Layer, seconds: float) -> float:
        """Passes over what the layer keeps that fill the rest of its time."""
        sizes = Sizes.of(recipe)
        known = layer_seconds(recipe, self.rates, sizes, layer, flops_of(recipe))
        rest = seconds - sum(known.values())
        kept = sizes.tokens * bytes_per_token(recipe, sizes, layer, recompute=False)
        return rest * self.rates["bytes"] / kept

    def layers(self) -> None:
        how = "what its products, attention and recurrence leave of its time, over the bytes kept"
        for name, backend in (
            ("layer-mla.json", "recipe"),
            ("layer-moe.json", "recipe"),
            ("layer-moe.json", "moe_experts=grouped_mm"),
            ("layer-mamba3.json", "recipe"),
            ("layer-mamba3.json", "mamba3_core=reference"),
            ("layer-m2rnn-core.json", "recipe"),
            ("layer-m2rnn-core.json", "m2rnn_core=reference"),
        ):
            receipt = self.receipt(name)
            recipe = _with(recipe_of(receipt), backend)
            (layer,) = layers_of(recipe, 0)
            rate = passes_rate(layer.letter, Serving(recipe).of_layer(layer))
            self.put(rate, 0.0, "passes", name, how)
            value = self.left_over(recipe, layer, self.seconds(name, backend))
            self.put(rate, value, "passes", name, how)

    def runs(self) -> None:
        for rate, name in _LAUNCHES.items():
            receipt = self.receipt(name)
            recipe = recipe_of(receipt)
            launched = micro_batches(recipe) * len(layers_of(recipe, 0))
            each = warm_median(receipt, "ms") / 1e3 / launched
            self.put(rate, each, "s a layer and micro batch", name,
                     "its median step, in which the GPU has next to nothing to do")  # fmt: skip
        receipt = self.receipt(_RUN)
        recipe = recipe_of(receipt)
        self.put("skew", 0.0, "share", _RUN, "")
        even = memory(recipe, 0.0).total
        rows = memory(recipe, 1.0).total - even
        peak = receipt["result"]["peak_memory_bytes"]
        self.put("skew", max(0.0, (peak - even) / rows), "share", _RUN,
                 "its peak over that of even routing, as a share of the experts' rows")  # fmt: skip
        of_link = "bytes/s a GPU", (1e12, 1e9)
        self.fit("nvlink", _RUN, *of_link, "what its exchange of tokens and its reduction have of "
                 "the median step, waiting for the fullest rank included")  # fmt: skip
        self.fit("nvlink_allgather", _GATHERING_RUN, *of_link,
                 "what its exchange of tokens has of the median step")  # fmt: skip
        self.fit("products_fp8", _FP8_RUN, "operations/s", (1e17, 1e14),
                 "what all layers' projections have of the median step")  # fmt: skip
        self.fit(passes_rate("E", TE), _TE_RUN, "passes", (1.0, 1e3),
                 "what its E layers have of the median step beside their products, the host's "
                 "wait for the counts of tokens included")  # fmt: skip

    def fit(self, rate: str, name: str, unit: str, bounds: tuple[float, float], how: str) -> None:
        """The rate with which the step takes what the run's median did. bounds: its values of a
        faster step and of a slower one."""
        receipt = self.receipt(name)
        recipe, seconds = recipe_of(receipt), warm_median(receipt, "ms") / 1e3
        fast, slow = bounds
        for _ in range(60):
            middle = (fast * slow) ** 0.5
            self.put(rate, middle, unit, name, how)
            too_slow = step(recipe, self.rates).total > seconds
            fast, slow = (fast, middle) if too_slow else (middle, slow)


def _ms(row: Any) -> float:
    """The time of a call in a step, where calls follow each other and the card is at its power
    limit, if the receipt has it. Below half a millisecond that time is the host's."""
    sustained = row.get("sustained_ms")
    return sustained if sustained and row["median_ms"] > 0.5 else row["median_ms"]


def _with(recipe: Recipe, backend: str) -> Recipe:
    """backend: that of a bench's row, "recipe" or "surface=name"."""
    if backend == "recipe":
        return recipe
    return load_recipe(recipe.source, [*recipe.overrides, f"{BACKENDS}.{backend}"])


def calibrate(folder: Path) -> dict[str, dict[str, Any]]:
    """The content of h200.json, from the receipts in `folder`."""
    found = Calibration(folder)
    found.operators()
    found.layers()
    found.runs()
    return found.found


if __name__ == "__main__":
    print(json.dumps(calibrate(Path(sys.argv[1])), indent=2))
