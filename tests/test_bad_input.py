"""Bad input ends with exit status 2 and its cause: no traceback, no hang, nothing believed."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from megacpp_mcore import cli
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import load_recipe

DEEP = "[" * 1000 + "]" * 1000
DIGITS = "9" * 5000


@pytest.fixture
def refused(capsys):
    """refused(*words): the one message of a command that ends with `status`, within seconds."""

    def run(*words: str, status: int = 2) -> str:
        started = time.monotonic()
        assert cli.main([str(word) for word in words]) == status
        assert time.monotonic() - started < 5
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("megacpp: ") and "Traceback" not in err
        return err

    return run


@pytest.mark.parametrize("value", [
    DEEP, DIGITS, "0x" + "f" * 5000, "1e400", "-1e400", "nan", "9" * 400, "1" + "0" * 30,
    "{a = " * 900 + "1" + "}" * 900,
])  # fmt: skip
@pytest.mark.parametrize("key", [
    "model.rotary_base", "m2rnn.grad_clamp", "optimizer.min_lr", "model.hidden_size",
    "model.depth", "schedule.train_iters", "schedule.seed", "data.split",
])  # fmt: skip
def test_a_number_that_is_none_or_too_large(refused, key, value, tmp_path):
    section, name = key.split(".")
    if key == "m2rnn.grad_clamp" and value == "1" + "0" * 30:
        pytest.skip("a limit that is never reached")
    if key not in ("data.split",):
        assert key in refused("recipe", "show", "nam56r-tiny", "--set", f"{key}={value}")
    path = tmp_path / "r.toml"
    path.write_text(f'extends = "nam56r-tiny"\n[{section}]\n{name} = {value}\n')
    assert str(path) in refused("recipe", "show", path)


@pytest.mark.parametrize("seed", [2**32, 2**63, -1])
def test_a_seed_that_numpy_does_not_take(refused, seed):
    assert "schedule.seed" in refused("recipe", "show", "nam56r-tiny", "--set",
                                      f"schedule.seed={seed}")  # fmt: skip
    load_recipe("nam56r-tiny", [f"schedule.seed={2**32 - 1}"])


def test_a_long_chain_of_recipes(refused, tmp_path):
    for number in range(1500):
        parent = f"{number + 1}.toml" if number < 1499 else "nam56r-tiny"
        (tmp_path / f"{number}.toml").write_text(f'extends = "{parent}"\n')
    assert "extends" in refused("recipe", "show", tmp_path / "0.toml")
    load_recipe(str(tmp_path / "1480.toml"))


def test_a_recipe_that_is_a_link_to_itself(refused, tmp_path):
    (tmp_path / "r.toml").symlink_to(tmp_path / "r.toml")
    assert "r.toml" in refused("recipe", "show", tmp_path / "r.toml")


@pytest.mark.parametrize("name", ["a" * 300 + ".toml", "a/" * 3000 + "b.toml", "a\0b.toml"],
                         ids=["long name", "long path", "NUL"])  # fmt: skip
def test_a_name_that_no_file_can_have(refused, name, tmp_path):
    refused("recipe", "show", name)
    refused("report", "show", name)
    refused("data", "check", name.removesuffix(".toml"))
    refused("train", "nam56r-tiny", "--out", name, "--set", 'data.data_path=["x"]')
    refused("checkpoint", "list", name)
    refused("report", "html", name)
    refused("report", "watch", name)
    refused("recipe", "new", name)
    refused("recipe", "diff", "nam56r", name)
    refused("data", "tokenizer", tmp_path, "--out", name)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000 + "b"], ids=["name", "path"])
@pytest.mark.parametrize("words", [
    "data build {folder} --out", "data build --out {folder}/corpus",
    "data build {folder} --out {folder}/corpus --tokenizer", "patch status --lane",
    "patch status --site", "patch port --to 0.20.0 --site", "generate", "evaluate --data x",
    "export --out {folder}/exported", "import {folder} --out {folder}/imported --recipe",
    "import --recipe nam56r-tiny --out {folder}/imported", "recipe plan --gpus 8",
    "catalog --problem", "cuda wheels --out",
], ids=lambda words: " ".join(words.split()[:2]))  # fmt: skip
def test_a_name_that_is_too_long(refused, words, name, tmp_path):
    (tmp_path / "a.c").write_text("int x;\n" * 100)
    assert name[:50] in refused(*words.format(folder=tmp_path).split(), name)


@pytest.mark.parametrize("words", [
    "report html {receipt} --out", "data build --out {folder}/c", "data tokenizer --out {folder}/t",
    "patch status --site", "evaluate r --data d --html", "export r --out",
])  # fmt: skip
def test_a_nul_in_an_argument(refused, words, tmp_path):
    import receipt_samples as samples

    samples.train(tmp_path / "r.json")
    words = words.format(receipt=tmp_path / "r.json", folder=tmp_path).split()
    assert "NUL" in refused(*words, "a\0b")


def test_a_page_without_a_name(tmp_path, capsys):
    import receipt_samples as samples

    samples.train(tmp_path / "r.json")
    for out in ("", ".", "/"):
        assert cli.main(["report", "html", str(tmp_path / "r.json"), "--out", out]) in (1, 2)
        assert "a directory" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ['A = "a\\u0000b"', '"A\\u0000" = "b"'])
def test_a_nul_in_the_environment(refused, entry, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(f'extends = "nam56r-tiny"\n[launch.environment]\n{entry}\n')
    assert "launch.environment" in refused("recipe", "show", path)


@pytest.fixture(params=["FIFO", "device", "folder"])
def special(request, tmp_path) -> Path:
    """A file that cannot be read to its end."""
    path = tmp_path / "special.toml"
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_what_is_no_regular_file_is_not_read(refused, special, corpus, tmp_path):
    refused("recipe", "show", special)
    refused("report", "show", special)
    for suffix in ("bin", "idx", "json"):
        prefix = tmp_path / suffix
        for other in ("bin", "idx", "json"):
            source = special if other == suffix else Path(f"{corpus}.{other}")
            Path(f"{prefix}.{other}").symlink_to(source)
        refused("data", "check", prefix, status=1 if suffix == "json" else 2)


def test_a_dangling_link_in_a_source_is_counted(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("a = 1\n" * 100)
    (source / "gone.py").symlink_to(tmp_path / "nowhere")
    (source / "loop.py").symlink_to(source / "loop.py")
    assert cli.main(["data", "build", str(source), "--out", str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out.json").read_text())
    assert manifest["skipped"]["dangling link"] == 2 and manifest["documents"] == 1


@pytest.mark.parametrize("change", [
    {"vocab_size": True}, {"vocab_size": 0}, {"vocab_size": -5}, {"vocab_size": 10**30},
    {"eod_id": True}, {"eod_id": -1}, {"eod_id": 257}, {"eod_id": 256.0}, {"documents": True},
    {"skipped": []}, {"skipped": {"binary file": -1}}, {"skipped": {"binary file": "3"}},
    {"tokens": 10**30}, {"bin_sha256": "xyz"},
], ids=str)  # fmt: skip
def test_a_datasets_json_is_not_believed(refused, corpus, change, tmp_path):
    prefix = tmp_path / "d"
    for suffix in ("bin", "idx"):
        Path(f"{prefix}.{suffix}").symlink_to(f"{corpus}.{suffix}")
    manifest = json.loads(Path(f"{corpus}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps(manifest | change))
    assert f"{prefix}.json" in refused("data", "check", prefix, status=1)


@pytest.mark.parametrize("text", [DEEP, f'{{"a": {DIGITS}}}', '{"a": 1e400}', "[1", ""])
def test_json_that_is_none(refused, text, corpus, tmp_path):
    (tmp_path / "receipt.json").write_text(text)
    refused("report", "show", tmp_path / "receipt.json")
    prefix = tmp_path / "d"
    for suffix in ("bin", "idx"):
        Path(f"{prefix}.{suffix}").symlink_to(f"{corpus}.{suffix}")
    Path(f"{prefix}.json").write_text(text)
    refused("data", "check", prefix, status=1)


@pytest.mark.parametrize("depth", [10**4 + 1, 10**9, 10**18])
def test_a_depth_that_nobody_builds_is_told_at_once(refused, depth):
    assert "depth" in refused("translate", "AEMR", "--depth", str(depth))
    assert "model.depth" in refused(
        "recipe", "show", "nam56r-tiny", "--set", f"model.depth={depth}"
    )


@pytest.mark.parametrize("gpus", [0, -1, 10**6 + 1, 2**31, 2**63])
def test_a_number_of_gpus_that_nobody_has_is_told_at_once(refused, gpus):
    assert "at most 1,000,000" in refused("recipe", "plan", "nam56r", "--gpus", gpus)


@pytest.mark.parametrize("setting", [
    "model.vocab_size=10000000000", "model.hidden_size=1048576", "model.seq_length=100000000",
    "schedule.train_iters=100000000000", "schedule.global_batch_size=1000000000",
    "model.depth=10000",
])  # fmt: skip
def test_sizes_that_no_memory_holds_are_told_before_anything_is_allocated(
    small_recipe, setting, tmp_path, monkeypatch
):
    from megacpp_mcore.host import memory
    from megacpp_mcore.training.cpu.train import train

    monkeypatch.setattr(memory, "available", lambda: 4 * 2**30)
    key = setting.split("=")[0]
    started = time.monotonic()
    wide = ["model.ffn_hidden_size=4096"] if key == "model.hidden_size" else []
    deep = ["model.hidden_size=512"] if key == "model.depth" else []
    with pytest.raises(MegacppError, match=rf"{key}.* GiB are needed, .* GiB are there"):
        train(load_recipe(str(small_recipe), [setting, *wide, *deep]), tmp_path / "run")
    assert time.monotonic() - started < 20
    assert not (tmp_path / "run").exists()


def test_parameters_that_no_gpu_holds_are_told_before_the_model():
    from megacpp_mcore.training.gpu.train import check_parameters_fit

    h200 = 150_754_820_096
    for recipe in (load_recipe("nam56r"), load_recipe("nam56r-quarter")):
        check_parameters_fit(recipe, h200)
    wide = load_recipe("nam56r", ["model.vocab_size=100000000"])
    with pytest.raises(MegacppError, match=r"model\.vocab_size = 100000000: at least .* GiB"):
        check_parameters_fit(wide, h200)


def test_the_estimate_lets_good_recipes_run(small_recipe):
    from megacpp_mcore.training.cpu import memory

    needed = memory.estimate(load_recipe(str(small_recipe)))
    assert 2**20 < sum(needed.values()) < 2**28
    memory.check(load_recipe("nam56r-tiny", ['data.data_path=["x"]']))


def test_an_end_of_document_that_the_recipe_leaves_out(small_recipe, tmp_path):
    """Megatron's null tokenizer then takes the last token of the vocabulary."""
    from megacpp_mcore.training.cpu.train import train

    recipe = load_recipe(str(small_recipe), ["data.null_tokenizer_eod_id=null"])
    assert train(recipe, tmp_path / "run", steps=1).exit_status == 0
    other = load_recipe(str(small_recipe), ["data.null_tokenizer_eod_id=null",
                                            "model.vocab_size=300"])  # fmt: skip
    with pytest.raises(MegacppError, match="end with token 256, the recipe with 299"):
        train(other, tmp_path / "other", steps=1)


def test_a_letter_without_its_package(small_recipe, tmp_path):
    from megacpp_mcore.training.cpu.train import train

    if "fla" in sys.modules:
        pytest.skip("flash-linear-attention is installed")
    recipe = load_recipe(str(small_recipe), ["model.pattern=AEMD", "mtp.pattern=A"])
    with pytest.raises(MegacppError, match=r"flash-linear-attention \(the letter D"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
