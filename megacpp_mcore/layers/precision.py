"""FP8 in our own layers: which GEMMs run in FP8, and which in the model's dtype."""

from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

from megacpp_mcore import dispatch

_MULTIPLE = 16  # an FP8 GEMM needs both sizes of a weight to be multiples of it

# Megatron's configuration for a linear without FP8 inside an FP8 context.
_MODEL_DTYPE = QuantizationConfig(
    {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
    MatchContext("", None),
    "model dtype",
)


def cast_weights_in_every_micro_batch(config) -> None:
    """Let a captured step keep no FP8 copy of a weight; to be called before its linears are built.

    Transformer Engine's cached copies belong to whichever forward pass made or changed them: an
    evaluation without gradients frees the transposes (2.17.1, `convert_and_update_tensor`), which a
    graph that was captured before goes on to write. A copy that is made inside the graph is of its
    own memory. The scales are the weight's own, so that the products are the same.
    """
    if config.fp8 and config.cuda_graph_impl == "full_iteration":
        config.disable_parameter_transpose_cache = True


def fp8_compatible_linear(linear: type, config, *sizes: int) -> type:
    """`linear`, or a variant in the model's dtype if FP8 is on and does not support the sizes.

    linear: one of Megatron's Transformer Engine linears if config.fp8 is set. sizes: columns and
    rows of the weight on this rank. The receipt lists each variant among the dispatch decisions.
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
