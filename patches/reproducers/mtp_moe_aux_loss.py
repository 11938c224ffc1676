"""A repeated MTP layer's MoE must attach one auxiliary loss in total, not one for each depth.

Every token goes to all 4 experts, so the load-balancing loss of a layer is exactly 1.
"""

from _common import DEFECT, RIGHT, forward, hide_gpu, hybrid_model, one_process, report, run


def main() -> int:
    hide_gpu()
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    one_process()
    # The decoder's MoE and a layer that is used for two depths; then an MoE that is the second
    # layer of a single depth, whose slot in the log lies behind the last one.
    try:
        seen = {pattern: attached_losses(pattern, repeat) for pattern, repeat in CASES.items()}
    except IndexError as error:  # of upstream with pull request 6748 alone: issue 7172
        return report(DEFECT, f"the second layer of a depth has no slot in the log: {error}")
    logged = get_moe_metrics_tracker().metrics["load_balancing_loss"].values
    logged = [round(value, 6) for value in logged.tolist()]
    saw = ", ".join(f"{pattern}: {losses}" for pattern, losses in seen.items())
    wanted = {"E/E/E": [1.0, 0.5, 0.5], "E/-E": [1.0, 1.0]}
    right = seen == wanted and logged == [1.0, 1.0]
    return report(RIGHT if right else DEFECT, f"losses attached by {saw}; logged for E/-E {logged}")


CASES = {"E/E/E": True, "E/-E": False}


def attached_losses(pattern: str, repeat: bool) -> list[float]:
    """The auxiliary losses that one forward pass attaches to the graph, in order."""
    from megatron.core.transformer.moe import moe_logging, router

    attached = []

    class Recorder(router.MoEAuxLossAutoScaler):
        @staticmethod
        def apply(activation, aux_loss):
            attached.append(round(float(aux_loss), 6))
            return RealScaler.apply(activation, aux_loss)

    RealScaler, router.MoEAuxLossAutoScaler = router.MoEAuxLossAutoScaler, Recorder
    moe_logging.destroy_moe_metrics_tracker()
    model = hybrid_model(pattern, mtp_use_repeated_layer=repeat, moe_router_topk=4)
    forward(model).sum().backward()
    router.MoEAuxLossAutoScaler = RealScaler
    return attached


run(main)
