"""Lowering: every key goes somewhere, every word reaches Megatron as it was meant."""

import dataclasses
import shlex

import pytest

from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings, RecomputeSettings
from megacpp_mcore.recipe import load_recipe, recipe_from_environment
from megacpp_mcore.recipe.fields import Flag, Target
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.schema import SECTIONS
from megacpp_mcore.recipe.source import KEYS


def argv(name="nam56r", *overrides):
    return lower(load_recipe(name, overrides)).argv


def after(words, flag):
    """The words behind a flag, up to the next flag."""
    start = words.index(flag) + 1
    rest = [i for i in range(start, len(words)) if words[i].startswith("--")]
    return words[start : rest[0] if rest else len(words)]


def test_no_key_lowers_to_nothing():
    fields = {f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    assert fields == set(KEYS)
    assert [key.dotted for key in KEYS.values() if key.lowers_to is None] == []


def test_a_bool_is_a_switch_and_nothing_else_is():
    for key in KEYS.values():
        if isinstance(key.lowers_to, Flag):
            is_bool = key.hint in (bool, bool | None)
            assert (key.lowers_to.given_when is not None) == is_bool, key.dotted


def test_the_schema_has_the_layers_settings_and_no_copies():
    for section, settings, target in (
        ("mamba3", Mamba3Settings, Target.PLUGIN),
        ("m2rnn", M2RNNSettings, Target.PLUGIN),
        ("recompute", RecomputeSettings, Target.RECOMPUTE),
    ):
        assert issubclass(SECTIONS[section], settings)
        own = vars(SECTIONS[section]).get("__annotations__", {})
        names = {f.name for f in dataclasses.fields(settings)}
        assert SECTIONS[section] is settings or not names & set(own)
        for name in names:
            assert KEYS[f"{section}.{name}"].lowers_to is target


@pytest.mark.parametrize("name", ["nam56r", "nam56r-quarter", "nam56r-tiny"])
def test_every_stated_key_is_on_the_command_line(name):
    recipe = load_recipe(name)
    words = lower(recipe).argv
    for dotted in recipe.origins:
        key = KEYS.get(dotted)
        if key is None or not isinstance(key.lowers_to, Flag):
            continue
        value, given_when = recipe.get(dotted), key.lowers_to.given_when
        if given_when is not None:
            assert (key.flag in words) == (value == given_when), dotted
        else:
            expected = value if isinstance(value, tuple) else (value,)
            assert after(words, key.flag) == [str(item) for item in expected], dotted


@pytest.mark.parametrize(
    "override",
    ["model.pattern=AEMEAEMEAERM", "model.depth=24", "attention.kind=gqa", "mtp.pattern=E",
     "mtp.mtp_num_layers=2"],
)  # fmt: skip
def test_plan_keys_change_the_pattern(override):
    before, later = argv("nam56r-tiny"), argv("nam56r-tiny", override)
    assert after(before, "--hybrid-layer-pattern") != after(later, "--hybrid-layer-pattern")


def test_plan_keys_of_pipelines_and_dsa_change_the_pattern():
    cut = ["model.depth=48", "parallel.pipeline_model_parallel_size=2",
           "parallel.expert_model_parallel_size=4"]  # fmt: skip
    [flat] = after(argv("nam56r", *cut), "--hybrid-layer-pattern")
    vpp = "parallel.virtual_pipeline_model_parallel_size=2"
    [interleaved] = after(argv("nam56r", *cut, vpp), "--hybrid-layer-pattern")
    assert (flat.count("|"), interleaved.count("|")) == (1, 3)
    dsa = ["attention.dsa_ranks=[2]", *(f"attention.dsa_indexer_{k}" for k in (
        "n_heads=16", "head_dim=64", "topk=256", "loss_coeff=0.001"))]  # fmt: skip
    [mixed] = after(argv("nam56r", *dsa), "--hybrid-layer-pattern")
    assert mixed.startswith("+EMEDEME+EMG") and mixed.count("D") == 1


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("launch.nnodes", "launch.nnodes=2"),
        ("launch.nproc_per_node", "launch.nproc_per_node=16"),
        ("launch.environment", "launch.environment.NCCL_DEBUG=INFO"),
    ],
)
def test_environment_keys_change_the_environment(key, override):
    assert KEYS[key].lowers_to is Target.ENVIRONMENT
    before, later = (lower(load_recipe("nam56r", o)).environment for o in ([], [override]))
    added = {name for name in later if before.get(name) != later[name]} - {"MEGACPP_RECIPE"}
    assert len(added) == 1


def test_the_environment_keys_above_are_all():
    names = {key.dotted for key in KEYS.values() if key.lowers_to is Target.ENVIRONMENT}
    assert names == {"launch.nnodes", "launch.nproc_per_node", "launch.environment"}


def test_plugin_keys_reach_the_layers_through_the_environment(monkeypatch):
    plugin = [key for key in KEYS.values() if key.lowers_to is Target.PLUGIN]
    for key in plugin:
        before = load_recipe("nam56r-tiny").get(key.dotted)
        match before:
            case "siso" | "softplus" | "approximate":
                others = {"siso": "mimo", "softplus": "rational", "approximate": "exact"}
                value = others[before]
            case "cpu":
                continue  # the other device is another recipe
            case None if key.name.endswith("sha256"):
                value = "e0" * 32
            case None:
                value = 8
            case bool():
                value = not before
            case float():
                value = before / 2
            case int():
                value = before * 2
        recipe = load_recipe("nam56r-tiny", [f"{key.dotted}={str(value).lower()}"])
        monkeypatch.setenv("MEGACPP_RECIPE", lower(recipe).environment["MEGACPP_RECIPE"])
        assert recipe_from_environment().get(key.dotted) == value != before


def test_what_our_layers_make_again_reaches_them_through_the_environment(monkeypatch):
    ours = ["recompute.moe=experts", "recompute.mamba3=core", "recompute.m2rnn=mixer"]
    recipe = load_recipe("nam56r-tiny", ours)
    assert lower(recipe).argv == argv("nam56r-tiny")
    monkeypatch.setenv("MEGACPP_RECIPE", lower(recipe).environment["MEGACPP_RECIPE"])
    asked = recipe_from_environment().recompute
    assert asked == RecomputeSettings(moe=("experts",), mamba3="core", m2rnn="mixer")


def test_what_megatron_makes_again_stands_on_its_command_line():
    assert "--recompute-granularity" not in argv()
    overrides = [
        'recompute.attention=["core_attn", "up_proj"]', 'recompute.moe=["act", "shared_experts"]',
        "recompute.layernorm=true", "recompute.mamba3=core",
    ]  # fmt: skip
    words = argv("nam56r", *overrides)
    assert after(words, "--recompute-granularity") == ["selective"]
    modules = ["core_attn", "mla_up_proj", "moe_act", "shared_experts", "layernorm"]
    assert after(words, "--recompute-modules") == modules
    assert after(argv("nam56r", "recompute.moe=layer"), "--recompute-modules") == ["moe"]


def test_backends_reach_the_layers_through_the_environment(monkeypatch):
    recipe = load_recipe("nam56r-tiny", ["backends.norm=reference"])
    monkeypatch.setenv("MEGACPP_RECIPE", lower(recipe).environment["MEGACPP_RECIPE"])
    backends = recipe_from_environment().backends
    assert backends == recipe.backends and backends["norm"] == "reference"


def test_the_spec_is_ours():
    spec = after(argv(), "--spec")
    assert spec == ["megacpp_mcore.specs.nam56r", "nam56r_stack_spec"]
    assert after(argv("nam56r", "model.pattern=AE"), "--spec") == spec


def test_deltanet_never_gets_the_spec_that_puts_m2rnn_in_its_slot():
    for pattern in ("AEMEAEMEAEMD", "AED"):
        spec = after(argv("nam56r", f"model.pattern={pattern}"), "--spec")
        assert spec == ["megacpp_mcore.specs.nam56r", "nam56r_deltanet_stack_spec"]


def test_gqa_and_mla_are_told_apart():
    gqa = argv("nam56r", "attention.kind=gqa")
    assert "--group-query-attention" in gqa and "--multi-latent-attention" not in gqa
    assert after(gqa, "--num-query-groups") == ["8"]
    mla = argv()
    assert "--group-query-attention" not in mla and "--multi-latent-attention" in mla


@pytest.mark.parametrize(
    ("form", "word"), [("1e-4", "0.0001"), ("0.0001", "0.0001"), ("1e-5", "1e-05"), ("1", "1.0")]
)
def test_numbers_keep_their_value(form, word):
    [lowered] = after(argv("nam56r-tiny", f"moe.moe_aux_loss_coeff=[{form}]"),
                      "--moe-aux-loss-coeff")  # fmt: skip
    assert lowered == word and float(lowered) == float(form)


def test_integers_stay_integers():
    assert after(argv(), "--rotary-base") == ["500000"]


def test_asynchronous_saves_are_by_megatrons_own_worker():
    """Its default strategy needs nvidia-resiliency-ext, which is no dependency of ours."""
    asked = ["checkpoint.async_save=true", "checkpoint.use_persistent_ckpt_worker=true",
             "checkpoint.save=saved", "checkpoint.save_interval=5"]  # fmt: skip
    assert after(argv("nam56r", *asked), "--async-strategy") == ["mcore"]
    assert "--async-strategy" not in argv()


def test_what_is_left_out_is_left_to_megatron():
    words = argv()
    for flag in ("--lion-beta1", "--fp8-recipe", "--dsa-indexer-topk-freq", "--kv-channels"):
        assert flag not in words


def test_no_word_of_the_shipped_recipes_needs_quotes():
    for name in ("nam56r", "nam56r-quarter", "nam56r-tiny"):
        words = argv(name)
        assert shlex.join(words) == " ".join(words)


def test_torchrun_takes_the_world_from_the_environment(monkeypatch):
    from torch.distributed.run import get_args_parser

    for name, value in lower(load_recipe("nam56r", ["launch.nnodes=2"])).environment.items():
        monkeypatch.setenv(name, value)
    args = get_args_parser().parse_args(["pretrain_hybrid.py"])
    assert (args.nnodes, args.nproc_per_node) == ("2", "8")
