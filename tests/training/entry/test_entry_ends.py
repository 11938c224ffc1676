"""How a run ends: not finite, signalled, broken, out of memory; and how it goes on."""

import math

import pytest
import torch
from launched import watched_on

from megacpp_mcore import receipts
from megacpp_mcore.receipts.goodput import Goodput


@pytest.mark.parametrize("column, value", [("loss", math.nan), ("norm", math.inf)])
@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_a_step_that_is_not_finite_ends_the_run_before_a_checkpoint(
    watched, monkeypatch, column, value, saved_after
):
    """Step 2, with a save right after it, after the next one, or later."""
    from megatron.training import get_args

    from megacpp_mcore.training.gpu.watch import NotFiniteError

    watch, loop = watched
    get_args().train_iters, loop.steps = 9, saved_after
    watched_on(watch, monkeypatch)
    step, started, saved = loop.train_step, [], []

    def broken(forward_step, model, optimizer, iteration=None):
        started.append(iteration + 1)
        done = list(step(forward_step, model, optimizer, iteration=iteration))
        if iteration == 1 and column == "loss":
            done[0] = {"lm loss": torch.tensor(value)}
        elif iteration == 1:
            done[5] = value
        return tuple(done)

    loop.training.train_step = broken
    loop.training.save_checkpoint_and_time = lambda iteration, model: saved.append(iteration)
    with pytest.raises(NotFiniteError, match=f"^step 2: .* is {value}"), watch.installed():
        loop.run()
    assert not saved and watch.iteration == 2
    assert started == [1, 2, 3][: saved_after if saved_after < 3 else 3]
    watch.drain()  # the step after it is forgotten
    assert watch.write("failed", "not finite")["series"]["step"] == [1]


def test_a_signalled_run_of_one_rank_ends_after_its_step(watched, monkeypatch):
    from megatron.training import global_vars, training

    watch, _ = watched
    handler = global_vars.get_signal_handler()
    with watch.installed():
        assert training.get_signal_handler().signals_received() == [False]
        monkeypatch.setattr(handler, "_signal_received", True)
        assert training.get_signal_handler().signals_received() == [True]


def test_a_step_that_megatron_ends_to_run_it_again_elsewhere_is_no_step(watched, monkeypatch):
    """As train_step returns when a result was rejected twice (schedule.rerun_mode): no losses, save
    the step before, exit with 16."""
    watch, loop = watched
    step = loop.train_step

    def rejected(iterator, model, optimizer, iteration=None):
        if iteration < 2:
            return step(iterator, model, optimizer, iteration=iteration)
        return {}, True, True, True, 16, None, None, 0

    monkeypatch.setattr(loop.training, "train_step", rejected)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        done = [loop.training.train_step(None, model, optimizer, iteration=n) for n in range(3)]
    assert done[2] == ({}, True, True, True, 16, None, None, 0)
    assert watch.iteration == 2
    assert watch.write("failed", "16")["series"]["step"] == [1, 2]


def test_a_loop_that_breaks_leaves_a_receipt_that_says_so(watched, tmp_path, monkeypatch):
    from megacpp_mcore.training.gpu.train import _record_end

    watch, loop = watched
    device = watched_on(watch, monkeypatch)
    with pytest.raises(RuntimeError) as caught, watch.installed():
        loop.run(stop_at=2)
    device.finish()  # the second step; no reading may wait for a GPU that has failed
    device.on_wait = pytest.fail
    _record_end(watch, caught.value)
    result = receipts.read(tmp_path / "out" / "receipt.json")["result"]
    assert result["status"] == "failed" and result["steps"] == 2
    assert result["reason"] == "after step 2: RuntimeError: out of memory"


def test_out_of_memory_names_the_largest_consumers(watched, monkeypatch, capsys):
    from megacpp_mcore.training.gpu.train import _record_end

    watch, loop = watched
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.current": 2**30})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    _record_end(watch, torch.OutOfMemoryError("CUDA out of memory"))
    said = capsys.readouterr().err
    assert "GPU memory of rank 0 while the model was being built: 2.00 GiB on the device" in said
    with watch.installed():
        loop.run()
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ):
        _record_end(watch, error)
        said = capsys.readouterr().err
        assert "GPU memory of rank 0: 2.00 GiB on the device, 1.00 GiB in use" in said
        assert "optimizer states" in said and "activations" in said
    _record_end(watch, RuntimeError("another error"))
    assert "GPU memory" not in capsys.readouterr().err


SEGMENTS = [
    {"segment_pool_id": pool, "total_size": size}
    for pool, size in (((0, 0), 5 * 2**30), ((0, 1), 2**31), ((7, 0), 2**29))
]


@pytest.mark.parametrize(
    ("impl", "said"),
    [("full_iteration", "CUDA graphs hold 2.50 GiB"), ("none", None)],
)
def test_out_of_memory_names_what_cuda_graphs_hold(watched, monkeypatch, impl, said):
    from megatron.training import get_args

    watch, loop = watched
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.current": 2**30})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: asked.append(1) or SEGMENTS)
    with watch.installed():
        loop.run()
    asked.clear()
    get_args().cuda_graph_impl = impl
    lines = watch.memory_report().splitlines()
    found = [line for line in lines if "CUDA graphs" in line]
    assert (len(found), len(asked)) == ((1, 1) if said else (0, 0))
    assert said is None or found[0].startswith(f"  {said} of what torch has reserved")
    assert "to use less" in lines[-1]


def test_a_run_that_megatron_resumes_goes_on_in_its_receipt(watched, tmp_path):
    from megatron.training import get_args as megatron_args

    from megacpp_mcore.training.gpu.watch import Watch
    from megacpp_mcore.training.heartbeat import Heartbeat

    watch, loop = watched
    with watch.installed():
        loop.run()
    watch.write("interrupted", "stopped")
    megatron_args().iteration = loop.first = 2  # Megatron has loaded the checkpoint of step 2
    loop.steps = 4
    again = Watch(watch.launch, Goodput(), Heartbeat(tmp_path / "heartbeat", 0, None))
    with again.installed():
        loop.run()
    again.write("complete")
    receipt = receipts.read(tmp_path / "out" / "receipt.json")
    assert receipt["series"]["step"] == [1, 2, 3, 4]
    assert receipt["result"]["tokens"] == 4 * 4 * 32
    assert receipt["goodput"]["seconds"]["lost"] > 0  # step 3 was done twice
    assert "resumed from the checkpoint of step 2" in receipt["notes"]


def test_another_megatron_loop_is_refused(watched, monkeypatch):
    from megacpp_mcore.training.gpu.loop import WatchError

    watch, loop = watched
    monkeypatch.delattr(loop.training, "train_step")
    with pytest.raises(WatchError, match="train_step"), watch.installed():
        pass
    assert loop.training.evaluate == loop.evaluate  # nothing stays wrapped
