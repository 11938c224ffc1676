"""Models side by side, and what the command refuses."""

import json
import sys

import pytest
from small_bench import (
    WORDS,
    add_mla_rope,
    gradient_times,
    quick,  # noqa: F401  a fixture
    times,
)

from megacpp_mcore import cli
from megacpp_mcore.bench import model
from megacpp_mcore.training import one_process


@pytest.mark.slow
class TestCommand:
    def test_a_model_step(self, tmp_path, capsys):
        path = tmp_path / "model.json"
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "2", *WORDS,
                           "--receipt", str(path)])  # fmt: skip
        out = capsys.readouterr().out
        assert status == 0 and "tokens/s" in out
        receipt = json.loads(path.read_text())
        assert [row["phase"] for row in receipt["rows"]] == ["forward", "forward_backward", "step"]
        assert receipt["problem"]["sizes"]["pattern"] == "+E/+E"
        assert receipt["problem"]["sizes"]["tokens"] == 64
        observed = {entry["surface"]: entry["observed"] for entry in receipt["backends"]}
        assert observed["core_attention"] == "sdpa"
        forward, backward, step = (row["flops"] for row in receipt["rows"])
        assert backward == step == 3 * forward > 0

    @pytest.mark.parametrize(
        ("change", "wrong"), [(times(1.0), False), (times(1.1), True), (gradient_times(1.05), True)]
    )
    def test_models_side_by_side(self, change, wrong, tmp_path, monkeypatch, capsys):
        """With the same weights; a model whose loss or gradients are others is wrong."""
        add_mla_rope(monkeypatch, change)
        path, other = tmp_path / "model.json", "mla_rope=changed"
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "1", *WORDS,
                           "--against", other, "--receipt", str(path)])  # fmt: skip
        receipt = json.loads(path.read_text())
        assert receipt["baseline"] == other
        phases = ("forward", "forward_backward", "step")
        rows = {(row["backend"], row["phase"]): row for row in receipt["rows"]}
        assert list(rows) == [(name, phase) for phase in phases for name in ("model", other)]
        observed = {b["observed"] for b in receipt["backends"] if b["surface"] == "mla_rope"}
        assert observed == {"megatron", "changed"}
        row = rows["model", "step"]
        assert (status, row["error"] > row["tolerance"]) == (int(wrong), wrong)
        assert ("from mla_rope=changed, allowed" in capsys.readouterr().err) == wrong
        assert rows[other, "step"]["error"] is None

    def test_a_model_beside_itself_with_another_key(self, tmp_path, monkeypatch):
        path, other = tmp_path / "model.json", "recompute.mamba3=mixer,mamba3_scan=reference"
        built = []
        build = model.build
        monkeypatch.setattr(model, "build", lambda c: built.append(build(c)) or built[-1])
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", *WORDS, "--layers", "1",
                           "--set", "model.pattern=M", "--against", other,
                           "--receipt", str(path)])  # fmt: skip
        receipt = json.loads(path.read_text())
        assert (status, receipt["baseline"]) == (0, other)
        assert receipt["recipe"]["content"]["recompute"]["mamba3"] is None
        mixers = [model.decoder.layers[0].mixer for model, _ in built]
        assert [mixer.recompute for mixer in mixers] == [None, "mixer"]
        assert [r["backend"] for r in receipt["rows"] if r["error"] == 0] == ["model"] * 3

    def test_a_step_that_fails_leaves_the_other_rows_and_status_1(self, monkeypatch, capfd):
        def fails(bare, args):
            raise RuntimeError("no optimizer today")

        monkeypatch.setattr(one_process, "on_cpu", fails)
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "1", *WORDS])
        out, err = capfd.readouterr()
        assert status == 1 and "no step: RuntimeError: no optimizer today" in err
        assert "forward_backward" in out

    def test_a_spec_that_cannot_be_imported_is_refused(self, monkeypatch, capsys):
        """Megatron would build its own stack of Transformer Engine's layers without a word."""
        import megacpp_mcore.training.gpu.model  # noqa: F401  imports our stack, but not the spec

        monkeypatch.setitem(sys.modules, "megacpp_mcore.layers.hybrid_stack", None)
        monkeypatch.delitem(sys.modules, "megacpp_mcore.specs.nam56r", raising=False)
        assert cli.main(["bench", "model", "--recipe", "nam56r-tiny", *WORDS]) == 2
        assert "megacpp_mcore.specs.nam56r cannot be used" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["norms"], "surface 'norms' has no case; choose norm, router_gating, "),
            (["linear"], "surface 'linear' has no case"),
            (["norm", "--layers", "3"], "--layers and --no-optimizer are for `megacpp bench"),
            (["model", "--against", "te"], "--against: 'te' is not of the form surface=backend"),
            (["model", "--against", "moe.num_experts=8"], "precision and recompute can, and"),
            (["model", "--against", "precision.fp9=hybrid"], "unknown key 'precision.fp9'"),
            (["model", "--against", "precision.bf16=false,norm=fast"],
             "--against: unknown backend 'fast'"),
            (["model", "--layers", "0"], "--layers 0: at least 1 is needed"),
            (["norm", "--recipe", "nam57"], "unknown recipe 'nam57'"),
            (["m2rnn", "--recipe", "nam56r-tiny", "--set", "model.pattern=AE", "--set",
              "model.depth=2"], "recipe nam56r-tiny has no layer for a bench of m2rnn"),
        ],
    )  # fmt: skip
    def test_refusals(self, arguments, message, capsys):
        assert cli.main(["bench", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_without_jsonschema_it_says_so_before_anything_runs(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "jsonschema", None)
        assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny"]) == 2
        assert "jsonschema is not installed" in capsys.readouterr().err
