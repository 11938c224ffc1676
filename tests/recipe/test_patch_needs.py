"""Recipes that are wrong without a patch: named, refused, and told by the doctor."""

import pytest

from megacpp_mcore import cli, patching
from megacpp_mcore.recipe import load_recipe, patch_needs
from megacpp_mcore.recipe.patch_needs import MissingPatchError
from megacpp_mcore.stack import Facts, doctor

YARN = ["attention.apply_rope_fusion=true", "attention.rope_type=yarn"]
REPEATED = ["mtp.mtp_num_layers=2", "mtp.pattern=AE", "mtp.mtp_use_repeated_layer=true"]
MEGATRONS = [
    "backends.mla_rope=megatron", "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=4",
]  # fmt: skip
STAGES = [
    "model.pattern=AM|AE", "model.depth=4", "parallel.pipeline_model_parallel_size=2",
    "launch.nproc_per_node=8", "parallel.expert_model_parallel_size=4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "needs"),
    [
        ("nam56r", [], set()),
        ("nam56r-tiny", [], set()),
        ("nam56r", YARN, {"mla-rope-head-mask"}),
        ("nam56r", [*YARN, "model.num_attention_heads=64"], set()),
        ("nam56r", [YARN[0], "model.pattern=EM", "model.depth=2", "mtp.pattern=E"], set()),
        ("nam56r", MEGATRONS, {"mla-k-pos-gradient"}),
        ("nam56r", [*MEGATRONS, "attention.kind=gqa", "attention.num_query_groups=8"], set()),
        ("nam56r", [*MEGATRONS, "backends.mla_rope=auto"], set()),
        ("nam56r", REPEATED, {"mtp-moe-aux-loss"}),
        ("nam56r", [*REPEATED, "mtp.pattern=AM"], set()),
        ("nam56r", [*REPEATED, "mtp.mtp_num_layers=1"], set()),
        ("nam56r", STAGES, {"moe-tracker-layer-count"}),
        ("nam56r", [*STAGES, "moe.moe_aux_loss_coeff=[0.0]"], set()),
    ],
)
def test_what_a_recipe_needs(name, overrides, needs):
    recipe = load_recipe(name, overrides)
    assert set(patch_needs.needed(recipe)) == needs


def test_every_need_is_a_patch_of_the_lane(monkeypatch):
    monkeypatch.setattr(patching, "applied", lambda package: frozenset())
    for overrides in (YARN, MEGATRONS, REPEATED, STAGES):
        (patch,) = patch_needs.needed(load_recipe("nam56r", overrides))
        assert patching.missing([patch]) == (patch,)


def test_a_run_without_a_patch_that_it_needs_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(patching, "applied", lambda package: frozenset())
    sets = [word for override in REPEATED for word in ("--set", override)]
    out = str(tmp_path / "run")
    assert cli.main(["train", "nam56r-tiny", "--out", out, *sets]) == 2
    said = capsys.readouterr().err
    assert "mtp-moe-aux-loss" in said
    assert "megacpp patch apply --only mtp-moe-aux-loss" in said
    assert not (tmp_path / "run").exists()


def test_a_patch_that_is_applied_lets_the_recipe_pass(monkeypatch):
    recipe = load_recipe("nam56r", REPEATED)
    monkeypatch.setattr(patching, "applied", lambda package: frozenset())
    with pytest.raises(MissingPatchError):
        patch_needs.check(recipe)
    monkeypatch.setattr(patching, "applied", lambda package: frozenset({"mtp-moe-aux-loss"}))
    patch_needs.check(recipe)


def test_the_doctor_fails_on_a_missing_patch():
    facts = Facts(python=(3, 12, 1), versions={}, programs={}, lane=())
    found = {c.name: c for c in doctor.examine(facts, {"mtp-moe-aux-loss": "wrong gradients"})}
    check = found["recipe-patches"]
    assert (check.status, check.remedy) == (
        "fail", "megacpp patch apply --only mtp-moe-aux-loss"
    )  # fmt: skip
    assert "wrong gradients" in check.found
    assert {c.name: c.status for c in doctor.examine(facts, {})}["recipe-patches"] == "ok"
