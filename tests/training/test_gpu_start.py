"""What a rank on GPUs imports as it starts: nothing before it has checked, nothing for nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore.lowering import lower
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.gpu_launch import recipe_words

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500"}  # fmt: skip
ARGUMENTS = """
import sys
from megacpp_mcore import bridges
from megacpp_mcore.training import gpu_lane
from megacpp_mcore.training.gpu_launch import launch

bridges.before_megatron()
with bridges.answering_for_a_gpu():
    gpu_lane.megatron_args(launch(sys.argv[1:]))
"""


def python(script: str, *words: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script, *words], env=os.environ | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["megacpp_mcore.pretrain", "megacpp_mcore.training.gpu_lane"])
def test_megatron_is_not_imported_before_it_is_bridged(module):
    script = f"import {module}, sys; sys.exit(not {{'megatron', 'triton'}}.isdisjoint(sys.modules))"
    assert python(script, environment={}).returncode == 0


def test_transformers_is_imported_for_its_own_tokenizer_alone(small_recipe: Path, tmp_path: Path):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('transformers is imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def start(*overrides: str) -> subprocess.CompletedProcess:
        changed = ["launch.device=cuda", "moe.moe_grouped_gemm=true",
                   "checkpoint.save_interval=null", *overrides]  # fmt: skip
        recipe = load_recipe(str(small_recipe), changed)
        words = [*recipe_words(recipe), *lower(recipe).argv]
        return python(ARGUMENTS, *words, environment=RANK | {"PYTHONPATH": path})

    assert start().returncode == 0
    hugging_face = ("data.tokenizer_type=HuggingFaceTokenizer", "data.tokenizer_model=name",
                    "data.null_tokenizer_eod_id=null")  # fmt: skip
    assert "transformers is imported" in start(*hugging_face).stderr


def test_a_start_is_counted_from_the_process_and_from_its_launcher():
    script = """
import os, sys, time
os.environ["TORCHELASTIC_RUN_ID"] = "none"
from megacpp_mcore.training import gpu_watch
time.sleep(0.5)
imported = time.monotonic()
first = gpu_watch._start()
time.sleep(1)
second = gpu_watch._start()
apart = second["cold_start_s"] - first["cold_start_s"]
assert 1 <= apart < 1.5 and first["cold_start_s"] > 0.5, (first, second)
assert abs(first["launch_s"] - second["launch_s"]) < 0.002 and first["launch_s"] >= 1, first
"""
    launcher = """
import subprocess, sys, time
time.sleep(1)
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
"""
    assert python(launcher, script, environment={}).returncode == 0
