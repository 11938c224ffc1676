"""The surfaces of the model, and the backends of each in order of preference.

A new backend is one entry here and one row of `megacpp_mcore.catalog.rows`; dispatch itself knows
neither. An optional package is imported by the `supports` of its own backend and nowhere else.
"""

from megacpp_mcore.patching import missing
from megacpp_mcore.surfaces import attention_support, loss_support, problems
from megacpp_mcore.surfaces.backend import (
    REFERENCE,
    Backend,
    Problem,
    Surface,
    always,
    import_reason,
)

K_POS_PATCH = "mla-k-pos-gradient"


def transformer_engine(problem: Problem) -> str | None:
    """The `supports` of Transformer Engine's modules."""
    if problem.device != "cuda":
        return f"Transformer Engine runs on cuda only, the problem is on {problem.device}"
    return import_reason("transformer_engine.pytorch")


def mla_rope_triton(problem: Problem) -> str | None:
    """The `supports` of our Triton kernels of MLA's RoPE."""
    if problem.device != "cuda":
        return f"a Triton kernel, the problem is on {problem.device}"
    if reason := whole_rows(problem) or import_reason("triton"):
        return reason
    from megacpp_mcore.kernels.mla_rope.triton import DTYPES

    return None if problem.dtype in DTYPES else f"it takes {', '.join(DTYPES)}, not {problem.dtype}"


def whole_rows(problem: Problem) -> str | None:
    """The `supports` of a RoPE that takes a row's first token to be the first of a document."""
    ranks = problem.size("context_parallel_size", 1)
    if ranks == 1:
        return None
    return f"context_parallel_size {ranks}: it counts positions in the rows of one rank"


def megatron_rope(problem: Problem) -> str | None:
    """The `supports` of Megatron's own path between MLA's projections and its core attention."""
    ranks = problem.size("tensor_model_parallel_size", 1)
    if ranks == 1 or not missing([K_POS_PATCH]):
        return None
    return (
        f"tensor_model_parallel_size {ranks}: Megatron 0.19.2 leaves other ranks' heads out of the "
        "gradient of k's rotary part, but for TE's linears with sequence_parallel; "
        f"`megacpp patch apply --only {K_POS_PATCH}` mends it"
    )


def liger_norm(problem: Problem) -> str | None:
    """The `supports` of Liger's RMSNorm."""
    if problem.device != "cuda":
        return f"Liger's kernels run on cuda only, the problem is on {problem.device}"
    return liger_norm_kind(problem) or import_reason("liger_kernel.transformers.rms_norm")


def liger_norm_kind(problem: Problem) -> str | None:
    """Why Liger's RMSNorm is not the norm that is asked for."""
    if (kind := problem.size("normalization")) != "RMSNorm":
        return f"normalization {kind}: Liger's is an RMSNorm"
    if problem.size("fp32_residual"):
        return "fp32_residual_connection: Liger's norm returns float32 there, which no linear takes"
    return torch_norm(problem)


def torch_norm(problem: Problem) -> str | None:
    """The `supports` of torch's norms."""
    if problem.size("zero_centered_gamma"):
        return "layernorm_zero_centered_gamma: only Transformer Engine's norms have it"
    kind = problem.size("normalization", "RMSNorm")
    known = ("RMSNorm", "LayerNorm")
    return None if kind in known else f"normalization {kind}: torch has {' and '.join(known)}"


def _mamba_ssm(problem: Problem, variant: str) -> str | None:
    if problem.device != "cuda":
        return f"mamba-ssm's kernels run on cuda only, the problem is on {problem.device}"
    if problem.dtype != "bfloat16":
        return f"mamba-ssm's kernels compute in bfloat16, not {problem.dtype}"
    if (asked := problem.size("variant")) != variant:
        return f"variant {asked}: these are the {variant.upper()} kernels"
    if (chunk_size := problem.size("chunk_size")) != 64:
        return f"chunk_size {chunk_size}: mamba-ssm's kernels are tested with 64"
    return None


def mamba_ssm_scan(problem: Problem) -> str | None:
    """The `supports` of mamba-ssm's Mamba-3 SISO kernels, as far as they are tested."""
    if reason := _mamba_ssm(problem, "siso"):
        return reason
    for name in ("state_dim", "head_dim"):
        if (size := problem.size(name)) not in (32, 64, 128):
            return f"{name} {size}: mamba-ssm's kernels take powers of two, here 32, 64 or 128"
    if (angles := problem.size("angles")) % 2:
        return f"{angles} angles: mamba-ssm's kernels take an even number"
    return import_reason("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")


def mamba_ssm_mimo(problem: Problem) -> str | None:
    """The `supports` of mamba-ssm's Mamba-3 MIMO kernels, as far as they are tested."""
    if reason := _mamba_ssm(problem, "mimo"):
        return reason
    for name, tested in (("state_dim", (64,)), ("head_dim", (64,)), ("rank", (4,))):
        if (size := problem.size(name)) not in tested:
            return f"{name} {size}: the kernels are tested with {', '.join(map(str, tested))}"
    if problem.size("state_dim") != 4 * (angles := problem.size("angles")):
        return f"{angles} angles: the kernels are tested with a quarter of state_dim"
    return import_reason("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo")


def grouped_mm(problem: Problem) -> str | None:
    """The `supports` of torch's grouped matrix product, which a CPU has too, without any gain."""
    if problem.device != "cuda":
        return f"on {problem.device} it is a loop over the experts, as the reference is"
    return grouped_experts(problem)


# Optimizers that treat a weight as a matrix; Megatron gives them those with two dimensions only.
_MATRIX_OPTIMIZERS = ("muon", "adaptive_muon", "soap")


def grouped_experts(problem: Problem) -> str | None:
    """Why GroupedMMExperts are not the experts that are asked for."""
    if not problem.size("swiglu"):
        return "the activation is not SwiGLU, the only one that it has"
    for name in ("bias", "probs_on_input"):
        if problem.size(name):
            return f"{name}: it has none"
    if (optimizer := problem.size("optimizer")) in _MATRIX_OPTIMIZERS:
        return (
            f"optimizer {optimizer}: the weights are one 3-d tensor, no matrices, so that Megatron "
            "would train them with Adam"
        )
    return plain_experts(problem)


def plain_experts(problem: Problem) -> str | None:
    """The `supports` of experts that are not Transformer Engine's."""
    if problem.size("recomputed_activation"):
        return 'recompute.moe "act": only Transformer Engine\'s experts make it again'
    return in_the_models_dtype(problem)


def in_the_models_dtype(problem: Problem) -> str | None:
    """The `supports` of matrix products that are not Transformer Engine's."""
    if (fp8 := problem.size("fp8")) is None:
        return None
    return f"fp8 {fp8}: it multiplies in the model's dtype, Transformer Engine in FP8"


def megatron_heads(problem: Problem) -> str | None:
    """The `supports` of Megatron's own heads, which make the logits as the reference does."""
    if problem.device == "cuda":
        return None
    return f"on {problem.device} the reference makes the same logits"


def compiled(problem: Problem) -> str | None:
    """The `supports` of what Megatron compiles with torch.compile as it is imported."""
    if problem.device == "cuda":
        return None
    return f"nothing is compiled on {problem.device}: it takes longer than the CPU lane's runs"


def inductor(problem: Problem) -> str | None:
    """The `supports` of what we compile with torch.compile as a layer is first called."""
    if reason := inductor_options(problem) or import_reason("triton"):
        return reason
    from megacpp_mcore.kernels import inductor as here

    return here.reason()


def inductor_options(problem: Problem) -> str | None:
    """Why nothing is compiled under the recipe's options, whatever the machine has."""
    if reason := compiled(problem):
        return reason
    if problem.size("deterministic_mode"):
        return (
            "deterministic_mode: how a compiled sum is cut up is chosen by timing, so that two "
            "runs may add in another order"
        )
    # A whole step is captured after steps that have compiled; a layer's graph with its first call.
    graphs = problem.size("cuda_graph_impl", "none")
    if graphs not in ("none", "full_iteration"):
        return f"cuda_graph_impl {graphs}: a compilation cannot be part of a captured graph"
    return None


def m2rnn_cuda(problem: Problem) -> str | None:
    """The `supports` of our M2RNN kernels."""
    if problem.device != "cuda":
        return f"a CUDA kernel, the problem is on {problem.device}"
    from megacpp_mcore.kernels.m2rnn import build, cuda

    sizes = (problem.size(name) for name in ("k_head_dim", "v_head_dim", "chunk_size"))
    return cuda.sizes_reason(problem.dtype, *sizes) or build.reason()


_PARTS = "megacpp_mcore.layers.parts"
_ATTENTION = "megacpp_mcore.layers.core_attention"
_MAMBA3 = "megacpp_mcore.kernels.mamba3"
_M2RNN = "megacpp_mcore.kernels.m2rnn"
_MLA_ROPE = "megacpp_mcore.kernels.mla_rope"
_MAMBA3_PREP = "megacpp_mcore.kernels.mamba3_prep"
_M2RNN_PREP = "megacpp_mcore.kernels.m2rnn_prep"
_ROPE_QK = "megacpp_mcore.kernels.rope_qk"
_LOSS = "megacpp_mcore.kernels.linear_cross_entropy"
_TE_EXTENSION = "megatron.core.extensions.transformer_engine"

_SURFACES = (
    Surface(
        "linear",
        (
            Backend("te", f"{_PARTS}:te_linears", transformer_engine),
            Backend(REFERENCE, f"{_PARTS}:megatron_linears", in_the_models_dtype),
        ),
        problems.linear_of,
    ),
    Surface(
        "norm",
        (
            Backend("te", f"{_PARTS}:te_norm", transformer_engine),
            Backend("liger", f"{_PARTS}:liger_norm", liger_norm),
            Backend(REFERENCE, f"{_PARTS}:torch_norm", torch_norm),
        ),
        problems.norm_of,
    ),
    Surface(
        "moe_experts",
        (
            Backend("te", f"{_PARTS}:te_experts", transformer_engine),
            Backend("grouped_mm", f"{_PARTS}:grouped_mm_experts", grouped_mm),
            Backend(REFERENCE, f"{_PARTS}:sequential_experts", plain_experts),
        ),
        problems.moe_experts_of,
    ),
    Surface(
        "core_attention",
        (
            Backend("te", f"{_TE_EXTENSION}:TEDotProductAttention", attention_support.te_attention),
            Backend("flash_4", f"{_ATTENTION}:Flash4CoreAttention", attention_support.flash_4),
            Backend(
                "sdpa_cudnn", f"{_ATTENTION}:CudnnCoreAttention", attention_support.cudnn_attention
            ),
            Backend("flash_3", f"{_ATTENTION}:Flash3CoreAttention", attention_support.flash_3),
            Backend("flash_2", f"{_ATTENTION}:Flash2CoreAttention", attention_support.flash_2),
            Backend(
                "sdpa_flash", f"{_ATTENTION}:FlashCoreAttention", attention_support.flash_attention
            ),
            Backend("sdpa", f"{_ATTENTION}:SDPACoreAttention", attention_support.torch_attention),
            Backend(
                REFERENCE,
                f"{_ATTENTION}:ReferenceCoreAttention",
                attention_support.reference_attention,
            ),
        ),
        problems.core_attention_of,
    ),
    Surface(
        "mla_rope",
        (
            Backend("triton", f"{_MLA_ROPE}.triton:mla_rope", mla_rope_triton),
            # Megatron's own path counts positions over the ranks of context parallelism.
            Backend("megatron", f"{_MLA_ROPE}.unfused:mla_rope", megatron_rope),
            Backend(REFERENCE, f"{_MLA_ROPE}:mla_rope", whole_rows),
        ),
        problems.mla_rope_of,
    ),
    Surface(
        "rope_qk",
        (
            Backend("triton", f"{_ROPE_QK}.triton:ROPE_QK", attention_support.rope_qk_triton),
            # Megatron's own path has output gates, and positions over context-parallel ranks.
            Backend("megatron", f"{_ROPE_QK}.megatron:ROPE_QK", always),
            Backend(REFERENCE, f"{_ROPE_QK}:REFERENCE", attention_support.rope_qk),
        ),
        problems.rope_qk_of,
    ),
    Surface(
        "mamba3_scan",
        (
            Backend("mamba_ssm", f"{_MAMBA3}.mamba_ssm:mamba3_scan", mamba_ssm_scan),
            Backend("mamba_ssm_mimo", f"{_MAMBA3}.mamba_ssm_mimo:mamba3_scan", mamba_ssm_mimo),
            Backend(REFERENCE, f"{_MAMBA3}:mamba3_scan", always),
        ),
        problems.mamba3_scan_of,
    ),
    Surface(
        "mamba3_prep",
        (
            Backend("inductor", f"{_MAMBA3_PREP}.inductor:mamba3_prep", inductor, by_name=True),
            Backend(REFERENCE, f"{_MAMBA3_PREP}:mamba3_prep", always),
        ),
        problems.mamba3_prep_of,
    ),
    Surface(
        "m2rnn",
        (
            Backend("cuda", f"{_M2RNN}.cuda:m2rnn", m2rnn_cuda),
            Backend(REFERENCE, f"{_M2RNN}:m2rnn", always),
        ),
        problems.m2rnn_of,
    ),
    Surface(
        "m2rnn_prep",
        (
            Backend("inductor", f"{_M2RNN_PREP}.inductor:INDUCTOR", inductor, by_name=True),
            Backend(REFERENCE, f"{_M2RNN_PREP}:REFERENCE", always),
        ),
        problems.m2rnn_prep_of,
    ),
    Surface(
        "linear_cross_entropy",
        (
            Backend("chunked", f"{_LOSS}.chunked:CHUNKED", loss_support.chunked_loss),
            Backend("megatron", f"{_LOSS}.megatron:MEGATRON", megatron_heads),
            # Behind one that takes all that they take: they serve whoever names them.
            Backend("liger", f"{_LOSS}.liger:LIGER", loss_support.liger_loss),
            Backend("cce", f"{_LOSS}.cce:CCE", loss_support.cce_loss),
            Backend(REFERENCE, f"{_LOSS}:REFERENCE", always),
        ),
        problems.linear_cross_entropy_of,
    ),
    Surface(
        "residual",
        (
            Backend("megatron", f"{_PARTS}:megatron_residual", compiled),
            Backend(REFERENCE, f"{_PARTS}:plain_residual", always),
        ),
        problems.stack_part_of,
    ),
)

REGISTRY: dict[str, Surface] = {surface.name: surface for surface in _SURFACES}
