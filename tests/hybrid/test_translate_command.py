"""`megacpp translate` as a user runs it: a process, its output, its exit status."""

import json
import subprocess
import sys

import pytest

from megacpp_mcore.hybrid.pattern import translate


def megacpp(*arguments):
    command = [sys.executable, "-m", "megacpp_mcore.cli", "translate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def nam56r():
    return megacpp("AEMEAEMEAEMR", "--depth", "52")


def test_plan_on_stdout_exit_0(nam56r):
    assert nam56r.returncode == 0
    assert nam56r.stderr == ""
    lines = nam56r.stdout.splitlines()
    assert lines[0].split() == ["source", ("AEMEAEMEAEMR" * 5)[:52]]
    assert lines[1].split() == ["Megatron", ("+EME+EME+EMG" * 5)[:52]]
    assert "--spec megacpp_mcore.specs.nam56r nam56r_stack_spec" in nam56r.stdout
    assert "patches: none" in nam56r.stdout


def test_report_shows_counts_and_every_layer_within_100_columns(nam56r):
    counts = {
        line.split()[0]: line.split()[3] for line in nam56r.stdout.splitlines() if "->" in line
    }
    assert counts == {"A": "13", "E": "22", "M": "13", "R": "4"}
    words = nam56r.stdout.split()
    for layer in translate("AEMEAEMEAEMR", depth=52).layers:
        row = [str(layer.number), layer.letter, layer.symbol, layer.module.rpartition(".")[2]]
        assert any(words[i : i + 4] == row for i in range(len(words)))
    assert max(map(len, nam56r.stdout.splitlines())) <= 100


def test_json_is_the_plan():
    options = ["--dsa-ranks", "2,1", "--mtp-depths", "1", "--mtp-pattern", "ae", "--pp", "2"]
    result = megacpp("aemeaemeaemr", "--depth", "24", "--vpp", "2", *options, "--json")
    assert result.returncode == 0
    plan = translate(
        "AEMEAEMEAEMR", depth=24, dsa_ranks=(1, 2), mtp_depths=1, mtp_pattern="AE", pp=2, vpp=2
    )
    assert json.loads(result.stdout) == plan.to_dict()


def test_pattern_is_printed_quoted_for_the_shell():
    result = megacpp("AE|ME", "--attention", "gqa", "--target", "native", "--mamba2")
    assert result.returncode == 0
    assert "--hybrid-layer-pattern '*E|ME'" in result.stdout
    assert "no spec of ours" in result.stdout


def test_mtp_and_virtual_stages_are_told_apart():
    result = megacpp("AEME", "--pp", "2", "--vpp", "2", "--mtp-depths", "2", "--mtp-pattern", "A")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["3", "M", "M", "Mamba3Mixer", "0.1"] in rows
    assert ["mtp2:1", "A", "+", "MLASelfAttention", "1.1"] in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["AEX"], "megacpp: unknown letter 'X' at position 3 of the pattern"),
        ([""], "megacpp: the pattern is empty"),
        (["AE", "--depth", "-1"], "megacpp: depth -1"),
        (["AE", "--depth", "many"], "invalid int value: 'many'"),
        (["AE", "--dsa-ranks", "1,,2"], "'1,,2' is not a list of numbers with commas"),
        (["AE", "--attention", "flash"], "megacpp: unknown attention 'flash'"),
        (["AR", "--target", "native"], "megacpp: R at position 2 of the pattern"),
        (["AE", "--mtp-depths", "1"], "megacpp: 1 MTP depths without an MTP pattern"),
        (["AE", "--dep", "4"], "unrecognized arguments: --dep"),
        ([], "the following arguments are required: PATTERN"),
    ],
)
def test_refusal_on_stderr_exit_2(arguments, message):
    result = megacpp(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_bytes_that_are_no_text_are_refused():
    command = [sys.executable, "-m", "megacpp_mcore.cli", "translate", b"A\xff"]
    result = subprocess.run(command, capture_output=True, timeout=60)
    assert result.returncode == 2
    assert b"unknown letter U+DCFF at position 2" in result.stderr


def test_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megacpp_mcore.cli import main; main(['translate', 'AEMR', '--json']);"
        "print(sorted({'torch', 'megatron', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stderr.strip() == "[]"
