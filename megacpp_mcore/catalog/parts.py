"""Catalog rows of what every layer is made of: linears, norms, experts, residuals.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens of NAM56R's
shapes (hidden 3584), unless a row says otherwise.
"""

from functools import partial

from megacpp_mcore.catalog.row import (
    DISPATCH_TESTS,
    EXPERTS_TESTS,
    IN_MODEL,
    NORM_TESTS,
    REFERENCE_EXIT,
    RESIDUAL_TESTS,
    STACK_TESTS,
    TE_SKIPS,
    Row,
)

_linear = partial(Row, surface="linear", blocks="AEMR")
_LINEAR_LAYOUT = "[s, b, in] -> [s, b, out], weight [out, in]"

LINEAR = (
    _linear(
        backend="te",
        role="chosen",
        keep="keep",
        removes="FP8 casts outside the GEMM, and tensor-parallel communication that does not "
        "overlap it; in bf16 on one GPU nothing, both call cuBLAS. With precision.fp8 (tensorwise) "
        "a step of nam56r-quarter at micro batch 8 takes 506.5 ms for bf16's 520.0, in turns; M's "
        "and R's in_proj stay in bf16, as their rows are no multiple of 16",
        layout=_LINEAR_LAYOUT,
        dtypes="bf16, fp16, fp32; fp8 inside",
        fallback="reference",
        tests=(*DISPATCH_TESTS, "tests/layers/test_precision.py"),
        receipt="examples/receipts/h200/model-nam56r-quarter-precision.json",
        exit_when="torch's linears train NAM56R at the same tokens/s, FP8 included",
    ),
    _linear(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: Megatron's own linears in plain torch",
        layout=_LINEAR_LAYOUT,
        dtypes="bf16, fp16, fp32",
        tests=STACK_TESTS,
        no_receipt=IN_MODEL,
        exit_when=REFERENCE_EXIT,
    ),
)

_norm = partial(Row, surface="norm", blocks="AEMR")
_NORM_LAYOUT = "[..., h], normalised over h"
_NORM_RECEIPT = "examples/receipts/h200/norm.json"

NORM = (
    _norm(
        backend="te",
        role="chosen",
        keep="keep",
        removes="a read and a write of the activations between the square sum and the scaling",
        layout=_NORM_LAYOUT,
        dtypes="bf16, fp16, fp32; sums in fp32",
        fallback="liger",
        tests=NORM_TESTS,
        receipt=_NORM_RECEIPT,
        exit_when="torch's RMSNorm is within the noise of it over a whole step",
        skips={
            "graph": TE_SKIPS["graph"],
            "zero_size": "TE 2.17.1 asserts that a norm's output holds data",
        },
    ),
    _norm(
        backend="liger",
        role="vendor",
        keep="borderline",
        removes="the same round trip as te, without te; RMSNorm only",
        layout=_NORM_LAYOUT,
        dtypes="bf16, fp16, fp32; computed in fp32",
        fallback="reference",
        tests=NORM_TESTS,
        receipt=_NORM_RECEIPT,
        exit_when="te or torch is as fast in the bench of the surface",
    ),
    _norm(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: torch.nn.RMSNorm and LayerNorm, sequence parallelism added",
        layout=_NORM_LAYOUT,
        dtypes="bf16, fp16, fp32",
        tests=(*NORM_TESTS, *STACK_TESTS),
        receipt=_NORM_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _norm(
        backend="own_triton",
        role="deferred",
        keep="not carried",
        removes="the same round trip that te and Liger remove already",
        fallback="te",
        not_carried="TE, Liger and torch each have one that a far larger user base tests; one of "
        "our own removes no memory traffic that theirs do not",
        exit_when="a norm fused with a neighbour that no package offers saves step time in a run",
    ),
)

_experts = partial(Row, surface="moe_experts", blocks="E")
_EXPERTS_LAYOUT = "tokens [t, h] sorted by expert, counts [experts] on the host"
_EXPERTS_RECEIPT = "examples/receipts/h200/moe_experts.json"

MOE_EXPERTS = (
    _experts(
        backend="te",
        role="chosen",
        keep="keep",
        removes="one GEMM launch an expert; fc1, SwiGLU and fc2 take 2.19 / 6.09 ms, of a floor of "
        "1.56 / 4.68",
        layout=_EXPERTS_LAYOUT,
        dtypes="bf16, fp16, fp32; fp8 inside",
        fallback="grouped_mm",
        tests=EXPERTS_TESTS,
        receipt=_EXPERTS_RECEIPT,
        exit_when="a path that never writes the permuted copies wins a whole run",
        skips=TE_SKIPS,
    ),
    _experts(
        backend="grouped_mm",
        role="vendor",
        keep="borderline",
        removes="one GEMM launch an expert, and the wait for the counts on the host; fc1, SwiGLU "
        "and fc2 take 1.81 / 5.59 ms. SwiGLU without bias, not in FP8, and not under Muon, which "
        "would leave its weights, one 3-d tensor, to Adam: the recipe and dispatch refuse those",
        layout="tokens [t, h] sorted by expert, counts [experts] anywhere; h and f multiples of 8",
        dtypes="bf16; fp16 and fp32 outside torch.compile",
        fallback="reference",
        tests=EXPERTS_TESTS,
        receipt=_EXPERTS_RECEIPT,
        exit_when="te is as fast in the bench of the surface, or torch drops F.grouped_mm",
    ),
    _experts(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: Megatron's SequentialMLP, one expert after another",
        layout=_EXPERTS_LAYOUT,
        dtypes="bf16, fp16, fp32",
        tests=(*EXPERTS_TESTS, *STACK_TESTS),
        receipt=_EXPERTS_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _experts(
        backend="sonicmoe",
        role="donor",
        keep="not carried",
        removes="the stored expert output: router gradients come from dA' . A, so that only X and "
        "the pre-activation are kept",
        fallback="te",
        not_carried="0.1.2.post1 needs torch <= 2.9.1 and cutlass-dsl 4.4.2; its algorithm carries "
        "over, its package does not",
        exit_when="a release serves the pinned torch: then it is benched as a vendor",
    ),
)

_residual = partial(Row, surface="residual", blocks="AEMR")
_RESIDUAL_LAYOUT = "x, residual [s, b, h], bias [h] -> [s, b, h]"
_RESIDUAL_RECEIPT = "examples/receipts/h200/residual.json"

RESIDUAL = (
    _residual(
        backend="megatron",
        role="chosen",
        keep="keep",
        removes="two of three elementwise launches and their traffic: bias, dropout and addition "
        "are one kernel of torch.compile, where the recipe has bias_dropout_fusion",
        layout=_RESIDUAL_LAYOUT,
        dtypes="bf16, fp16, fp32; the residual's",
        fallback="reference",
        tests=RESIDUAL_TESTS,
        receipt=_RESIDUAL_RECEIPT,
        exit_when="it is no faster than the eager operations over a whole step",
    ),
    _residual(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: bias, dropout and addition one after another",
        layout=_RESIDUAL_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; the residual's",
        tests=RESIDUAL_TESTS,
        receipt=_RESIDUAL_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _residual(
        backend="own_triton",
        role="deferred",
        keep="not carried",
        removes="elementwise launches between a block's output and the next block's input",
        fallback="megatron",
        not_carried="bias, dropout and addition are one kernel of torch.compile already; a Triton "
        "kernel would be a border that the compiler cannot fuse across",
        exit_when="torch.compile stops fusing them in the pinned stack, seen in a trace of a run",
    ),
)
