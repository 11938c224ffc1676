"""MTP must not compute the argmax of every depth's logits in each training step unless asked to."""

from types import SimpleNamespace

from _common import DEFECT, RIGHT, forward, hide_gpu, hybrid_model, one_process, report, run

LOGITS = 2 * 16 * 64


def main() -> int:
    hide_gpu()
    one_process()
    unasked, losses, names = train_step()
    if unasked:
        return report(DEFECT, f"{unasked} argmax over [16, 2, 64] MTP logits in one training step")
    assert set(names) == {"mtp_1 loss", "mtp_2 loss"}, names
    asked, same_losses, names = train_step(mtp_report_acceptance=True)
    assert asked == 2 and losses == same_losses, (asked, losses, same_losses)
    assert len(names) == 6 and 0 <= names["mtp_1_acceptance_rate"] <= 100, names
    return report(RIGHT, f"no argmax unasked, {asked} when asked for; both times losses {losses}")


def train_step(**config) -> tuple[int, list[float], dict[str, float]]:
    """One step with two MTP depths: argmax calls over logits, MTP's losses, what was logged."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from torch.utils._python_dispatch import TorchDispatchMode

    class Argmax(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket == torch.ops.aten.argmax and args[0].numel() == LOGITS:
                self.calls += 1
            return func(*args, **(kwargs or {}))

    MTPLossLoggingHelper.tracker = {}
    model = hybrid_model("-/-/-", **config)
    with Argmax() as argmax:
        forward(model).sum().backward()
    logged = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.update({name: value}))
    MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, writer)
    logged = {name: float(value) for name, value in logged.items()}
    return argmax.calls, [round(logged[f"mtp_{depth} loss"], 5) for depth in (1, 2)], logged


run(main)
