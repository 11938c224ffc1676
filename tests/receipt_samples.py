"""Receipts for tests: made by the package's own builders, from a simulated run."""

import math
import random
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts import bench_receipt, bench_row, recipe_entry
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.run import RunReceipt

TOPOLOGY = {"world_size": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "dp": 1}
CONTENT = {"model": {"hidden_size": 128}, "backends": {"m2rnn": "auto"}, "launch": {"seed": 1},
           "schedule": {"lr_warmup_iters": 5}}  # fmt: skip
TOKENS = 512


def lane(**changes: Any) -> dict[str, Any]:
    """A lane that is the same on every machine the tests run on."""
    packages = dict.fromkeys(("triton", "transformer-engine"), None)
    packages |= {"torch": "2.11.0", "megatron-core": "0.19.2", "numpy": "2.2.6"}
    device = {"type": "cpu", "name": "Test CPU", "count": 1, "memory_bytes": None}
    return {
        "device": device | {"capability": None},
        "driver": None,
        "cuda": None,
        "cudnn": None,
        "python": "3.12.1",
        "packages": packages,
        "os": "Linux",
        "cpu": {"name": "Test CPU", "count": 2, "threads": 1},
    } | changes


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


def start(path: Path, **changes: Any) -> RunReceipt:
    """A run that has done nothing yet; `changes` replace arguments of RunReceipt."""
    arguments: dict[str, Any] = {
        "recipe": recipe_entry("nam56r-tiny", CONTENT),
        "topology": TOPOLOGY,
        "plan": {
            "source_pattern": "AEMR",
            "megatron_pattern": "+EMG",
            "counts": {"A": 1, "E": 1, "M": 1, "R": 1},
        },
        "backends": [
            {"surface": "m2rnn", "requested": "auto", "observed": "reference", "reason": "first"}
        ],
        "environment": {"applied": {"OMP_NUM_THREADS": "2"}, "kept": {}},
        "lane": lane(),
        "goodput": Goodput(clock=Clock(), started="2026-11-21T09:00:00Z"),
    }
    return RunReceipt(path, **(arguments | changes))


def train(
    path: Path,
    steps: int = 80,
    *,
    ms: float = 900.0,
    worse: float = 0.0,
    noise: int = 0,
    status: str = "complete",
    **changes: Any,
) -> dict[str, Any]:
    """A simulated run, written to `path`: 900 ms a step give or take 2 %, falling loss.

    Batches are the same in every run, so their part of the loss is too; `noise` seeds what is this
    run's own. worse: nats per token that the loss stays above.
    """
    clock = Clock()
    ledger = Goodput(clock=clock)
    run = start(path, goodput=ledger, **changes)
    own, batches = random.Random(noise), random.Random(7)
    run.evaluation(0, math.log(256))
    for step in range(1, steps + 1):
        took = ms / 1000 * own.gauss(1, 0.02) + (6.0 if step == 1 else 0.0)
        with ledger.span("data"):
            clock.sleep(0.01)
        with ledger.span("compile" if step == 1 else "step"):
            clock.sleep(took)
        loss = 2.3 + 3.2 * math.exp(-step / 25) + batches.gauss(0, 0.06) + own.gauss(0, 0.005)
        run.step(
            step,
            tokens=TOKENS,
            ms=took * 1000,
            loss=loss + worse,
            peak_memory_bytes=3_000_000_000 + step * 100_000,
            grad_norm=1.0,
            lr=1e-3,
        )
        if step % 20 == 0:
            with ledger.span("evaluation"):
                clock.sleep(1.5)
            run.evaluation(step, loss + worse + 0.05)
            with ledger.span("checkpoint"):
                clock.sleep(0.8)
    clock.sleep(0.5)
    reason = None if status in ("complete", "running") else "the test says so"
    return run.write(status, reason, unigram_entropy=3.31, bigram_entropy=2.61)


def bench(**factors: float) -> dict[str, Any]:
    """A bench of `norm`: the reference takes 1 ms, another backend `factors[name]` of it."""
    own = random.Random(3)
    rows = []
    for name, factor in {"reference": 1.0, **factors}.items():
        for phase, ms in (("forward", 1.0), ("forward_backward", 3.0)):
            reference = name == "reference"
            rows.append(
                bench_row(
                    name,
                    phase,
                    [ms * factor * own.gauss(1, 0.01) for _ in range(40)],
                    cold_ms=250.0,
                    peak_memory_bytes=2**28,
                    error=None if reference else 1e-3,
                    tolerance=None if reference else 8e-3,
                    flops=2e9,
                    bytes_floor=3e8,
                )
            )
    return bench_receipt(
        problem={
            "surface": "norm",
            "dtype": "bfloat16",
            "sizes": {"tokens": 16384, "hidden": 3584},
        },
        rows=rows,
        baseline="reference",
        backends=[{"surface": "norm", "requested": "te", "observed": None, "reason": "no driver"}],
        lane=lane(),
        topology=TOPOLOGY,
        environment={"applied": {}, "kept": {}},
    )
