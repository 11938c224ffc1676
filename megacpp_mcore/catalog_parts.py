"""Catalog rows of what every layer is made of: linears, norms, experts, the head, residuals.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens of NAM56R's
shapes (hidden 3584), unless a row says otherwise.
"""

from functools import partial

from megacpp_mcore.catalog_row import (
    DISPATCH_TESTS,
    EXPERTS_TESTS,
    IN_MODEL,
    LOSS_TESTS,
    NORM_TESTS,
    REFERENCE_EXIT,
    RESIDUAL_TESTS,
    SPLIT_LOSS_TESTS,
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
        "overlap it; in bf16 on one GPU nothing, both call cuBLAS",
        layout=_LINEAR_LAYOUT,
        dtypes="bf16, fp16, fp32; fp8 inside",
        fallback="reference",
        tests=DISPATCH_TESTS,
        receipt="examples/receipts/h200/model-nam56r-quarter.json",
        exit_when="torch's linears train NAM56R at the same tokens/s, FP8 included",
    ),
    _linear(
        backend="te_fp8",
        role="deferred",
        keep="not carried",
        removes="kernel time: 288.3 -> 275.9 ms a forward and backward pass of nam56r-quarter with "
        "tensorwise FP8 in every block, 286.2 in the experts alone, which pad and cast away what "
        "the products save",
        fallback="te",
        receipt="examples/receipts/h200/model-nam56r-quarter-precision.json",
        not_carried="no shipped recipe sets precision.fp8, though one may: the step is not faster "
        "beyond the spread (325.9 -> 320.1 ms, 99 % interval of the ratio 0.92 .. 1.03), the "
        "forward pass slower (98.3 -> 107.5), and on a busy host the launches take longer than "
        "the kernels (337 ms). M's in_proj stays in bf16 as its rows do not fit FP8's multiples of "
        "16; with rows that do, FP8 in it made a step of 319.0, no faster beyond the spread",
        exit_when="a whole step is faster with it, in turns with bf16 on a host of its own",
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

_LOSS_RECEIPT = "examples/receipts/h200/linear_cross_entropy-mean.json"
_head = partial(Row, surface="linear_cross_entropy", blocks="")
_LOGITS_LAYOUT = "hidden [s, b, h], weight [V, h], labels [s, b] -> losses [s, b]"

HEAD = (
    _head(
        backend="chunked",
        role="chosen",
        keep="keep",
        removes="the logits, but for a buffer of 256 MiB; with weights known beforehand they are "
        "made once, 6 T h V operations: 30.6 / 31.0 ms, forward / forward + backward. "
        "nam56r-quarter's step with two MTP depths is 367 ms beside 391 with Megatron's heads, and "
        "52.9 GiB beside 68.8 (model-nam56r-quarter-mtp2.json)",
        layout="hidden [..., h], weight [V / tp, h], labels [...] -> losses [...], or their "
        "weighted sum; a vocabulary over tensor-parallel ranks",
        dtypes="bf16, fp32; softmax, losses and the sum of the weight's gradient in fp32",
        fallback="megatron",
        tests=SPLIT_LOSS_TESTS,
        receipt=_LOSS_RECEIPT,
        exit_when="a package on the pinned stack takes a weight a token and a split vocabulary, "
        "and is as fast",
    ),
    _head(
        backend="liger",
        role="vendor",
        keep="borderline",
        removes="the logits, but for a chunk; with weights known beforehand it makes them twice: "
        "11.1 / 47.3 ms. Its own mean makes them once: 36.5 ms beside chunked's "
        "31.0",
        layout="hidden [..., h], weight [V, h], labels [...] -> losses [...]; no logit scale",
        dtypes="bf16, fp16, fp32; the sum of the weight's gradient in fp32, gradients of losses "
        "rounded to the dtype",
        fallback="chunked",
        tests=LOSS_TESTS,
        receipt=_LOSS_RECEIPT,
        exit_when="its next release is no faster than chunked, either",
        skips={"graph": "Liger counts the labels on the host, which cuts the graph"},
    ),
    _head(
        backend="cce",
        role="vendor",
        keep="borderline",
        removes="the logits, all of them: made tile by tile in registers, twice: 13.8 / 136.5 "
        "ms without its filter",
        layout="hidden [..., h], weight [V, h], labels [...] -> losses [...]; no option but "
        "ignore_index: its softcap counts columns past the vocabulary's end",
        dtypes="bf16, fp16; the sums of both gradients in the same",
        fallback="chunked",
        tests=LOSS_TESTS,
        receipt=_LOSS_RECEIPT,
        exit_when="the few hundred MiB of chunked's buffer are never what is missing",
        skips={
            "graph": "Cut Cross Entropy looks for the labels that count on the host",
            "determinism": "its sums are made in the order in which the locks are taken",
        },
    ),
    _head(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: logits of every token, then their cross entropy: 22.8 / 55.6 ms and "
        "12.0 GiB",
        layout=_LOGITS_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; the sum and the losses in fp32 or wider",
        tests=SPLIT_LOSS_TESTS,
        receipt=_LOSS_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _head(
        backend="megatron",
        role="vendor",
        keep="keep",
        removes="nothing: Megatron's own heads, with logits and a float32 softmax of every token "
        "and MTP depth in memory: 23.1 / 47.2 ms. They serve where chunked cannot (fp16), and "
        "models of Megatron's own class have no others",
        layout=_LOGITS_LAYOUT,
        dtypes="bf16, fp16, fp32; the sum and the losses in fp32",
        fallback="reference",
        tests=LOSS_TESTS,
        receipt=_LOSS_RECEIPT,
        exit_when="Megatron's model takes its heads from a spec",
    ),
    _head(
        backend="own_mega_kernel",
        role="deferred",
        keep="not carried",
        removes="the logits: plain linear and cross entropy 55.9 ms and 12.0 GiB forward and "
        "backward, chunked 32.5 and 1.24",
        fallback="reference",
        not_carried="it is made of 23 TFLOP of GEMM, and cuBLAS runs those; chunked logits with "
        "one small kernel over each chunk save the same memory",
        exit_when="a chunked path cannot come within reach of the floor on an H200",
    ),
    _head(
        backend="megatron_te",
        role="vendor",
        keep="not carried",
        removes="a pass over the logits",
        fallback="reference",
        not_carried="refused by recipes and by the loss layer: Megatron's "
        "cross_entropy_fusion_impl 'te' is reported to give grad norm 0 or divergence "
        "(Megatron-LM #1627 and #1750, TransformerEngine #3193)",
        exit_when="both reports are closed by a fix and our gradient test passes on it",
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
