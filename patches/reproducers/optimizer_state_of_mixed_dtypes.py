"""The distributed optimizer must find each parameter's state in a group of float32 and bf16.

A checkpoint saves and loads the state that it finds.
"""

from types import SimpleNamespace

from _common import DEFECT, RIGHT, first_line, hide_gpu, report, run


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class OnGpu(torch.nn.Parameter):
        """A parameter that reports a CUDA type, as the optimizer requires."""

        def type(self) -> str:
            return (
                f"torch.cuda.{'FloatTensor' if self.dtype == torch.float32 else 'BFloat16Tensor'}"
            )

    parameters = [
        OnGpu(torch.full((size,), float(size), dtype=dtype))
        for size, dtype in ((2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16))
    ]
    # One buffer for each dtype, in the order in which the dtypes occur.
    buffers = [
        {dtype: [{"param_map": {p: {"param": whole(p)} for p in parameters if p.dtype == dtype}}]}
        for dtype in (torch.bfloat16, torch.float32)
    ]
    buffer_of = {p: (int(p.dtype == torch.float32), p.dtype, 0) for p in parameters}
    places, ranges = DistributedOptimizer._build_optimizer_group_ranges(
        [{"params": parameters}], buffers
    )
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe=None)
    DistributedOptimizer._build_model_and_main_param_groups(buffers, buffer_of, ranges, config)
    mains = ranges[0]["orig_group"]["params"]
    found = {p.numel(): mains[places[p][1]].numel() for p in parameters}
    saw = "; ".join(f"looks for the state of {n} elements, finds {m}" for n, m in found.items())
    if any(n != m for n, m in found.items()):
        return report(DEFECT, saw)
    wide = parameters[1]
    optimizer = SimpleNamespace(
        config=config,
        model_param_group_index_map=places,
        optimizer=SimpleNamespace(param_groups=[{"params": mains}], state={mains[0]: {}}),
    )
    try:
        DistributedOptimizer._set_main_param_and_optimizer_states(
            optimizer, wide, {"param": torch.zeros(wide.numel())}
        )
    except RuntimeError as error:
        return report(DEFECT, f"{saw}; a float32 parameter cannot be loaded: {first_line(error)}")
    return report(RIGHT if not wide.any() else DEFECT, f"{saw}; a float32 parameter is loaded")


def whole(parameter) -> SimpleNamespace:
    return SimpleNamespace(start=0, end=parameter.numel())


run(main)
