"""`megacpp recipe` as its users call it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megacpp_mcore.cli import main
from megacpp_mcore.recipe import answers_cache, load_recipe
from megacpp_mcore.recipe.check import Report, Row
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.source import shipped

NEEDS_QUOTES = ["attention.kind=gqa", "data.data_path=my data/cpp"]


def recipe(*words):
    return main(["recipe", *words])


def sets(overrides):
    return [word for override in overrides for word in ("--set", override)]


def bash(script, **variables):
    return subprocess.run(
        ["bash", "-euc", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_list(capsys):
    assert recipe("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped()
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("options", [[], ["--all"]])
@pytest.mark.parametrize("name", ["nam56r-quarter", "nam56r-tiny"])
def test_what_show_prints_is_the_recipe(capsys, tmp_path, name, options):
    overrides = ["backends.norm=reference", "launch.environment.A=x y"]
    assert recipe("show", name, *options, *sets(overrides)) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    tomllib.loads(shown.read_text())
    asked = load_recipe(name, overrides)
    assert load_recipe(str(shown)).sha256 == asked.sha256
    assert asked.sha256 in shown.read_text()


def test_show_says_where_a_key_goes_and_comes_from(capsys):
    recipe("show", "nam56r-quarter", "--set", "schedule.seed=7")
    out = capsys.readouterr().out
    assert "# --hidden-size (nam56r.toml)" in out
    assert "# layer plan (nam56r-quarter.toml)" in out
    assert "# --seed (--set schedule.seed=7)" in out


def test_show_json(capsys):
    assert recipe("show", "nam56r", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["sha256"] == load_recipe("nam56r").sha256
    assert shown["flops_per_token"]["training"] == 3 * shown["flops_per_token"]["forward"] > 1e10
    assert shown["active_parameters"] < shown["parameters"] / 2
    assert shown["recipe"]["model"]["hidden_size"] == 3584


def test_args_for_copy_and_paste(capsys):
    assert recipe("args", "nam56r", *sets(NEEDS_QUOTES)) == 0
    out, err = capsys.readouterr()
    printed = bash(f"python3 -c 'import sys, json; print(json.dumps(sys.argv[1:]))' {out}")
    assert json.loads(printed) == lower(load_recipe("nam56r", NEEDS_QUOTES)).argv
    assert "*EME" in err and "my data/cpp" in err and "lines" in err


def test_args_of_a_shipped_recipe_work_in_command_substitution(capsys):
    for name in ("nam56r", "nam56r-quarter", "nam56r-tiny"):
        assert recipe("args", name) == 0
        out, err = capsys.readouterr()
        assert err == "" and out.split() == lower(load_recipe(name)).argv


def test_args_lines_work_in_command_substitution(capsys):
    overrides = ["attention.kind=gqa"]
    assert recipe("args", "nam56r", "--format", "lines", *sets(overrides)) == 0
    out = capsys.readouterr().out
    words = bash("set -f; printf '%s\\n' $(printf %s \"$LINES_OUT\")", LINES_OUT=out)
    assert words.splitlines() == lower(load_recipe("nam56r", overrides)).argv


def test_args_that_carry_the_recipe_to_our_own_module(capsys):
    override = "mamba3.rope_fraction=1.0"  # Megatron has no flag for it
    assert recipe("args", "nam56r", "--with-recipe", "--format", "lines", "--set", override) == 0
    words = capsys.readouterr().out.splitlines()
    ours = ["--megacpp-recipe", "nam56r", "--megacpp-set", override]
    assert words == [*ours, *lower(load_recipe("nam56r", [override])).argv]


@pytest.mark.parametrize(
    "override",
    ["m2rnn.tanh=exact", "backends.m2rnn=reference", "m2rnn.grad_clamp=2.0"],
)
def test_words_that_leave_out_what_was_set_are_not_printed(capsys, override):
    """Our own module would take them for the shipped recipe, and train without it."""
    assert recipe("args", "nam56r", "--set", override) == 2
    out, err = capsys.readouterr()
    assert out == "" and override in err and "--with-recipe" in err and "--env" in err
    for carrier in ("--with-recipe", "--env"):
        assert recipe("args", "nam56r", carrier, "--set", override) == 0
        assert override in capsys.readouterr().out


def test_lines_refuses_a_line_break(capsys):
    assert recipe("args", "nam56r", "--format", "lines", "--set", "data.data_path=a\nb") == 2
    assert "line break" in capsys.readouterr().err


def test_args_json(capsys):
    assert recipe("args", "nam56r", "--format", "json", "--env", *sets(NEEDS_QUOTES)) == 0
    lowered = lower(load_recipe("nam56r", NEEDS_QUOTES))
    assert json.loads(capsys.readouterr().out) == {
        "argv": lowered.argv,
        "environment": lowered.environment,
    }


def test_env_sets_everything_for_a_launch(capsys):
    overrides = [*NEEDS_QUOTES, "launch.environment.NOTE=it's $HOME"]
    assert recipe("args", "nam56r", "--env", *sets(overrides)) == 0
    out = capsys.readouterr().out
    lowered = lower(load_recipe("nam56r", overrides))
    names = json.dumps(list(lowered.environment))
    dump = (
        "import json, os, sys; "
        f"print(json.dumps([sys.argv[1:], {{n: os.environ[n] for n in {names}}}]))"
    )
    script = 'eval "$PRINTED"; "$PYTHON" -c "$DUMP" "${MEGATRON_ARGS[@]}"'
    argv, environment = json.loads(bash(script, PRINTED=out, DUMP=dump, PYTHON=sys.executable))
    assert argv == lowered.argv and environment == lowered.environment


@pytest.mark.slow
def test_check_of_a_good_recipe(capsys):
    assert recipe("check", "nam56r-tiny") == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) <= 2 and said[-1].startswith("nam56r-tiny, Megatron 0.19.2: every value as as")
    assert recipe("check", "nam56r-tiny", "-v") == 0
    out = capsys.readouterr().out
    assert "model.hidden_size" in out and "requested" in out


@pytest.mark.parametrize(
    ("rows", "refused", "words"),
    [
        ((), "AssertionError: no", "nam56r-tiny, Megatron 0.19.2: refused: AssertionError: no"),
        (
            (Row("model.swiglu", "swiglu", True, True), Row("optimizer.lr", "lr", 1.0, 2.0)),
            None,
            "nam56r-tiny, Megatron 0.19.2: 1 of 2 values differ: optimizer.lr",
        ),
    ],
)
def test_check_exits_with_2_for_a_refusal_or_a_difference(
    capsys, monkeypatch, rows, refused, words
):
    report = Report("nam56r-tiny", "0.19.2", rows, refused)
    monkeypatch.setattr("megacpp_mcore.recipe.check.check", lambda recipes, cached: [report])
    assert recipe("check", "nam56r-tiny") == 2
    assert capsys.readouterr().err.strip() == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.num_workers=2"], "data.num_workers is 2; the CPU lane supports 0"),
        (["model.pattern=AEMD"], "(the letter D of model.pattern)"),
        (["backends.norm=triton"], "backend 'triton' is named for surface 'norm'"),
    ],
)
def test_check_refuses_what_would_not_train_before_megatron_is_asked(
    words, said, capsys, monkeypatch
):
    monkeypatch.setattr("megacpp_mcore.recipe.check.check", None)
    assert recipe("check", "nam56r-tiny", *sets(words)) == 2
    assert said in capsys.readouterr().err


def test_check_compares_with_the_dataset_that_is_there(corpus, capsys, monkeypatch):
    monkeypatch.setattr("megacpp_mcore.recipe.check.check", lambda recipes, cached: [])
    there = [f"data.data_path={corpus}", "model.vocab_size=300"]
    assert recipe("check", "nam56r-tiny", *sets([*there, "data.null_tokenizer_eod_id=null"])) == 2
    assert "documents end with token 256, the recipe with 299" in capsys.readouterr().err


def test_a_second_answer_is_the_first_ones(tmp_path, monkeypatch):
    """By the question and what is installed; a damaged file is no answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def ask(questions):
        asked.append([question["argv"] for question in questions])
        return [{"version": "0.19.2", "values": {"argv": q["argv"]}} for q in questions]

    first = answers_cache.through([{"argv": 1}, {"argv": 2}], ask)
    assert answers_cache.through([{"argv": 2}, {"argv": 3}, {"argv": 1}], ask)[0] == first[1]
    assert asked == [[1, 2], [3]]
    monkeypatch.setattr(answers_cache, "_installation", lambda: ["another Megatron"])
    answers_cache.through([{"argv": 1}], ask)
    assert asked[-1] == [1]
    for file in answers_cache.folder().iterdir():
        file.write_text("{")
    answers_cache.through([{"argv": 1}], ask)
    assert len(asked) == 4
    monkeypatch.setattr(answers_cache, "folder", lambda: tmp_path / "file" / "x")
    (tmp_path / "file").touch()
    assert answers_cache.through([{"argv": 1}], ask)[0]["values"] == {"argv": 1}


class TestNew:
    def test_a_new_recipe_extends_and_trains_as_asked(self, tmp_path, capsys):
        path = tmp_path / "mine.toml"
        words = ["schedule.train_iters=60", "backends.norm=reference", "launch.environment.A=b"]
        assert recipe("new", str(path), *sets(words)) == 0
        said = capsys.readouterr().out
        assert f"next: megacpp recipe check {path} && megacpp train {path}\n" in said
        assert load_recipe(str(path)).to_dict() == load_recipe("cpu-base", words).to_dict()
        assert recipe("new", str(path)) == 2 and "exists" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            ["backends.norm=reference", "backends.linear=reference"],
            ["launch.environment.A=b", "launch.environment.B=c", "checkpoint.save_interval=7"],
            ['launch.environment={A = "b", B = "c"}'],
            ["moe.moe_router_dtype=null", "moe.moe_shared_expert_intermediate_size=null"],
            ["schedule.train_iters=60", "schedule.train_iters=70"],
            ["moe.moe_router_dtype=fp64", "moe.moe_router_dtype=null"],
            ["moe.moe_router_dtype=null", "moe.moe_router_dtype=fp64"],
        ],
        ids=" ".join,
    )
    def test_every_set_is_in_the_file(self, words, tmp_path):
        path = tmp_path / "mine.toml"
        assert recipe("new", str(path), *sets(words)) == 0
        assert load_recipe(str(path)).to_dict() == load_recipe("cpu-base", words).to_dict()

    def test_an_entry_of_the_parents_table_is_unset(self, tmp_path):
        path, word = tmp_path / "mine.toml", "launch.environment.NCCL_GRAPH_REGISTER=null"
        assert recipe("new", str(path), "--extends", "nam56r", "--set", word) == 0
        assert load_recipe(str(path)).to_dict() == load_recipe("nam56r", [word]).to_dict()

    @pytest.mark.parametrize("name", shipped())
    def test_each_commented_line_has_the_parents_value(self, name, tmp_path):
        path = tmp_path / "mine.toml"
        assert recipe("new", str(path), "--extends", name) == 0
        head, *lines = path.read_text().split("\n\n", 1)
        keys = "\n".join(lines).replace("# megacpp", "#-").replace("# Comm", "#-")
        path.write_text(head + "\n" + re.sub(r"^# (\w+ = .)", r"\1", keys, flags=re.MULTILINE))
        assert load_recipe(str(path)).to_dict() == load_recipe(name).to_dict()

    def test_what_cannot_be_is_not_written(self, tmp_path, capsys):
        path = tmp_path / "mine.toml"
        assert recipe("new", str(path), "--set", "schedule.train_iters=0") == 2
        assert recipe("new", str(tmp_path / "mine.txt")) == 2
        assert not path.exists() and "ends in .toml" in capsys.readouterr().err


class TestDiff:
    def test_every_key_that_differs(self, capsys):
        assert recipe("diff", "cpu-base", "nam56r-tiny") == 1
        said = capsys.readouterr().out
        assert re.search(r"^model\.depth +4 +12$", said, re.MULTILINE)
        assert re.search(r'^mtp\.pattern +"" +"AE"$', said, re.MULTILINE)
        assert recipe("diff", "nam56r", "nam56r") == 0 and capsys.readouterr().out == "the same\n"

    def test_a_receipt_stands_for_its_recipe(self, capsys):
        receipt = "examples/receipts/h200/run-nam56r-1xh200-graph.json"
        path = str(Path(__file__).parents[2] / receipt)
        assert recipe("diff", path, path, "--json") == 0
        assert json.loads(capsys.readouterr().out) == {}
        assert recipe("diff", "nam56r", path, "--json") == 1
        assert json.loads(capsys.readouterr().out)["schedule.global_batch_size"][0] == 64


@pytest.mark.parametrize(
    "words",
    [
        ["show", "nam57r"],
        ["args", "nam56r", "--set", "model.wide=1"],
        ["check", "nam56r", "--set", "moe.moe_router_topk=17"],
        ["args", "./missing.toml"],
    ],
)
def test_refusals_exit_with_2_and_one_message(capsys, words):
    assert recipe(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("megacpp: ") and "Traceback" not in err


def test_no_torch_is_imported():
    script = (
        "import sys; from megacpp_mcore.cli import main; main(['recipe', 'args', 'nam56r']); "
        "main(['recipe', 'show', 'nam56r']); main(['recipe', 'list']); "
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
