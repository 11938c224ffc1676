"""The end of a step on GPUs: nothing of it is read before the next step, and ranks agree."""

import inspect
import json
from types import SimpleNamespace

import packed_ranks
import pytest
import ranks
import torch
import watch_ranks
from late_gpu import LateGpu
from megatron.training import training

from megacpp_mcore.training.gpu import packed, readback, step_end
from megacpp_mcore.training.gpu.packed import documents_of

ALONE, SEVERAL = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 2)


def test_results_are_as_they_were_sent():
    """Bits of float32 included; a rank of a pipeline has no loss, and a step may have no norm."""
    device = LateGpu()
    loss, norm = torch.tensor(1 / 3), torch.tensor([1e-30])
    for losses, given in (({"lm loss": loss, "z": loss.view(1)}, norm), ({}, 0.1), ({}, None)):
        results = readback.Sent(
            device, device.mark(), losses, given, compiled=False, signalled=False
        ).read()
        assert results.losses == {name: loss.item() for name in losses}
        expected = given.item() if isinstance(given, torch.Tensor) else given
        assert results.norm == expected and not results.wrong


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(value):
    device = readback.OnHost()
    for losses, norm, name in (
        ({"lm loss": torch.tensor(value)}, 1.0, "lm loss"),
        ({"lm loss": torch.tensor(1.0)}, torch.tensor(value), "gradient norm"),
        ({"lm loss": torch.tensor(1.0)}, value, "gradient norm"),
    ):
        results = readback.Sent(
            device, device.mark(), losses, norm, compiled=False, signalled=False
        ).read()
        assert results.wrong and results.not_finite() == [f"{name} is {value}"]


def test_a_result_that_changes_after_the_step_is_the_steps():
    """A captured step writes the next loss where the last one was."""
    device, loss = LateGpu(), torch.tensor(2.0)
    sent = readback.Sent(
        device, device.mark(), {"lm loss": loss}, None, compiled=False, signalled=False
    )
    loss.fill_(9.0)
    assert sent.read().losses == {"lm loss": 2.0}


def test_what_one_rank_finds_every_rank_reads(tmp_path):
    ranks.run_ranks(watch_ranks.check_results, tmp_path)


def of_two_ranks(check, folder) -> list[dict]:
    ranks.run_ranks(check, folder)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_step_that_is_wrong_on_one_rank_ends_all_at_the_same(tmp_path):
    first, second = of_two_ranks(watch_ranks.check_poisoned, tmp_path)
    step = watch_ranks.POISONED
    assert first["said"].startswith(f"step {step}: the loss or the gradient norm of another rank")
    assert second["said"].startswith(f"step {step}: lm loss is nan. The weights already have")
    for found in (first, second):
        assert found["started"] == [*range(1, step + 2)] and found["read"] == step


def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path):
    """Told at the end of the step it came in, read at the end of the next one."""
    first, second = of_two_ranks(watch_ranks.check_signalled, tmp_path)
    assert first == second
    assert first["started"] == [*range(1, watch_ranks.SIGNALLED + 2)]
    assert first["read"] == first["started"][-1] and first["said"] is None


def test_alone_the_update_and_its_norm_are_not_read():
    norm, reductions = torch.tensor([0.5]), step_end.Reductions()
    assert reductions.update_was_done(megatrons_reads, {"input": True, "group": ALONE}) is True
    assert reductions.update_was_done(megatrons_reads, {"input": False, "group": ALONE}) is False
    found = reductions.largest(megatrons_reads, {"stat": norm, "group": ALONE})
    assert found.data_ptr() == norm.data_ptr() and f"{found:.3f}" == "0.500"  # as it is logged
    assert reductions.largest(megatrons_reads, {"stat": 0.25, "group": ALONE}) == 0.25
    assert reductions.largest(megatrons_reads, {"stat": None, "group": ALONE}) is None


def megatrons_reads():
    raise AssertionError("Megatron's reduction reads the GPU")


def test_what_a_loss_scaler_may_refuse_megatron_reduces():
    reductions = step_end.Reductions()
    for group in (SEVERAL, None):
        given = {"input": True, "stat": 1.0, "group": group}
        assert reductions.update_was_done(lambda: "asked", given) == "asked"
    assert reductions.largest(lambda: "asked", {"stat": 1.0, "group": None}) == "asked"
    reductions.always_updated = True
    assert reductions.update_was_done(megatrons_reads, {"input": True, "group": SEVERAL}) is True


def test_model_parallel_ranks_reduce_without_a_read(tmp_path):
    ranks.run_ranks(watch_ranks.check_reductions, tmp_path)


def test_zeros_of_a_log_are_made_on_the_device(monkeypatch):
    made, full, filled = torch.tensor, torch.full, []
    monkeypatch.setattr(
        torch, "full", lambda *what, **how: filled.append(what) or full(*what, **how)
    )
    with step_end.zeros_made_on_the_device():
        found = torch.tensor([0.0], dtype=torch.float, device="meta")
        assert filled == [((1,), 0.0)]
        assert found.shape == (1,) and found.dtype == torch.float32 and found.is_meta
        assert torch.tensor([3]).tolist() == [3]  # on the host it is Megatron's
        assert torch.tensor([1.0, 2.0], device="meta").shape == (2,)
        assert torch.tensor([7], device="meta").dtype == torch.int64
    assert torch.tensor is made
    with pytest.raises(KeyError), step_end.zeros_made_on_the_device():
        raise KeyError
    assert torch.tensor is made


def test_megatrons_log_is_written_so():
    line = "torch.tensor([0.0], dtype=torch.float, device='cuda')"
    assert line in inspect.getsource(training.training_log)  # of every loss, in every step
    assert step_end.logged(lambda: torch.tensor, {}) is not torch.tensor


def test_the_loss_scale_is_read_once():
    scale = torch.tensor([1.0])
    own = SimpleNamespace(grad_scaler=None)
    optimizer = SimpleNamespace(chained_optimizers=[own], get_loss_scale=lambda: scale)
    assert step_end.keep_loss_scale_on_the_host(optimizer) is True
    assert optimizer.get_loss_scale().item() == 1.0
    assert optimizer.get_loss_scale().device.type == "cpu"
    assert optimizer.scale_loss(torch.tensor([3.0])).tolist() == [3.0]
    scaled = SimpleNamespace(grad_scaler=object(), get_loss_scale=lambda: scale)
    assert step_end.keep_loss_scale_on_the_host(scaled) is False
    assert scaled.get_loss_scale() is scale and not hasattr(scaled, "scale_loss")


def test_attentions_work_by_document_is_megatrons(monkeypatch):
    """Sums of lengths and of their squares, since they were last asked for."""
    work, samples = packed.Work(), ([[5, 11], [16]], [[1, 2, 13]])
    monkeypatch.setattr(packed.parallel_state, "get_data_parallel_group", lambda: ALONE)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)
    megatrons = training.consume_seqlen_stats_in_iteration
    for _ in range(2):
        for rows in samples:
            documents = documents_of(packed_ranks.sample_of(rows))
            work.add(documents)
            training.update_seqlen_stats_from_cu_seqlens(documents.offsets)
        expected = megatrons()
        assert expected[0] == 48 and work.consumed(pytest.fail, {}) == expected
    assert work.consumed(megatrons, {}) == (None, None) == megatrons()


def test_attentions_work_is_of_all_data_parallel_ranks(tmp_path):
    ranks.run_ranks(packed_ranks.check_work, tmp_path)
