"""A stack spec must be able to name the final norm, which is hard-coded as Transformer Engine's."""

from dataclasses import replace

from _common import DEFECT, RIGHT, hide_gpu, one_process, report, run, stack_spec, tiny_config


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    one_process()
    spec = stack_spec()
    spec.params.clear()
    try:
        spec.submodules = replace(spec.submodules, final_norm=WrappedTorchNorm)
    except TypeError as error:
        if "final_norm" not in str(error):
            raise
        return report(DEFECT, f"HybridStackSubmodules: {error}")
    stack = build_module(
        spec,
        tiny_config(),
        layer_type_list=["-"],
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    output = stack(100 * torch.randn(6, 2, 32), attention_mask=None)
    spread = output.std(dim=-1, correction=0)
    # LayerNorm with weight 1: unit variance but for eps and fp32's sum over 32 channels
    if not (spread - 1).abs().max() < 1e-3:
        return report(DEFECT, f"the output is not normalized: deviation {spread.max():.3f}")
    assert type(spec.submodules)().final_norm is TENorm, "the default is no longer TENorm"
    norm = type(stack.final_norm).__name__
    return report(RIGHT, f"the final norm is the spec's {norm}; without one it is TENorm")


run(main)
