"""Runs of the layouts' small NAM56R by `megacpp train --gpus`, and what they left."""

import subprocess
import sys
from pathlib import Path

import psutil
from parallel_layouts import RECIPE

from megacpp_mcore import receipts


def result(out: Path) -> dict:
    return receipts.read(out / "receipt.json")["result"]


def small(recipe: Path, corpus: Path, out: Path) -> list[str]:
    """`--set` words of the layouts' small NAM56R, saving every fifth step."""
    recipe.write_text(RECIPE)
    sets = [
        f'data.data_path=["{corpus}"]', f"data.data_cache_path={out}/data",
        f"checkpoint.save={out}/saved", f"checkpoint.load={out}/saved",
        "checkpoint.save_interval=5", "schedule.train_iters=30",
    ]  # fmt: skip
    return [word for text in sets for word in ("--set", text)]


def small_run(recipe: Path, corpus: Path, out: Path, *sets: str, gpus: int = 1) -> list[str]:
    words = [sys.executable, "-m", "megacpp_mcore.cli", "train", str(recipe), "--gpus", str(gpus)]
    more = [word for text in sets for word in ("--set", text)]
    return [*words, "--out", str(out), *small(recipe, corpus, out), *more]


def ranks_of(run: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(run.pid).children()
        if "megacpp_mcore.pretrain" in child.cmdline()
    ]


def series(out: Path, name: str) -> dict[int, float]:
    found = receipts.read(out / "receipt.json")["series"]
    return dict(zip(found["step"], found[name], strict=True))
