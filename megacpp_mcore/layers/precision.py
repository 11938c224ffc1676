"""FP8 and the layers of our own: which products are made in it, and which in the model's dtype."""

from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

from megacpp_mcore import dispatch

_MULTIPLE = 16  # of both sizes of a weight, as an FP8 product needs

# Megatron's words for "no FP8 in this linear, whatever is around it".
_MODEL_DTYPE = QuantizationConfig(
    {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
    MatchContext("", None),
    "model dtype",
)


def fitting_linear(linear: type, config, *sizes: int) -> type:
    """`linear`, or under FP8 and with sizes that it does not take, one in the model's dtype.

    linear: a Transformer Engine linear of Megatron's where config.fp8 is set. sizes: columns and
    rows of the weight on this rank. What is not made in FP8 is recorded as dispatch's decisions.
    """
    if not config.fp8 or not any(size % _MULTIPLE for size in sizes):
        return linear

    weight = " x ".join(map(str, sizes))
    dispatch.record(dispatch.Decision(
        "linear", f"fp8 {config.fp8}", "the model's dtype",
        f"a weight of {weight} on a rank, FP8 takes multiples of {_MULTIPLE}",
        f"{linear.__module__}:{linear.__qualname__}",
    ))  # fmt: skip

    class ModelDtypeLinear(linear):
        def finish_init(self, quantization_config) -> None:
            super().finish_init(_MODEL_DTYPE)

    return ModelDtypeLinear
