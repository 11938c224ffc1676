"""What holds for every command: two examples in its help that parse, exit codes that are told,
JSON wherever a table is printed, and completion."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import receipt_samples as samples

from megacpp_mcore import __version__, cli
from megacpp_mcore.commands import train
from megacpp_mcore.commands.completion import candidates
from megacpp_mcore.commands.examples import lines, walk
from megacpp_mcore.receipts import write

PARSER = cli.build_parser()
COMMANDS = dict(walk(PARSER))
LEAVES = {name: parser for name, parser in COMMANDS.items() if not dict(walk(parser))}


def groups() -> set[str]:
    """Commands that only have commands."""
    return set(COMMANDS) - set(LEAVES)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_two_examples_that_parse(name):
    found = lines(COMMANDS[name])
    own = [line for line in found if f"{line} ".startswith(f"megacpp {name} ")]
    assert len(own) >= 2 or name in ("completion", *groups()), "commands/examples.py"
    assert len(found) >= 2 or name == "completion"
    for line in found:
        words = shlex.split(line.partition("  #")[0], comments=True)
        words = words[: words.index("&&")] if "&&" in words else words
        try:
            cli.build_parser().parse_args(words[1:])
        except SystemExit:
            pytest.fail(f"it does not parse: {line}")


def test_version_and_exit_status_are_told(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"megacpp {__version__}\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "exit status: 0 done; 1 failed" in capsys.readouterr().out


# Commands that print no table: what they write, or a command line, or text that is streamed.
NO_TABLE = {"recipe new", "recipe args", "data tokenizer", "patch new", "cuda wheels",
            "patch export", "completion", "export", "import"}  # fmt: skip


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["cuda", "wheels", "--out", str(tmp_path / "file"), "--archs", "90"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == f"megacpp: {tmp_path / 'file'}: File exists\n"


def test_every_command_that_prints_a_table_has_json():
    without = {n for n, p in LEAVES.items() if "--json" not in p._option_string_actions}
    assert without <= NO_TABLE | {n for n in LEAVES if "html" in n or "watch" in n}


def test_json_of_recipes_datasets_and_comparisons(capsys, corpus, tmp_path):
    def said(*words):
        assert cli.main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert {row["name"] for row in said("recipe", "list")} >= {"cpu-base", "nam56r"}
    (tmp_path / "a.cpp").write_text("int x;\n")
    built = said("data", "build", tmp_path / "a.cpp", "--out", tmp_path / "d")
    assert built == json.loads((tmp_path / "d.json").read_text()) and built["tokens"] == 8
    receipt = samples.train(tmp_path / "run.json", 4)
    train._report(receipt, tmp_path, verbose=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == receipt
    checked = said("data", "check", corpus)
    assert checked["unchanged"] and checked["tokens"] == checked["manifest"]["tokens"]
    write(tmp_path / "a.json", samples.bench(te=0.9))
    write(tmp_path / "b.json", samples.bench(te=0.45))
    assert said("report", "show", tmp_path / "a.json")["kind"] == "bench"
    rows = said("report", "compare", tmp_path / "a.json", tmp_path / "b.json")["rows"]
    (te,) = [r for r in rows if (r["backend"], r["phase"]) == ("te", "forward")]
    assert te["verdict"] == "keep" and 0.45 < te["time"]["value"] < 0.55


@pytest.mark.parametrize(
    ("words", "some", "not_these"),
    [
        ([""], {"train", "recipe", "checkpoint"}, {"show"}),
        (["rec"], {"recipe"}, {"train"}),
        (["recipe", ""], {"show", "check", "new"}, {"train"}),
        (["recipe", "show", "nam"], {"nam56r", "nam56r-tiny"}, {"cpu-base"}),
        (["train", "nam56r", "--s"], {"--set", "--steps"}, {"--gpus"}),
        (["train", "nam56r", "--set", "model.hid"], {"model.hidden_size="}, {"model.depth="}),
        (["train", "nam56r", "--overwrite", "nam56r-t"], {"nam56r-tiny"}, set()),
        (["recipe", "keys", "mam"], {"mamba3"}, {"moe"}),
        (["catalog", "--surface", "no"], {"norm"}, {"linear"}),
        (["catalog", "--surface", ""], {"norm", "linear"}, {"layer", "model"}),
        (["bench", ""], {"norm", "layer", "model"}, set()),
    ],
)
def test_completion(words, some, not_these):
    found = set(candidates(PARSER, words))
    assert some <= found and not not_these & found
    assert all(word.startswith(words[-1]) for word in found)


@pytest.mark.slow
def test_bash_completes_with_the_script(tmp_path, capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    command = tmp_path / "megacpp"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m megacpp_mcore.cli "$@"\n')
    command.chmod(0o755)
    asked = "COMP_WORDS=(megacpp recipe show nam56r-); COMP_CWORD=3; _megacpp; "
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}" + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True,
        text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout.split() == ["nam56r-quarter", "nam56r-tiny"], done.stderr
