"""MTP's inner stack must have the class and the parameters that the model's spec names."""

from _common import DEFECT, RIGHT, hide_gpu, hybrid_model, one_process, report, run, stack_spec


def main() -> int:
    hide_gpu()
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    class Stack(HybridStack):
        def __init__(self, *args, flavour: str, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.flavour = flavour

    one_process()
    model = hybrid_model("-/--", stack_spec(Stack, flavour="ours"))
    inner = model.mtp.layers[0].mtp_model_layer
    assert type(model.decoder) is Stack and len(inner.layers) == 2
    if type(inner) is not Stack:
        return report(DEFECT, f"decoder: Stack, MTP: {type(inner).__name__}")
    assert inner.flavour == "ours" and inner.is_mtp_layer and not hasattr(inner, "final_norm")
    spec = stack_spec()  # a caller that hands the submodules alone still gets HybridStack
    block = MultiTokenPredictionBlock(
        config=model.config,
        spec=spec.submodules.mtp_block_spec,
        mtp_layer_pattern="-",
        mtp_num_depths=1,
        hybrid_submodules=spec.submodules,
    )
    assert type(block.layers[0].mtp_model_layer) is HybridStack
    return report(RIGHT, "decoder: Stack, MTP: Stack, with the spec's parameter")


run(main)
