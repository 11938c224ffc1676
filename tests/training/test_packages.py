"""What is not installed is said before anything is built, all of it at once."""

import importlib.util
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from megacpp_mcore import cli
from megacpp_mcore.dispatch import DispatchError, check_read
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.packages import (
    MissingPackageError,
    check_backends,
    check_logging,
    check_packages,
)


@pytest.fixture
def installed(monkeypatch):
    """installed(*modules): only these can be found."""

    def only(*modules: str) -> None:
        found = {name: ModuleSpec(name, None) for name in modules}
        monkeypatch.setattr(importlib.util, "find_spec", found.get)

    return only


def test_every_missing_package_is_named_with_what_asks_for_it(installed):
    installed()
    tokenizer = ["data.tokenizer_type=TikTokenizer", "data.tokenizer_model=words.json"]
    recipe = load_recipe("nam56r", ["precision.fp8=hybrid", *tokenizer])
    with pytest.raises(MissingPackageError) as caught:
        check_packages(recipe)
    said = str(caught.value)
    assert "transformer-engine[pytorch] (model.transformer_impl" in said
    assert "moe.moe_router_fusion, precision.fp8)" in said
    assert "tiktoken (data.tokenizer_type)" in said
    assert "mamba-ssm" not in said  # our own blocks have another backend


def test_a_whole_stack_is_no_error_and_the_yardstick_needs_more(installed):
    recipe = load_recipe("nam56r", ["model.pattern=AEMEAEMEAEMM"])
    installed("psutil", "transformer_engine")
    check_packages(recipe)
    with pytest.raises(MissingPackageError, match=r"mamba-ssm \(Megatron's Mamba-2\); causal-conv"):
        check_packages(recipe, yardstick=True)
    installed("psutil", "transformer_engine", "mamba_ssm", "causal_conv1d")
    check_packages(recipe, yardstick=True)


def test_what_megatrons_writer_of_checkpoints_imports_is_asked_for_before_the_run(
    installed, small, tmp_path
):
    from megacpp_mcore.training.cpu.train import train

    installed("transformer_engine")
    saves = load_recipe("nam56r")
    with pytest.raises(MissingPackageError, match=r"psutil \(Megatron's writer of checkpoints\)"):
        check_packages(saves)
    check_packages(load_recipe("nam56r", ["checkpoint.save=null", "checkpoint.save_interval=null"]))
    with pytest.raises(MissingPackageError, match="psutil"):
        train(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "package"), [("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")]
)
def test_a_log_is_refused_that_no_package_would_write(installed, asked, package):
    installed()
    check_logging(SimpleNamespace(tensorboard_dir=None, wandb_project=""))
    with pytest.raises(MissingPackageError, match=f"the package {package},"):
        check_logging(SimpleNamespace(**{asked: "here"}))
    installed(package)
    check_logging(SimpleNamespace(**{asked: "here"}))


def test_a_named_backend_that_cannot_serve_is_refused(monkeypatch):
    recipe = load_recipe("nam56r-tiny")
    check_backends(recipe)
    monkeypatch.setenv("MEGACPP_BACKENDS", "m2rnn=cuda")
    with pytest.raises(DispatchError, match="m2rnn"):
        check_backends(recipe)


WITHOUT_E = ["model.pattern=AM", "model.depth=4", "mtp.mtp_num_layers=0", "mtp.pattern=null"]


@pytest.mark.parametrize(
    ("name", "overrides", "unread"),
    [
        ("nam56r", [*WITHOUT_E, "backends.moe_experts=te"], 'backends.moe_experts = "te"'),
        (
            "nam56r-tiny",
            [*WITHOUT_E, "backends.moe_dispatch=allgather", "backends.m2rnn=reference"],
            'backends.moe_dispatch = "allgather", backends.m2rnn = "reference"',
        ),
        (
            "nam56r",
            ["mamba3.variant=mimo", "backends.mamba3_core=triton"],
            'backends.mamba3_core = "triton"',
        ),
    ],
)
def test_a_backend_that_nothing_reads_is_refused(name, overrides, unread, capsys, tmp_path):
    """A wrong letter in the pattern, and the backend that was to be measured was not there."""
    words = [word for override in overrides for word in ("--set", override)]
    assert cli.main(["recipe", "check", name, *words]) == 2
    said = f"recipe {name}: {unread}: no part of this model asks for"
    assert said in capsys.readouterr().err
    on = ["--gpus", "1"] if name == "nam56r" else []
    assert cli.main(["train", name, *on, "--out", str(tmp_path / "run"), *words]) == 2
    assert not (tmp_path / "run").exists()
    # A recipe for GPUs is refused before that where there is none.
    assert on or said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_backend_that_a_layer_reads_is_not(backend):
    check_read(load_recipe("nam56r-tiny", [f"backends.m2rnn={backend}"]))
    check_read(load_recipe("nam56r-tiny", [*WITHOUT_E, "backends.m2rnn=auto"]))


def test_a_tokenizer_json_needs_the_package_tokenizers_alone(installed):
    named = ["data.tokenizer_type=HuggingFaceTokenizer", "data.tokenizer_model=tokenizer.json"]
    installed("psutil", "transformer_engine", "tokenizers")
    check_packages(load_recipe("nam56r", named))
    with pytest.raises(MissingPackageError, match=r"transformers \(data.tokenizer_type\)"):
        check_packages(load_recipe("nam56r", [*named, "data.tokenizer_model=folder"]))
    installed("psutil", "transformer_engine", "transformers")
    with pytest.raises(MissingPackageError, match=r"\[tokenizer\] \(data.tokenizer_model\)"):
        check_packages(load_recipe("nam56r", named))
