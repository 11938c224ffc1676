"""MTP's MoE routers must be told which tokens are padding, as the decoder's are."""

from _common import DEFECT, RIGHT, forward, hide_gpu, hybrid_model, one_process, report, run

PADDED = 6


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    one_process()
    model = hybrid_model("E/E")
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(recorder(seen, name), with_kwargs=True)
    padding_mask = torch.zeros(2, 16, dtype=torch.bool)
    padding_mask[:, -PADDED:] = True
    forward(model, padding_mask).sum().backward()
    masked = {name.split(".")[0]: count for name, count in seen.items()}
    # MTP's tokens and mask are shifted by one to the left; as many stay masked.
    right = masked == {"decoder": 2 * PADDED, "mtp": 2 * PADDED}
    saw = f"tokens masked as padding, of {2 * PADDED}: {masked}"
    return report(RIGHT if right else DEFECT, saw)


def recorder(seen: dict, name: str):
    def record(module, args, kwargs) -> None:
        mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
        seen[name] = None if mask is None else int(mask.sum())

    return record


run(main)
