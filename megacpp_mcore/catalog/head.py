"""Catalog rows of the output layer and its losses.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens, hidden 3584 and
a vocabulary of 65,536, unless a row says otherwise.
"""

from functools import partial

from megacpp_mcore.catalog.row import (
    LOSS_TESTS,
    REFERENCE_EXIT,
    SPLIT_LOSS_TESTS,
    Row,
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
