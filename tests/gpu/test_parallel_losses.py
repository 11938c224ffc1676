"""Every layout gives the losses of one GPU; checkpoints of one layout go on at another.

The runs are real launches, some minutes in all, side by side. A test waits for those that it
compares: where the tests are cut short, what has ended by then has its outcome. With
MEGACPP_MEGATRON_LM, the folder of a Megatron-LM 0.19 checkout, its own pretrain_hybrid.py is run
with our --spec too. Its scripts alone, with the wheel's Megatron, need the patch
dataset-helper-without-makefile.
"""

import os
from collections.abc import Iterator

import parallel_runs
import pytest
import torch
from parallel_layouts import ONE, RUNS, SEED, STEPS, STOCK, TWINS
from parallel_runs import Packed
from parallel_verdicts import differences, unlike_in_print

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parallel_runs.Outcomes]:
    gpus = parallel_runs.visible_gpus()
    packed = Packed(tmp_path_factory.mktemp("parallel"), gpus)
    yield packed.begin((SEED, ONE, *parallel_runs.runs_for(parallel_runs.ranks_of(gpus))))
    packed.stop()


def made(run, outcomes):
    """The run's outcome; skips the test, saying why, where this machine cannot make the run."""
    if run.name not in outcomes:
        no_checkout = run in STOCK and "MEGACPP_MEGATRON_LM" not in os.environ
        pytest.skip("MEGACPP_MEGATRON_LM names no checkout" if no_checkout else "too few GPUs")
    return outcomes[run.name]


@pytest.mark.parametrize("run", (*RUNS, *STOCK), ids=lambda run: run.name)
def test_losses_are_those_of_one_gpu(run, outcomes):
    made(run, outcomes)
    assert not outcomes[ONE.name].reason, outcomes[ONE.name].reason
    found = differences(run, outcomes)
    assert not found, "\n".join(found)  # pytest would shorten a launch's log


@pytest.mark.parametrize(("stock", "twin"), TWINS.items(), ids=lambda run: run.name)
def test_megatrons_own_script_has_the_bits_of_our_entry(stock, twin, outcomes):
    found = unlike_in_print(made(stock, outcomes), made(twin, outcomes))
    assert not found, "\n".join(found)


def test_the_one_gpu_run_learns(outcomes):
    losses = outcomes[ONE.name].losses
    # Bytes of source are far from uniform: well below the first loss after 20 steps.
    assert losses[STEPS] < 0.75 * losses[1]
