"""Layers side by side: the same weights and inputs, outputs and gradients held to each other."""

import json

import pytest
import torch
from small_bench import (
    SMALL,
    WORDS,
    add_mla_rope,
    gradient_times,
    quick,  # noqa: F401  a fixture
    times,
)

from megacpp_mcore import bench, cli
from megacpp_mcore.bench import layer
from megacpp_mcore.bench.variants import Variant
from megacpp_mcore.training.cpu.megatron_setup import single_process


class TestLayer:
    def bench(self, path, *arguments):
        status = cli.main(["bench", "layer", *arguments, "--recipe", "nam56r-tiny", *WORDS,
                           "--receipt", str(path)])  # fmt: skip
        return status, json.loads(path.read_text())

    @pytest.mark.parametrize(("name", "pattern"), [("*", "*"), ("M", "M"), ("R", "G"), ("E", "E")])
    def test_every_layer_has_both_phases(self, name, pattern, tmp_path):
        status, receipt = self.bench(tmp_path / "layer.json", name)
        assert status == 0 and receipt["problem"]["sizes"]["pattern"] == pattern
        forward, backward = receipt["rows"]
        assert (forward["phase"], backward["phase"]) == ("forward", "forward_backward")
        assert backward["flops"] == 3 * forward["flops"] > 0

    def test_inputs_are_not_the_rows_of_a_weight(self):
        """One seed for both makes them the same numbers on a CPU."""
        recipe = bench.load_for_bench("nam56r-tiny", [*layer.layer_overrides("M"), *SMALL])
        with single_process(recipe.schedule.seed, "cpu"):
            built = layer._Layer("recipe", Variant(recipe), "cpu")
        x = torch.nn.functional.normalize(built.sets[0].flatten(0, -2), dim=-1)
        width = x.shape[-1]
        weights = [p for p in built.model.parameters() if p.dim() == 2 and p.shape[1] == width]
        rows = torch.nn.functional.normalize(torch.cat(weights), dim=-1)
        assert len(rows) > 500 and (x @ rows.T).abs().max() < 0.9

    def test_backends_inside_an_mla_layer_with_the_same_weights(self, tmp_path):
        against = ["mla_rope=megatron,core_attention=reference", "mla_rope=reference"]
        status, receipt = self.bench(tmp_path / "layer.json", "A", "--against", *against)
        assert status == 0 and receipt["baseline"] == against[0]
        assert {row["backend"] for row in receipt["rows"]} == {"recipe", *against}
        observed = {(b["surface"], b["observed"]) for b in receipt["backends"]}
        expected = {"mla_rope": ("megatron", "reference"), "core_attention": ("sdpa", "reference")}
        assert {(surface, name) for surface in expected for name in expected[surface]} <= observed
        for row in receipt["rows"]:
            is_baseline = row["backend"] == against[0]
            assert (row["error"] is None) == is_baseline
            assert is_baseline or 0 < row["error"] <= row["tolerance"] < 1e-4

    @pytest.mark.parametrize("change", [times(1.01), times(float("nan")), gradient_times(1.05)])
    def test_a_backend_that_is_wrong(self, change, tmp_path, monkeypatch, capsys):
        add_mla_rope(monkeypatch, change)
        status, receipt = self.bench(tmp_path / "layer.json", "A", "--against", "mla_rope=changed")
        assert status == 1 and "recipe: " in capsys.readouterr().err
        assert all(r["error"] > r["tolerance"] for r in receipt["rows"] if r["error"] is not None)

    def test_packed_documents(self, tmp_path):
        packed = ["--set", "data.dataloader_inter_document_masking=true"]
        status, receipt = self.bench(tmp_path / "layer.json", "+", *packed)
        assert status == 0 and receipt["problem"]["sizes"]["documents_a_row"] == 8

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["layer", "Q"], "layer 'Q' is unknown; choose A, +, "),
            (["layer"], "takes the name of a layer"),
            (["norm", "A"], "takes the name of a layer"),
            (["layer", "A", "--against", "mla_rope=fast"], "unknown backend 'fast'"),
            (["layer", "A", "--against", "te"], "not of the form surface=backend"),
            (["layer", "E", "--set", "backends.m2rnn=reference"], "no part of this model asks for"),
            (["layer", "R", "--set", "backends.rope_qk=reference"], "asks for rope_qk"),
            (["norm", "--set", "backends.m2rnn=reference"], "bench norm` builds no other surface"),
        ],
    )
    def test_refusals(self, arguments, message, capsys):
        assert cli.main(["bench", *arguments, "--recipe", "nam56r-tiny", *WORDS]) == 2
        assert message in capsys.readouterr().err

    def test_a_recipes_backends_of_other_layers_stay(self, tmp_path, capsys):
        recipe = tmp_path / "mine.toml"
        recipe.write_text('extends = "nam56r-tiny"\n[backends]\nm2rnn = "reference"\n')
        bench_layer = ["bench", "layer", "E", "--recipe", str(recipe), *WORDS]
        assert cli.main(bench_layer) == 0
        assert cli.main([*bench_layer, "--set", "model.pattern=AEM"]) == 2
        assert "no part of this model asks for m2rnn" in capsys.readouterr().err
