"""GPU tests on several workers: a GPU for each, the longest first, and notes of every outcome."""

import fcntl
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

LONGEST_WAIT_S = 120  # for memory, of the 300 s that a test may take
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # "gw3"
NOTES = os.environ.get("MEGACPP_GPU_TEST_NOTES")  # set by run.sh
if WORKER and NOTES:
    # A worker's own GPU is its device 0; the others follow, for tests that take several. Before
    # anything asks CUDA for its devices.
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own = int(WORKER.removeprefix("gw")) % len(visible)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[own:] + visible[:own])

# Whole runs first, as none may be the last; then what is short, as each worker gets two at once.
FIRST = (
    "test_parallel_losses", "test_interrupted_gpu", "test_whole_step_gpu", "test_patches_gpu",
    "test_moe_experts_gpu", "test_moe_products_gpu", "test_runs_gpu", "test_moe_dispatch_gpu",
    "test_m2rnn_gpu", "test_recompute_gpu", "test_generate_gpu", "test_cores_gpu",
    "test_attention_gpu", "test_gates_gpu", "test_mamba3_gpu", "test_mamba3_mimo_gpu",
    "test_kernels_gpu",
)  # fmt: skip


def _place(item: pytest.Item) -> int:
    """Of those that run alone, one after the other, the whole runs are the last."""
    place = FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST)
    return -place if item.get_closest_marker("alone") else place


def _spread(items: list, some: list, among: list) -> None:
    """Put `some` of the items between those of `among`, as evenly as their numbers allow."""
    each = len(among) // len(some)
    for number, item in enumerate(some):
        items.remove(item)
        items.insert(items.index(among[number * each]) + 1, item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=_place)
    # One at a time on each GPU: workers that wait for one another would be idle.
    large = [item for item in items if "memory_to_itself" in item.fixturenames]
    small = [item for item in items if item.path.stem == "test_kernels_gpu"]
    if large and len(small) > len(large):
        _spread(items, large, small)


@pytest.fixture(autouse=True)
def memory_for_the_others():
    """What a test leaves cached is free for the other workers of its GPU. A worker whose CUDA
    context is lost ends, and another takes its place: each later test would fail in it."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if WORKER:
            os._exit(1)
        pytest.exit(f"the CUDA context is lost: {error}", returncode=1)


@pytest.fixture
def memory_to_itself():
    """A function that waits until that many GiB of the GPU are free, and keeps other tests that
    wait so from taking them: a neighbour's hundredth of a second too late is out of memory."""
    with ExitStack() as held:

        def wait(gib: float) -> None:
            if not WORKER:
                return
            name = f"megacpp-gpu-tests-{torch.cuda.get_device_properties(0).uuid}.lock"
            lock = held.enter_context(open(Path(tempfile.gettempdir(), name), "w"))
            held.callback(torch.cuda.empty_cache)
            fcntl.flock(lock, fcntl.LOCK_EX)
            deadline = time.monotonic() + LONGEST_WAIT_S
            while torch.cuda.mem_get_info()[0] < gib * 2**30 and time.monotonic() < deadline:
                time.sleep(0.2)

        yield wait


def note(**what) -> None:
    if NOTES and not WORKER:  # the process that leads the workers hears of all of them
        with open(NOTES, "a") as stream:
            print(json.dumps(what), file=stream)


def pytest_collection_finish(session):
    if not session.config.getoption("numprocesses", None):
        note(collected=[item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    note(collected=ids)


def pytest_runtest_logreport(report):
    skipped = report.outcome == "skipped"
    said = "" if report.passed else report.longrepr[2] if skipped else report.longreprtext
    printed = report.capstdout if report.when == "call" else ""
    note(id=report.nodeid, when=report.when, outcome=report.outcome, s=report.duration, said=said,
         printed=printed + report.capstderr * report.failed)  # fmt: skip
