"""Ranks of a run whose steps are read late: what one finds ends all, after the same step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from late_gpu import LateGpu
from megatron.training import global_vars, training

from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.training.gpu.readback import Sent
from megacpp_mcore.training.gpu.step_end import Reductions
from megacpp_mcore.training.gpu.watch import NotFiniteError, Watch
from megacpp_mcore.training.heartbeat import Heartbeat

POISONED, SIGNALLED, STEPS = 3, 2, 6
_OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.5, "default_config": True}])


def check_results(rank: int, folder: str) -> None:
    """Each of the flags is so on one rank, and read by both; losses are a rank's own."""
    device = LateGpu()
    for compiled, value, signalled in ((1, 2.0, 0), (0, float("nan"), 0), (0, 2.0, 1), (0, 2.0, 0)):
        here = rank == 1
        losses = {"lm loss": torch.tensor(value if here else 2.0)} if here else {}
        sent = Sent(
            device, device.mark(), losses, 0.25, compiled=bool(compiled and here),
            signalled=bool(signalled and here),
        )  # fmt: skip
        assert not sent.is_there()
        results = sent.read()
        wrong = value != value
        assert (results.compiled, results.wrong, results.signalled) == (compiled, wrong, signalled)
        assert list(results.losses) == ["lm loss"] * here and results.norm == 0.25
        assert bool(results.not_finite()) == (wrong and here)
        assert results.milliseconds == 100


def check_reductions(rank: int, folder: str) -> None:
    """Each rank's largest value, with Megatron's own reduction on a rank that has none."""
    reductions, read = Reductions(), torch.Tensor.item
    own = {"norm": torch.tensor([0.5 + rank]), "rate": 0.25, "of one": torch.tensor(3.0)}

    def largest(stat: Any) -> Any:
        given = {"stat": stat, "group": dist.group.WORLD}
        return reductions.largest(lambda: _megatrons(stat, read), given)

    torch.Tensor.item = None
    try:
        norm, rate = largest(own["norm"]), largest(own["rate"])
        of_one = largest(own["of one"] if rank == 1 else None)
    finally:
        torch.Tensor.item = read
    assert norm.shape == () and norm.item() == 1.5 and own["norm"].item() == 0.5 + rank
    assert rate == 0.25 and float(of_one) == 3.0


def _megatrons(stat: None, read: Any) -> float:
    """As reduce_max_stat_across_model_parallel_group, on the CPU."""
    assert stat is None
    reduced = torch.tensor([-1.0], dtype=torch.float32)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    return read(reduced)


def check_poisoned(rank: int, folder: str) -> None:
    """Only the rank that has the loss sees that it is not finite, as with pipeline stages."""

    def losses(step: int) -> dict[str, torch.Tensor]:
        value = float("nan") if step == POISONED else 1.0
        return {"lm loss": torch.tensor(value)} if rank == 1 else {}

    _tell(rank, folder, _run(folder, losses))


def check_signalled(rank: int, folder: str) -> None:
    """SIGTERM came to one rank, in the middle of a step."""
    handler = SimpleNamespace(_signal_received=False)
    global_vars._GLOBAL_SIGNAL_HANDLER = handler

    def losses(step: int) -> dict[str, torch.Tensor]:
        handler._signal_received |= rank == 1 and step == SIGNALLED
        return {"lm loss": torch.tensor(1.0)}

    _tell(rank, folder, _run(folder, losses))


def _tell(rank: int, folder: str, found: dict[str, Any]) -> None:
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def _run(folder: str, losses: Any) -> dict[str, Any]:
    """Megatron's loop as far as the watch sees it: steps, then what it asks at their ends."""
    global_vars.set_args(
        SimpleNamespace(
            train_iters=STEPS, global_batch_size=2, seq_length=4, cuda_graph_impl="none"
        )
    )
    started: list[int] = []

    def train_step(optimizer: Any, iteration: int) -> tuple:
        started.append(iteration + 1)
        return losses(iteration + 1), 0, False, False, 0, torch.tensor(0.5), None, None

    training.train_step = train_step
    recipe = SimpleNamespace(checkpoint=SimpleNamespace(keep_latest=None))
    launch = SimpleNamespace(out=Path(folder), recipe=recipe)
    watch = Watch(launch, Goodput(), Heartbeat(Path(folder), 0, None))
    watch._device = LateGpu()
    said = None
    with watch.installed():
        try:
            for iteration in range(STEPS):
                training.train_step(_OPTIMIZER, iteration)
                if any(training.get_signal_handler().signals_received()):
                    break
            watch.drain()
        except NotFiniteError as error:
            said = str(error)
    return {"started": started, "read": watch.iteration, "said": said}
