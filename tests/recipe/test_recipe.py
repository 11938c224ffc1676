"""Loading recipes: files, extends, unset, --set, the environment, the hash."""

import json
import pickle
import shlex

import pytest

from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings
from megacpp_mcore.recipe import (
    ENVIRONMENT_VARIABLE,
    load_recipe,
    recipe_from_environment,
)
from megacpp_mcore.recipe.source import RecipeError, shipped

NAMES = ("cpu-base", "nam56r", "nam56r-quarter", "nam56r-tiny")


@pytest.fixture
def write(tmp_path):
    """Write a recipe file; returns its path."""

    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refusal(name, *overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe(name, overrides)
    return str(error.value)


def test_the_shipped_recipes():
    assert tuple(shipped()) == NAMES


def test_nam56r_is_the_published_shape():
    r = load_recipe("nam56r")
    assert r.plan.counts["source"] == {"A": 13, "M": 13, "E": 22, "R": 4, "D": 0}
    assert (r.model.hidden_size, r.model.ffn_hidden_size) == (3584, 18944)
    assert (r.model.vocab_size, r.model.seq_length, r.model.rotary_base) == (65536, 4096, 500_000)
    assert (r.model.num_attention_heads, r.attention.num_query_groups) == (56, 8)
    a = r.attention
    assert (a.q_lora_rank, a.kv_lora_rank) == (64, 64)
    assert (a.qk_head_dim, a.qk_pos_emb_head_dim, a.v_head_dim) == (64, 64, 64)
    assert (r.moe.num_experts, r.moe.moe_router_topk, r.moe.moe_ffn_hidden_size) == (16, 4, 896)
    assert r.moe.moe_shared_expert_intermediate_size == 1024
    assert (r.moe.moe_router_score_function, r.moe.moe_router_enable_expert_bias) == (
        "sigmoid",
        True,
    )
    assert r.moe.moe_aux_loss_coeff == (1e-4,)
    m = r.mamba3
    assert (m.mamba_num_heads, m.mamba_head_dim) == (56, 64)
    assert (m.mamba_state_dim, m.mamba_num_groups) == (64, 8)
    assert (r.m2rnn.k_head_dim, r.m2rnn.v_head_dim) == (64, 16)
    assert (r.world_size, r.data_parallel_size) == (8, 8)
    assert r.parallel.expert_model_parallel_size == 1 and r.precision.bf16


def test_quarter_is_nam56r_at_13_layers():
    full, quarter = load_recipe("nam56r").to_dict(), load_recipe("nam56r-quarter").to_dict()
    assert quarter["model"].pop("depth") == 13
    full["model"].pop("depth")
    for section in ("model", "attention", "moe", "mamba3", "m2rnn", "mtp", "parallel", "precision"):
        assert quarter[section] == full[section]


def test_tiny_has_every_letter_and_mtp_on_the_cpu():
    r = load_recipe("nam56r-tiny")
    assert r.plan.source_pattern == "AEMEAEMEAEMR" and r.plan.mtp.depths == 1
    assert r.launch.device == "cpu" and not r.precision.bf16


def test_layers_get_their_settings_classes():
    r = load_recipe("nam56r-tiny")
    assert isinstance(r.mamba3, Mamba3Settings) and isinstance(r.m2rnn, M2RNNSettings)


def test_a_file_extends_another(write):
    write('extends = "nam56r-tiny"\n[model]\nhidden_size = 64\n', "base.toml")
    child = write('extends = "base.toml"\n[moe]\nmoe_router_topk = 1\n', "child.toml")
    r = load_recipe(child)
    assert (r.model.hidden_size, r.moe.moe_router_topk) == (64, 1)
    assert r.model.depth == 12 and r.name == "child"
    assert r.origins["model.hidden_size"].endswith("base.toml")
    assert r.origins["moe.moe_router_topk"] == child


def test_what_is_recomputed_is_a_table_of_words(write):
    mine = write(
        'extends = "nam56r"\n[recompute]\nmoe = "experts"\nmamba3 = "mixer"\n'
        'attention = ["up_proj", "core_attn"]\n'
    )
    asked = load_recipe(mine).recompute
    assert (asked.moe, asked.mamba3, asked.m2rnn) == (("experts",), "mixer", None)
    assert asked.megatron_modules == ("core_attn", "mla_up_proj")
    known = "expected a list, each one of 'act', 'experts', 'shared_experts', 'layer'"
    assert known in refusal("nam56r", "recompute.moe=all")
    assert "one of 'core', 'mixer'" in refusal("nam56r", "recompute.m2rnn=layer")
    assert "[recompute] knows attention, moe, mamba3" in refusal("nam56r", "recompute.mla=up_proj")


def test_extends_in_a_circle_is_refused(write, tmp_path):
    write('extends = "b.toml"\n', "a.toml")
    write('extends = "a.toml"\n', "b.toml")
    assert "circle" in refusal(write('extends = "a.toml"\n'))
    mine = write('extends = "x/../mine.toml"\n')
    (tmp_path / "x").mkdir()
    assert "circle" in refusal(mine)


def test_unset_goes_back_to_the_default(write):
    key = "moe.moe_shared_expert_intermediate_size"
    mine = write(f'extends = "nam56r-tiny"\nunset = ["{key}", "optimizer.weight_decay"]\n')
    r = load_recipe(mine)
    assert r.moe.moe_shared_expert_intermediate_size is None and r.optimizer.weight_decay == 0.01
    assert load_recipe("nam56r-tiny", [f"{key}=null"]).get(key) is None


def test_unsetting_a_required_key_is_refused():
    assert "missing keys, without a default: model.hidden_size" in refusal(
        "nam56r", "model.hidden_size=null"
    )


def test_tables_merge_entry_by_entry(write):
    mine = write(
        'extends = "nam56r"\nunset = ["launch.environment.NCCL_GRAPH_REGISTER"]\n'
        '[launch.environment]\nNVTE_DEBUG = "1"\n[backends]\nnorm = "reference"\n'
    )
    table = 'launch.environment={NCCL_DEBUG = "INFO"}'
    r = load_recipe(mine, ["launch.environment.NVTE_DEBUG=2", "backends.m2rnn=auto", table])
    assert r.launch.environment["NVTE_DEBUG"] == "2"
    assert r.launch.environment["NCCL_DEBUG"] == "INFO"
    assert r.launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "NCCL_GRAPH_REGISTER" not in r.launch.environment
    assert r.backends == {"norm": "reference", "m2rnn": "auto", "moe_dispatch": "auto"}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.adam_eps=1e-4", 1e-4),
        ("optimizer.adam_eps=0.0001", 1e-4),
        ("optimizer.lr=1", 1.0),
        ("model.rotary_base=500_000", 500_000),
        ("model.swiglu=false", False),
        ("data.split=90,10,0", "90,10,0"),
        ('data.split="90,10,0"', "90,10,0"),
        ("data.data_path=corpus/cpp", ("corpus/cpp",)),
        ('data.data_path=["0.3", "a", "0.7", "b"]', ("0.3", "a", "0.7", "b")),
        ("data.data_path=123", ("123",)),
        ("moe.moe_aux_loss_coeff=1e-3", (1e-3,)),
        (" mamba3.chunk_size = 16 ", 16),
    ],
)
def test_set_reads_values_by_the_type_of_the_key(override, value):
    got = load_recipe("nam56r-tiny", [override]).get(override.partition("=")[0].strip())
    assert got == value and type(got) is type(value)


def test_the_last_override_wins():
    r = load_recipe("nam56r-tiny", ["schedule.seed=1", "schedule.seed=2"])
    assert r.schedule.seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hiden_size=1", ["unknown key 'model.hiden_size'", "model.hidden_size", "[model]"]),
        ("model.num_experts=1", ["did you mean moe.num_experts"]),
        ("modle.depth=1", ["unknown key", "did you mean model.depth"]),
        ("hidden_size=1", ["unknown key", "SECTION.NAME"]),
        ("model.hidden_size", ["expected SECTION.KEY=VALUE"]),
        ("model.hidden_size=wide", ["'wide'", "expected an integer"]),
        ("model.hidden_size=96.0", ["expected an integer"]),
        ("model.hidden_size=true", ["expected an integer"]),
        ("model.swiglu=1", ["expected true or false"]),
        ("optimizer.lr=nan", ["expected a number"]),
        ("optimizer.lr=inf", ["expected a number"]),
        ("attention.kind=mqa", ["'mqa'", "one of 'mla', 'gqa', 'dsa'"]),
        ("attention.dsa_ranks=[1, true]", ["expected a list, each an integer"]),
        ("launch.environment=1", ["expected a table of strings"]),
        ("backends.warp=auto", ["unknown surface 'warp'"]),
        ("backends.norm=apex", ["unknown backend 'apex' of surface 'norm'"]),
        ("data.data_path=[1]", ["expected a list, each a string"]),
        ("data.data_path=[a, b]", ["not TOML"]),
        ('data.split="98,1', ["not TOML"]),
    ],
)
def test_a_bad_override_names_itself_and_what_is_allowed(override, words):
    message = refusal("nam56r-tiny", override)
    for word in [f"--set {override}", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modle]\n", ["unknown section [modle]", "did you mean model", "backends"]),
        ("[model]\nhiden_size = 1\n", ["unknown key 'model.hiden_size'", "model.hidden_size"]),
        ('[model]\nhidden_size = "96"\n', ["model.hidden_size = '96'", "expected an integer"]),
        ("[model.hidden_size]\nx = 1\n", ["model.hidden_size = {'x': 1}", "an integer"]),
        ("model = 3\n", ["model = 3", "[model]"]),
        ("extends = 3\n", ["extends = 3", "expected a string"]),
        ('extends = "nam57r"\n', ["unknown recipe 'nam57r'", "nam56r"]),
        ('unset = ["model.wide"]\n', ["unset", "unknown key 'model.wide'"]),
        ('[backends]\nwarp = "auto"\n', ["unknown surface 'warp'"]),
        ("[backends]\nnorm = 1\n", ["backends.norm = 1", "expected a string"]),
        ("[launch.environment]\nA = 1\n", ["launch.environment.A = 1", "expected a string"]),
        ("[model\n", ["not TOML"]),
        ("[model]\ndepth = 1\ndepth = 2\n", ["not TOML"]),
    ],
)
def test_a_bad_file_names_itself_and_what_is_allowed(write, text, words):
    path = write(text)
    message = refusal(path)
    for word in words:
        assert word in message
    assert path in message or "nam57r" in text


def test_missing_keys_are_all_named(write):
    message = refusal(write('[model]\npattern = "AE"\n'))
    for key in ("model.depth", "model.hidden_size", "optimizer.lr", "schedule.train_iters"):
        assert key in message


@pytest.mark.parametrize("name", ["nam56", "", "no/such.toml", "no-such.toml", "/"])
def test_a_recipe_that_is_not_there(name):
    assert name in refusal(name)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in refusal(str(path))


def test_a_pattern_without_a_plan_names_the_keys_of_the_plan():
    message = refusal("nam56r", "model.pattern=AEXE")
    assert "model.pattern = 'AEXE' (--set model.pattern=AEXE)" in message
    assert "model.depth = 52 (" in message and "position 3" in message
    message = refusal("nam56r", "parallel.pipeline_model_parallel_size=3")
    assert "parallel.pipeline_model_parallel_size = 3" in message and "evenly" in message


def test_max_position_embeddings_follows_seq_length():
    r = load_recipe("nam56r", ["model.seq_length=8192"])
    assert r.model.max_position_embeddings == 8192
    r = load_recipe("nam56r", ["model.max_position_embeddings=16384"])
    assert r.model.max_position_embeddings == 16384


def test_the_hash_is_of_the_content(write):
    tiny = load_recipe("nam56r-tiny")
    same = load_recipe(write('extends = "nam56r-tiny"\n'))
    assert same.sha256 == tiny.sha256 and same.name != tiny.name
    for override in ("optimizer.lr=1", "m2rnn.chunk_size=8", "backends.norm=reference"):
        assert load_recipe("nam56r-tiny", [override]).sha256 != tiny.sha256
    forms = [load_recipe("nam56r", [f"optimizer.lr={lr}"]).sha256 for lr in ("1e-4", "0.0001")]
    assert forms[0] == forms[1]


def test_the_hash_does_not_depend_on_the_order_of_keys(write):
    a = write('extends = "nam56r"\n[moe]\nnum_experts = 32\nmoe_router_topk = 2\n', "a.toml")
    b = write('extends = "nam56r"\n[moe]\nmoe_router_topk = 2\nnum_experts = 32\n', "b.toml")
    c = write('extends = "nam56r"\n[backends]\nnorm = "te"\nm2rnn = "auto"\n', "c.toml")
    d = write('extends = "nam56r"\n[backends]\nm2rnn = "auto"\nnorm = "te"\n', "d.toml")
    assert load_recipe(a).sha256 == load_recipe(b).sha256
    assert load_recipe(c).sha256 == load_recipe(d).sha256


def test_to_dict_is_json_and_complete():
    content = load_recipe("nam56r").to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["model"]["hidden_size"] == 3584 and content["m2rnn"]["num_heads"] is None


def test_a_recipe_can_be_pickled():
    r = load_recipe("nam56r-tiny", ["backends.norm=reference"])
    assert pickle.loads(pickle.dumps(r)) == r


def test_no_environment_no_recipe(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert recipe_from_environment() is None


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mamba3.variant=mimo", "mamba3.chunk_size=16"],
        ['data.data_path=["a b", "c\'d"]', "data.split=90, 10"],
    ],
)
def test_a_request_survives_the_environment(monkeypatch, overrides):
    recipe = load_recipe("nam56r-tiny", overrides)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, recipe.request)
    again = recipe_from_environment()
    assert again == recipe and again.sha256 == recipe.sha256


def test_a_path_survives_a_change_of_folder(monkeypatch, write, tmp_path):
    write('extends = "nam56r-tiny"\n', "my recipe.toml")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("my recipe.toml", ["schedule.seed=7"])
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, recipe.request)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert recipe_from_environment() == recipe


@pytest.mark.parametrize("form", ["--set schedule.seed=7", "--set=schedule.seed=7"])
def test_the_environment_has_the_command_line_syntax(monkeypatch, form):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"  nam56r-tiny {form} ")
    assert recipe_from_environment().schedule.seed == 7


@pytest.mark.parametrize(
    "text", ["nam56r --sett a=b", "nam56r --set", "nam56r x", "nam56r --set 'a", "--set a=b"]
)
def test_other_words_in_the_environment_are_refused(monkeypatch, text):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    with pytest.raises(RecipeError) as error:
        recipe_from_environment()
    assert ENVIRONMENT_VARIABLE in str(error.value) or shlex.split(text)[0] in str(error.value)


def test_sizes_that_follow_from_several_keys():
    common = (
        "launch.nproc_per_node=8", "launch.nnodes=3", "schedule.global_batch_size=96",
        "model.vocab_size=65000", "model.make_vocab_size_divisible_by=96",
    )  # fmt: skip

    def sizes(tp=1, pp=1):
        layout = f"tensor_model_parallel_size={tp}", f"pipeline_model_parallel_size={pp}"
        words = [*common, *(f"parallel.{word}" for word in layout)]
        words += ["parallel.sequence_parallel=true"] if tp > 1 else []
        recipe = load_recipe("nam56r", words)
        return recipe.padded_vocab_size, recipe.data_parallel_size

    assert sizes() == (65088, 24)  # 678 x 96
    assert sizes(tp=2) == (65088, 12)  # 339 x 192
    assert sizes(tp=4) == (65280, 6)  # 170 x 384
    assert sizes(pp=2) == (65088, 12)
    assert sizes(tp=2, pp=2) == (65088, 6)


def test_where_values_come_from_makes_no_other_recipe(write):
    named = load_recipe(write('extends = "nam56r"'))
    told = load_recipe(write('extends = "nam56r"\n[optimizer]\nweight_decay = 0.1'))
    assert named == told and named.origins != told.origins
