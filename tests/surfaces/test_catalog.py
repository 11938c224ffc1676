"""Every backend has a row that is complete and true, and the catalog answers as dispatch does."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from megacpp_mcore import catalog, cli, dispatch
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces import figures
from megacpp_mcore.surfaces.backend import (
    REFERENCE,
    Backend,
    Role,
    Surface,
    reference,
)
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
ROWS = [SimpleNamespace(**row) for row in catalog.rows()]


def name(row):
    return f"{row.surface}-{row.backend}"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in (dispatch.ENVIRONMENT_VARIABLE, "MEGACPP_RECIPE"):
        monkeypatch.delenv(variable, raising=False)


class TestRows:
    def test_every_registered_backend_has_one_row_and_no_row_is_left_over(self):
        registered = [(s.name, backend.name) for s in REGISTRY.values() for backend in s.backends]
        assert sorted(registered) == sorted((row.surface, row.backend) for row in ROWS)
        assert len({(row.surface, row.backend) for row in ROWS}) == len(ROWS)

    @pytest.mark.parametrize("row", ROWS, ids=name)
    def test_a_row_says_what_it_is_for(self, row):
        assert row.role in get_args(Role)
        assert set(row.blocks) <= set("AEMR") and len(set(row.blocks)) == len(row.blocks)
        assert row.removes.strip() and row.exit_when.strip()

    @pytest.mark.parametrize("row", ROWS, ids=name)
    def test_a_row_has_its_contract_tests_and_receipt(self, row):
        assert row.layout.strip() and row.dtypes.strip() and row.tests
        for path in row.tests:
            assert (ROOT / path).is_file(), path
        assert (row.receipt is None) != (row.no_receipt is None)
        if row.receipt:
            assert row.receipt.startswith("examples/receipts/h200/")
            assert (ROOT / row.receipt).is_file()
        assert all(check.strip() and why.strip() for check, why in row.skips.items())
        assert (row.role == "fallback") == (row.backend == REFERENCE)

    @pytest.mark.parametrize("row", ROWS, ids=name)
    def test_fallbacks_exist_and_end_at_the_reference(self, row):
        if row.backend == REFERENCE:
            assert row.fallback is None
            return
        fallbacks = {r.backend: r.fallback for r in ROWS if r.surface == row.surface}
        step, seen = row.fallback, []
        while step is not None:
            assert step in fallbacks and step not in seen
            seen.append(step)
            step = fallbacks[step]
        assert seen[-1] == REFERENCE

    @pytest.mark.parametrize("surface", REGISTRY)
    def test_at_most_one_backend_of_a_surface_is_the_chosen_one(self, surface):
        assert [r.role for r in ROWS if r.surface == surface].count("chosen") <= 1


class TestHereAndNow:
    @pytest.fixture
    def toy(self, monkeypatch):
        surface = Surface(
            "toy",
            (
                Backend("vendor", "json:dumps", lambda workload: f"not on {workload.device}"),
                Backend("good", "json:loads", always, role="chosen"),
                reference("json:load", always),
            ),
            lambda recipe, device: Workload.of(device, "float32", hidden=recipe.model.hidden_size),
        )
        monkeypatch.setitem(REGISTRY, "toy", surface)

    def ask(self, surface="toy", *overrides):
        rows = catalog.here_and_now(load_recipe("nam56r", overrides), "cpu", surface)
        return {row["backend"]: (row["serves"], row["usable"], row["reason"]) for row in rows}

    def test_in_order_with_a_reason_each(self, toy):
        found = self.ask()
        assert list(found) == ["vendor", "good", REFERENCE]
        assert found == {
            "vendor": (False, False, "not on cpu"),
            "good": (True, True, "vendor: not on cpu"),
            REFERENCE: (False, True, "can serve; good comes first"),
        }

    def test_a_name_in_the_recipe_and_in_the_environment(self, toy, monkeypatch):
        found = self.ask("toy", "backends.toy=reference")
        assert found[REFERENCE] == (True, True, "named in the recipe's [backends]")
        assert found["good"] == (False, True, "can serve; reference is named")
        monkeypatch.setenv("MEGACPP_BACKENDS", "toy=good")
        assert self.ask("toy", "backends.toy=reference")["good"][0] is True

    def test_a_named_backend_that_cannot_leaves_the_surface_unserved(self, toy, monkeypatch):
        monkeypatch.setenv("MEGACPP_BACKENDS", "toy=vendor")
        found = self.ask()
        assert not any(serves for serves, _, _ in found.values())
        assert found["vendor"] == (False, False, "not on cpu")
        assert found["good"] == (False, True, "can serve, but vendor is named, which cannot")

    def test_a_surface_that_the_recipe_does_not_have(self):
        found = self.ask("m2rnn", "model.pattern=AE", "model.depth=2")
        assert found[REFERENCE] == (False, None, "recipe nam56r has no layer with this surface")

    @pytest.mark.parametrize("recipe", ["nam56r", "nam56r-tiny"])
    def test_it_answers_what_the_layers_would_get(self, recipe):
        loaded = load_recipe(recipe)
        rows = catalog.here_and_now(loaded, "cpu")
        assert {row["surface"] for row in rows} == set(REGISTRY)
        serving = {row["surface"]: row["backend"] for row in rows if row["serves"]}
        expected = {}
        for surface in REGISTRY.values():
            if workload := surface.workload(loaded, "cpu"):
                expected[surface.name] = dispatch.choose(surface.name, workload).observed
        assert serving == expected
        assert all(row["reason"] for row in rows)

    def test_asking_records_no_decision(self):
        dispatch.forget()
        catalog.here_and_now(load_recipe("nam56r-tiny"), "cpu")
        assert dispatch.decisions() == ()


class TestCommand:
    @pytest.fixture(autouse=True)
    def on_a_cpu(self, monkeypatch):
        monkeypatch.setattr("megacpp_mcore.surfaces.workload.current_device", lambda: "cpu")

    def test_json_rows(self, capsys):
        assert cli.main(["catalog", "--problem", "nam56r", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        for row in rows:
            assert {"surface", "backend", "role", "serves", "reason"} <= row.keys()
        problems = [row["problem"] for row in rows if row["surface"] == "core_attention"]
        assert problems[0]["device"] == "cpu" and problems[0]["dtype"] == "bfloat16"
        assert (problems[0]["dqk"], problems[0]["dv"]) == (128, 64)

    def test_text_names_who_serves(self, capsys):
        assert cli.main(["catalog", "--problem", "nam56r-tiny"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("nam56r-tiny on cpu\n")
        for surface in REGISTRY:
            assert f"\n{surface}\n" in out
        recipe = load_recipe("nam56r-tiny")
        in_recipe = [surface for surface in REGISTRY.values() if surface.workload(recipe, "cpu")]
        assert out.count("  serves  ") == len(in_recipe)

    def test_one_surface_in_full(self, capsys):
        assert cli.main(["catalog", "--surface", "mamba3_scan"]) == 0
        out = capsys.readouterr().out
        assert "state_dim=64" in out and "tests/kernels/test_mamba3_kernel.py" in out
        assert "leaves when" in out and "\nnorm" not in out

    def test_an_unserved_surface_is_exit_status_1(self, capsys, monkeypatch):
        monkeypatch.setenv("MEGACPP_BACKENDS", "norm=te")
        assert cli.main(["catalog", "--surface", "norm"]) == 1
        assert "norm: NOTHING SERVES, te is requested" in capsys.readouterr().out
        assert cli.main(["catalog", "--surface", "linear"]) == 0

    def test_the_recipe_of_the_environment_is_the_default(self, capsys, monkeypatch):
        assert cli.main(["catalog", "--surface", "norm"]) == 0
        assert capsys.readouterr().out.startswith("nam56r on cpu\n")
        monkeypatch.setenv("MEGACPP_RECIPE", "nam56r-tiny")
        assert cli.main(["catalog", "--surface", "norm"]) == 0
        assert capsys.readouterr().out.startswith("nam56r-tiny on cpu\n")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--surface", "moe"], "unknown surface 'moe'; the surfaces are linear, "),
            (["--problem", "nam57"], "unknown recipe 'nam57'"),
        ],
    )
    def test_refusals(self, arguments, message, capsys):
        assert cli.main(["catalog", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""

    def test_an_environment_that_cannot_be_read_is_refused(self, capsys, monkeypatch):
        monkeypatch.setenv("MEGACPP_BACKENDS", "norm")
        assert cli.main(["catalog"]) == 2
        assert "not of the form surface=backend" in capsys.readouterr().err


def test_without_a_driver_the_answer_needs_no_torch():
    code = (
        "import ctypes, sys\n"
        "def absent(name): raise OSError(name)\n"
        "ctypes.CDLL = absent\n"
        "from megacpp_mcore import cli\n"
        "status = cli.main(['catalog', '--problem', 'nam56r'])\n"
        "print(status, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["0 False"], done.stderr


def test_help_is_quick():
    """Under four times the processor time of Python importing asyncio and what --help imports of
    its library, 0.3 s where that takes 0.08: a slow or busy machine is slow at both."""

    def once(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    library = "import argparse, asyncio, dataclasses, inspect, json, tomllib"
    rounds = [(once("-m", "megacpp_mcore.cli", "--help"), once("-c", library)) for _ in range(4)]
    ours, pythons = (min(column) for column in zip(*rounds, strict=True))
    assert ours < 4 * pythons, rounds


def test_without_a_checkout_there_are_no_figures_and_the_rest_reads_on(monkeypatch, tmp_path):
    """A wheel carries no receipts."""
    figures._rows.cache_clear()
    with monkeypatch.context() as wheel:
        wheel.setattr(figures, "_CHECKOUT", tmp_path)
        rows = catalog.rows()
    figures._rows.cache_clear()
    assert not any(row["figures"] for row in rows)
    words = ("backend", "removes", "exit_when", "receipt")
    with_receipts = [[row[word] for word in words] for row in catalog.rows()]
    assert [[row[word] for word in words] for row in rows] == with_receipts
