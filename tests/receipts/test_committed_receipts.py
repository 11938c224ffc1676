"""The receipts that the repository carries: each is valid, and says what is claimed of it."""

import functools
import itertools
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_mcore import catalog, receipts
from megacpp_mcore.receipts.intervals import time_ratio
from megacpp_mcore.receipts.judge import MARGIN, judge_rows
from megacpp_mcore.receipts.lane import is_traceable
from megacpp_mcore.receipts.table import table
from megacpp_mcore.surfaces.figures import Figure, claims_by_receipt
from megacpp_mcore.surfaces.registry import REGISTRY

FOLDER = Path(__file__).resolve().parents[2] / "examples/receipts/h200"
read = functools.cache(receipts.read)


@pytest.mark.parametrize(
    "path",
    sorted(FOLDER.parent.glob("h*/*.json")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_a_receipt_is_valid_and_of_its_folders_card(path):
    device = read(path)["lane"]["device"]["name"]
    assert path.parent.name.upper() in device.split()


def _rows(name):
    """(backend, phase) -> row of a bench, and the bytes/s that a copy moved beside it."""
    receipt = read(FOLDER / f"{name}.json")
    copy = re.search(r"copy ([\d,]+) GB/s", " ".join(receipt["notes"]))
    rows = {(row["backend"], row["phase"]): row for row in receipt["rows"]}
    return rows, copy and 1e9 * float(copy[1].replace(",", ""))


BACKENDS = [(surface, backend) for surface in REGISTRY.values() for backend in surface.backends]
MEASURED = [(surface, backend) for surface, backend in BACKENDS if backend.receipt]


@pytest.mark.parametrize(
    ("surface", "backend"), MEASURED, ids=[f"{s.name}-{b.name}" for s, b in MEASURED]
)
def test_a_catalog_rows_receipt_has_its_backend(surface, backend):
    """Benched on its own, or what served in a whole model."""
    receipt = read(FOLDER / backend.receipt)
    if receipt.get("problem", {}).get("surface") == surface.name:
        assert backend.name in {timed["backend"] for timed in receipt["rows"]}
    else:
        served = {(entry["surface"], entry["observed"]) for entry in receipt["backends"]}
        assert (surface.name, backend.name) in served


_FIGURE = re.compile(
    r".+: forward ([\d.]+) ms, with backward ([\d.]+) ms, ([\d.]+) GiB \((.+\.json)\)"
)


def _digits(value):
    return f"{value:#.3g}".rstrip(".")


_TYPED = re.compile(r"\d (ms|GiB)|\d+ %")


@pytest.mark.parametrize(
    "row", catalog.rows(), ids=lambda row: f"{row['surface']}-{row['backend']}"
)
def test_the_figures_that_a_catalog_row_shows_are_its_receipts(row):
    """The backend's own first: forward / forward + backward; none typed where a receipt has it."""
    for text in row["figures"]:
        first, second, memory, name = _FIGURE.fullmatch(text).groups()
        rows, _ = _rows(name.removesuffix(".json"))
        asked = {"forward": first, "forward_backward": second}
        found = [
            backend
            for backend in {backend for backend, _ in rows}
            if all(_digits(rows[backend, p]["median_ms"]) == ms for p, ms in asked.items())
            and _digits(rows[backend, "forward_backward"]["peak_memory_bytes"] / 2**30) == memory
        ]
        assert found, text
    words = [row[key] for key in ("removes", "exit_when", "no_receipt") if row.get(key)]
    assert not _TYPED.search(" ".join(words))
    own = row["receipt"] and read(FOLDER.parents[2] / row["receipt"])
    if own and own["problem"]["surface"] == row["surface"]:
        assert row["figures"][0].startswith(f"{row['backend']}: ")


@pytest.mark.parametrize("surface", REGISTRY.values(), ids=REGISTRY)
def test_every_figure_that_the_catalog_names_is_in_its_receipt(surface):
    figures = [figure for backend in surface.backends for figure in backend.figures]
    figures += [Figure(b.receipt, b.name) for b in surface.backends if b.receipt]
    for figure in figures:
        assert _of_a_model(figure.receipt) or figure.is_known(), figure


def _of_a_model(name):
    return read(FOLDER / name)["problem"]["surface"] in ("layer", "model")


def test_chunked_losses_take_nine_tenths_of_ligers_mean_and_little_more_than_the_products():
    """Nine tenths, the whole 99 % interval of it; a tenth more than 6 T h V operations at the rate
    of the best of ten large products in the same run; 0.7 GiB beyond the gradients."""
    rows, _ = _rows("linear_cross_entropy-mean")
    ours, ligers = rows["chunked", "forward_backward"], rows["liger_mean", "forward_backward"]
    assert judge_rows(ligers, ours, MARGIN, in_turns=True).time.high <= 0.90
    receipt = read(FOLDER / "linear_cross_entropy-mean.json")
    floor = re.search(r"forward_backward ([\d.]+) ms", " ".join(receipt["notes"]))
    assert ours["median_ms"] <= 1.10 * float(floor[1])
    sizes = receipt["problem"]["sizes"]
    tokens = sizes["batch"] * sizes["seq"]
    gradients = 2 * sizes["hidden_size"] * (tokens + sizes["vocab_size"])
    assert ours["peak_memory_bytes"] - gradients <= 0.7 * 2**30


def test_mla_rope_moves_four_fifths_of_what_a_copy_does():
    rows, copied = _rows("mla_rope")
    forward, both = (rows["triton", phase] for phase in ("forward", "forward_backward"))
    backward = {key: both[key] - forward[key] for key in ("bytes_floor", "median_ms")}
    for row in (forward, backward):
        assert row["bytes_floor"] / row["median_ms"] * 1000 >= 0.8 * copied


def test_the_mla_layer_takes_three_quarters_of_the_unfused_ones_time():
    """And at most ten milliseconds, with less memory: much less forward, a little in all."""
    rows, _ = _rows("layer-mla")
    for phase in ("forward", "forward_backward"):
        ours, theirs = rows["recipe", phase], rows["mla_rope=megatron", phase]
        assert time_ratio(theirs["samples_ms"], ours["samples_ms"]).high <= 0.75
        assert ours["median_ms"] <= 10
        assert ours["peak_memory_bytes"] < theirs["peak_memory_bytes"]


def test_the_gqa_layer_is_no_slower_than_megatrons():
    rows, _ = _rows("layer-gqa")
    for phase in ("forward", "forward_backward"):
        ours, theirs = rows["recipe", phase], rows["rope_qk=megatron", phase]
        assert time_ratio(theirs["samples_ms"], ours["samples_ms"]).high <= 1


@pytest.mark.skipif(not (FOLDER / "layouts-2xh200/one-resumed.json").exists(), reason="not made")
def test_a_resume_in_the_same_layout_is_equal_to_the_bit():
    one, resumed = (
        read(FOLDER / f"layouts-2xh200/{name}.json")["series"] for name in ("one", "one-resumed")
    )
    whole = dict(zip(one["step"], one["loss"], strict=True))
    assert resumed["loss"] == [whole[step] for step in resumed["step"]] and resumed["loss"]


def test_captured_steps_of_52_layers_are_captured_and_even():
    """On one GPU and as two data-parallel ranks; the last eight within 2 %."""
    names = ("1xh200-graph", "2xh200-dp2-graph")
    one, two = (read(FOLDER / f"run-nam56r-{name}.json") for name in names)
    assert two["topology"]["dp"] == 2 and two["topology"]["ep"] == 1
    for receipt in (one, two):
        assert receipt["recipe"]["content"]["launch"]["cuda_graph_impl"] == "full_iteration"
        assert receipt["series_info"]["cold_steps"] == [1, 4]  # the first, and the capture
        last = receipt["series"]["ms"][-8:]
        assert max(last) / statistics.median(last) < 1.02
        assert receipt["result"]["cuda_graph_bytes"] > 0


def test_the_table_of_receipts_is_that_of_the_receipts():
    folder = FOLDER.parent
    page = table(folder, claims_by_receipt())
    assert (folder / "README.md").read_text() == page, "run `make docs`"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.json")), ids=lambda path: path.stem)
def test_a_receipt_is_of_code_that_the_checkouts_history_has(path):
    code = read(path)["code"]
    if not (FOLDER.parents[2] / ".git").exists():
        pytest.skip("no checkout, whose history has the trees")
    assert is_traceable(code)


def _rows_of(surface, receipt):
    """Backend -> its row, forward and backward, of a bench of the surface or of a layer with it.

    A layer's row "recipe" is of the backend that served the recipe, noted first; "SURFACE=NAME" of
    the other. A row that differs in more than this surface says nothing of it.
    """
    rows = {r["backend"]: r for r in receipt["rows"] if r["phase"] == "forward_backward"}
    if receipt["problem"]["surface"] == surface.name:
        return {
            backend.name: rows[backend.name] for backend in surface.backends if backend.name in rows
        }
    if receipt["problem"]["surface"] != "layer":
        return {}
    named = {b.name: f"{surface.name}={b.name}" for b in surface.backends}
    found = {backend: rows[row] for backend, row in named.items() if row in rows}
    served = [b["observed"] for b in receipt["backends"] if b["surface"] == surface.name]
    return {served[0]: rows["recipe"]} | found if found else {}


def _compared(surface):
    """(preferred, later) -> each judgement of the later by a committed bench that has both."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        receipt = read(path)
        if receipt["kind"] != "bench":
            continue
        rows = _rows_of(surface, receipt)
        served = [b.name for b in surface.backends if b.name in rows]
        for first, later in itertools.combinations(served, 2):
            judged = judge_rows(rows[first], rows[later], MARGIN, in_turns=True)
            found.setdefault((first, later), []).append(judged)
    return found


def _passed_over(surface):
    """(preferred, faster) of each pair that a bench has in another order."""
    return {
        pair
        for pair, judged in _compared(surface).items()
        if any(j.time.high is not None and j.time.high < 1 - MARGIN for j in judged)
    }


@pytest.mark.parametrize("surface", REGISTRY.values(), ids=REGISTRY)
def test_auto_takes_the_faster_first_or_the_catalog_says_why_not(surface):
    """By the 99 % interval of a committed bench, of backends that are all within the gate."""
    opt_in = {backend.name for backend in surface.backends if backend.opt_in is True}
    explained = {(b.name, later) for b in surface.backends for later in b.before}
    found = {pair for pair in _passed_over(surface) if not opt_in & set(pair)}
    assert found == explained, "a reason for what no receipt says"


def test_the_order_of_a_surface_that_only_a_layers_receipt_has_is_held_to_it():
    """The fused experts save outside the operator: their order would be held by nothing."""
    surface = REGISTRY["moe_experts"]
    chosen, other = ("fused_moe", "grouped_mm")
    assert (chosen, other) in _compared(surface)
    backends = {backend.name: backend for backend in surface.backends}
    assert backends[chosen].receipt == "layer-moe.json"
    turned = (backends[other], backends[chosen])
    assert _passed_over(replace(surface, backends=turned)) == {(other, chosen)}


def test_a_layers_rows_are_of_the_surface_that_differs_alone():
    surface = REGISTRY["moe_experts"]
    times = {"recipe": 1, "moe_experts=te": 2, "moe_experts=grouped_mm,norm=te": 3}
    layer = {
        "problem": {"surface": "layer"},
        "backends": [
            {"surface": "norm", "observed": "triton"},
            {"surface": "moe_experts", "observed": "fused_moe"},
            {"surface": "moe_experts", "observed": "te"},
        ],
        "rows": [{"backend": b, "phase": "forward_backward", "ms": ms} for b, ms in times.items()],
    }  # fmt: skip
    found = {backend: row["ms"] for backend, row in _rows_of(surface, layer).items()}
    assert found == {"fused_moe": 1, "te": 2}
    assert _rows_of(REGISTRY["norm"], layer) == {}
