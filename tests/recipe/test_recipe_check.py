"""Recipes against Megatron's real parser and validation."""

import argparse
import dataclasses
import subprocess
import typing

import pytest
import warm

from megacpp_mcore.recipe import check as recipe_check
from megacpp_mcore.recipe import load_recipe, lowering
from megacpp_mcore.recipe.fields import Flag
from megacpp_mcore.recipe.rules import cuda_graphs
from megacpp_mcore.recipe.schema import SECTIONS
from megacpp_mcore.recipe.source import KEYS

pytestmark = pytest.mark.slow  # Megatron parses every recipe once

TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
       "parallel.expert_model_parallel_size=4"]  # fmt: skip
CUTS = "AEMEAEMEAEMRAEMEAEMEAEMRAE|MEAEMEAEMRAEMEAEMEAEMRAEME"
RECIPES = {
    "nam56r": ("nam56r", []),
    "quarter": ("nam56r-quarter", []),
    "tiny": ("nam56r-tiny", []),
    "TP 2, SP, EP 4": ("nam56r", TP2),
    "PP 2 by cuts": ("nam56r", [f"model.pattern={CUTS}", "parallel.pipeline_model_parallel_size=2",
                                "parallel.expert_model_parallel_size=4"]),
    "PP 2 x VPP 2": ("nam56r", [
        "model.depth=48", "parallel.pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2", "parallel.overlap_p2p_comm=true",
        "parallel.expert_model_parallel_size=4"]),
    "CP 2": ("nam56r", ["model.pattern=AE", "parallel.context_parallel_size=2",
                        "parallel.expert_model_parallel_size=4"]),
    "fp8": ("nam56r", ["precision.fp8=hybrid", "precision.fp8_recipe=tensorwise",
                       "mamba3.mamba_num_heads=64", "m2rnn.num_heads=48",
                       "precision.first_last_layers_bf16=true"]),
    "DSA, recompute": ("nam56r", [
        "attention.dsa_ranks=[5, 9, 13]", "attention.dsa_indexer_n_heads=16",
        "attention.dsa_indexer_head_dim=64", "attention.dsa_indexer_topk=256",
        "attention.dsa_indexer_loss_coeff=1e-3", "recompute.moe=act",
        "recompute.attention=up_proj"]),
    "GQA, Muon, MTP 2": ("nam56r", [
        "attention.kind=gqa", "attention.apply_rope_fusion=true", "optimizer.optimizer=muon",
        "mtp.mtp_num_layers=2", "mtp.mtp_use_repeated_layer=true"]),
    "flex, graphs, low precision Adam": ("nam56r", [
        "parallel.expert_model_parallel_size=8", "moe.moe_token_dispatcher_type=flex",
        "launch.cuda_graph_impl=transformer_engine",
        'launch.cuda_graph_modules=["attn", "mamba"]', "optimizer.exp_avg_dtype=bf16",
        "optimizer.use_precision_aware_optimizer=true", "optimizer.main_grads_dtype=bf16"]),
}  # fmt: skip
REFUSED = ("nam56r", ["data.tokenizer_type=TikTokenizer", "data.tokenizer_model=/no/such/file"])


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One report a recipe; "doctored" has other words on its command line than it asks for."""
    doctored = tmp_path_factory.mktemp("recipes") / "doctored.toml"
    doctored.write_text('extends = "nam56r-tiny"\n')

    def lower(recipe):
        lowered = lowering.lower(recipe)
        if recipe.name == "doctored":
            lowered.argv[lowered.argv.index("--hidden-size") + 1] = "128"
            lowered.argv.remove("--swiglu")
        return lowered

    asked = {**RECIPES, "refused": REFUSED, "doctored": (str(doctored), [])}
    with pytest.MonkeyPatch.context() as patch, warm.as_sys_executable():
        patch.setattr(recipe_check, "lower", lower)
        answers = recipe_check.check([load_recipe(*item) for item in asked.values()])
    return dict(zip(asked, answers, strict=True))


@pytest.fixture(scope="module")
def actions():
    """Megatron's parser: flag -> argparse action."""
    from megacpp_mcore.stack import bridges

    bridges.before_megatron()
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {flag: action for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_gets_every_value_as_asked(reports, name):
    report = reports[name]
    assert report.refused is None
    assert report.differences == [] and report.ok


def test_the_comparison_covers_the_keys_with_a_value(reports):
    recipe = load_recipe("nam56r")
    flags = {key.dotted for key in KEYS.values() if isinstance(key.lowers_to, Flag)}
    valued = {dotted for dotted in flags if recipe.get(dotted) is not None}
    compared = {row.key for row in reports["nam56r"].rows}
    assert valued <= compared
    assert {"model.pattern", "model.depth", "attention.kind", "mtp.mtp_num_layers"} <= compared


def test_megatron_is_the_pinned_one(reports):
    assert {report.megatron_version for report in reports.values()} == {"0.19.2"}


def test_megatrons_refusal_is_told_in_its_own_words(reports):
    report = reports["refused"]
    assert not report.ok and report.rows == () and "/no/such/file" in report.refused


def test_a_new_process_answers_the_same_without_most_imports(reports, monkeypatch):
    """`reports` come from a process that has imported all of Megatron."""
    done, run = [], subprocess.run

    def kept(*words, **options):
        done.append(run(*words, **options))
        return done[-1]

    monkeypatch.setattr(recipe_check.subprocess, "run", kept)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    asked = {**RECIPES, "refused": REFUSED}
    found = recipe_check.check([load_recipe(*item) for item in asked.values()])
    assert found == [reports[name] for name in asked]
    lines = done[0].stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "megatron.training.arguments" in imported
    assert not imported & {"sympy", "setuptools", "torch._inductor", "torch._dynamo"}


def test_a_difference_is_found(reports):
    report = reports["doctored"]
    assert not report.ok
    assert [(row.key, row.requested, row.got) for row in report.differences] == [
        ("model.hidden_size", 96, 128),
        ("model.swiglu", True, False),
    ]


def test_every_flag_is_megatrons_and_means_the_same(actions):
    for key in KEYS.values():
        if not isinstance(key.lowers_to, Flag):
            continue
        action = actions[key.flag]
        assert action.dest == key.name, key.dotted
        if key.lowers_to.given_when is None:
            assert action.nargs != 0, key.dotted
        else:
            assert action.const is key.lowers_to.given_when, key.dotted


def test_defaults_are_megatrons(actions):
    compared = 0
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            key = KEYS[f"{section}.{field.name}"]
            # None is "not given": Megatron's own default, whatever it is
            if not isinstance(key.lowers_to, Flag) or field.default in (dataclasses.MISSING, None):
                continue
            ours, theirs = field.default, actions[key.flag].default
            if isinstance(theirs, list):
                ours = list(ours)
            elif isinstance(ours, tuple):
                [ours] = ours
            assert ours == getattr(theirs, "name", theirs), key.dotted
            compared += 1
    assert compared > 100


def test_choices_are_megatrons(actions):
    for key in KEYS.values():
        if not isinstance(key.lowers_to, Flag) or actions[key.flag].choices is None:
            continue
        theirs = {getattr(choice, "name", choice) for choice in actions[key.flag].choices}
        for member in typing.get_args(key.hint) or ():
            for choice in typing.get_args(member) or (member,):
                if isinstance(choice, str) and choice != cuda_graphs.AUTO:
                    assert choice in theirs, key.dotted
