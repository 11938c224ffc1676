"""What a rank on GPUs imports as it starts: nothing before it has checked, nothing for nothing."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm

from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.data import tokenizer
from megacpp_mcore.training.gpu.rank_setup import Launch, recipe_argv

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500"}  # fmt: skip
ARGUMENTS = """
import sys
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.gpu import train
from megacpp_mcore.training.gpu.rank_setup import launch

bridges.before_megatron()
with bridges.pretend_h200():
    args = train.megatron_args(launch(sys.argv[1:]))
"""
TOKENIZER = """
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
found = build_tokenizer(args)
assert found.detokenize(found.tokenize("int x;")) == "int x;" and found.eod == 0
print(type(found._tokenizer).__name__)
"""


def python(
    script: str, *argv: str, environment: dict[str, str], executable: str = sys.executable
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [executable, "-c", script, *argv], env=os.environ | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", ["megacpp_mcore.pretrain", "megacpp_mcore.training.gpu.train"])
def test_megatron_is_not_imported_before_it_is_bridged(module):
    script = f"import {module}, sys; sys.exit(not {{'megatron', 'triton'}}.isdisjoint(sys.modules))"
    assert python(script, environment={}).returncode == 0


@pytest.mark.slow
def test_transformers_is_imported_for_its_own_tokenizer_alone(small_recipe: Path, tmp_path: Path):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('transformers is imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    changed = ["launch.device=cuda", "moe.moe_grouped_gemm=true", "checkpoint.save_interval=null"]
    recipe = load_recipe(str(small_recipe), changed)

    def start(*more: str, **how: str) -> subprocess.CompletedProcess:
        argv = [*recipe_argv(recipe), *lower(recipe).argv, *more]
        return python(ARGUMENTS, *argv, environment=RANK | {"PYTHONPATH": path}, **how)

    assert recipe.data.tokenizer_type == "NullTokenizer" and start().returncode == 0
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "name"]
    other = start(*named, executable=warm.python())
    assert "transformers is imported" in other.stderr
    pytest.importorskip("tokenizers", reason="the extra [tokenizer] is not installed")
    made = tokenizer.train([b"int x; int x;"], 257, tmp_path / "tokenizer.json", progress=False)
    told = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_sha256": made.sha256,
            "tokenizer_model": tmp_path / "tokenizer.json", "null_tokenizer_eod_id": 0}  # fmt: skip
    changed += [f"data.{key}={value}" for key, value in told.items()]
    recipe = load_recipe(str(small_recipe), changed)
    ours = python(ARGUMENTS + TOKENIZER, *recipe_argv(recipe), *lower(recipe).argv,
                  environment=RANK | {"PYTHONPATH": path})  # fmt: skip
    assert ours.stdout.endswith("TokenizerJson\n"), ours.stderr


def test_backends_are_checked_where_jax_is_not_found(monkeypatch, tmp_path):
    """Transformer Engine imports its own side for JAX wherever there is one."""
    (tmp_path / "jax.py").write_text("raise RuntimeError('jax is imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax", raising=False)

    def check(recipe):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("jax")
        raise KeyboardInterrupt

    from megacpp_mcore.training.gpu import train

    monkeypatch.setattr(train, "check_packages", lambda recipe, yardstick: None)
    monkeypatch.setattr(train, "check_backends", check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    h200 = SimpleNamespace(total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    recipe = load_recipe("nam56r")
    with pytest.raises(KeyboardInterrupt):
        train._train(Launch(recipe, lower(recipe), [], tmp_path, {}))
    with pytest.raises(RuntimeError, match="jax is imported"):
        importlib.import_module("jax")


def test_a_rank_refuses_a_backend_that_nothing_reads(monkeypatch, tmp_path):
    """With torchrun there is no launcher that has."""
    from megacpp_mcore.training.gpu import train

    monkeypatch.setattr(train, "check_packages", lambda recipe, yardstick: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recipe = load_recipe("nam56r", ["mamba3.variant=mimo", "backends.mamba3_core=triton"])
    with pytest.raises(DispatchError, match="no part of this model asks for mamba3_core"):
        train._train(Launch(recipe, lower(recipe), [], tmp_path, {}))


def test_a_rank_builds_nothing_before_the_kernels_are_compiled(monkeypatch, tmp_path):
    """It has checked everything by then: what it refuses, it refuses without waiting."""
    from megacpp_mcore.training.gpu import train
    from megacpp_mcore.training.gpu.rank_setup import launch

    seen = []
    for name in ("check_packages", "check_backends", "compile_all", "check_parameters_fit"):
        monkeypatch.setattr(train, name, lambda *args, **words: None)
    for name in ("before_megatron", "dataset_helper", "shift_documents_on_the_device"):
        monkeypatch.setattr(train.bridges, name, lambda: None)
    monkeypatch.setattr("megacpp_mcore.training.data.blend.check_data", lambda recipe: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0)
    )
    monkeypatch.setattr(train, "megatron_args", lambda launched: seen.append("arguments"))
    monkeypatch.setattr(train, "_check_folder", lambda launched, args: seen.append("folder"))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiles = subprocess.Popen(["sleep", "1"])

    def pretrain(launched, args, goodput):
        seen.append(("pretrain", compiles.poll()))
        seen.append(goodput.record()["seconds"]["compile"] > 0.4)

    monkeypatch.setattr(train, "_pretrain", pretrain)
    recipe = load_recipe("nam56r", ["launch.nproc_per_node=1"])
    own = [*recipe_argv(recipe), "--megacpp-after", f"{compiles.pid},{2**22}"]
    train._train(launch([*own, *lower(recipe).argv]))
    assert seen == ["arguments", "folder", ("pretrain", 0), True]


@pytest.mark.slow
def test_a_start_is_counted_from_the_process_and_from_its_launcher():
    """Never from before this test made the process: psutil's start may be wrong by a second."""
    rank = """
import os, sys, time
os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
from megacpp_mcore.training.gpu.process_start import start_times
first, second = start_times(), start_times()
os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # the launcher's start is not this rank's
assert "launch_s" not in start_times()
assert first["launch_s"] == second["launch_s"]
print(time.time() - first["cold_start_s"], first["launch_s"])
"""
    launcher = """
import subprocess, sys, time
time.sleep(1)
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
"""
    before = time.time()
    done = python(launcher, rank, environment={})
    assert done.returncode == 0, done.stderr
    started, launch_s = map(float, done.stdout.split())
    assert launch_s >= 1 and started > before + launch_s - 0.05  # ticks, the clocks' reading
    assert started < time.time()
