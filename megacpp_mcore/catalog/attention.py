"""Catalog rows of the core attention and of grouped-query attention's RoPE.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens of NAM56R's
shapes (hidden 3584), unless a row says otherwise. "8 documents": four rows of eight each, packed.
"""

from functools import partial

from megacpp_mcore.catalog.row import (
    ATTENTION_TESTS,
    GPU_TESTS,
    REFERENCE_EXIT,
    TE_SKIPS,
    Row,
)

_WHOLE = "q, k [s, b, heads, dqk], v [s, b, heads, dv] -> [s, b, heads * dv]; grouped queries"
_BOTH = f"{_WHOLE}; thd packed, all in one launch"
_NOT_PINNED = "not in the pinned stack, and used where it is installed"

_core = partial(Row, surface="core_attention", blocks="A")
_RECEIPT = "examples/receipts/h200/core_attention.json"
_PACKED_RECEIPT = "examples/receipts/h200/core_attention-thd.json"

CORE_ATTENTION = (
    _core(
        backend="te",
        role="vendor",
        keep="borderline",
        removes="the [s, s] scores, as SDPA does; and it alone serves context parallelism, "
        "attention sinks, maximal logits and FP8 attention",
        layout=_BOTH,
        dtypes="bf16, fp16",
        fallback="sdpa_cudnn",
        tests=ATTENTION_TESTS,
        no_receipt="cannot run a backward pass on the pinned stack: it needs cuDNN >= 9.22, torch "
        "2.11 brings 9.19",
        exit_when="SDPA is as fast on the same cuDNN and serves context parallelism",
        skips={"graph": TE_SKIPS["graph"]},
    ),
    _core(
        backend="sdpa_cudnn",
        role="chosen",
        keep="keep",
        removes="the [s, s] scores of every head; dqk 128 and dv 64, and grouped queries, as they "
        "are: 1.32 / 5.92 ms. Whole rows only: in a probe cuDNN 9.19's gradients for packed "
        "documents were wrong, and took 90 ms",
        layout=_WHOLE,
        dtypes="bf16, fp16",
        fallback="sdpa_flash",
        tests=ATTENTION_TESTS,
        receipt=_RECEIPT,
        exit_when="another backend is faster over a whole step with the same dims",
    ),
    _core(
        backend="sdpa_flash",
        role="vendor",
        keep="keep",
        removes="the [s, s] scores of every head where cuDNN cannot serve: packed documents above "
        "all, 1.48 / 4.80 ms with 8 documents, which torch's own choice takes one by one in 3.11 / "
        "26.4. Whole rows take it 3.21 / 12.5, v being padded to dqk",
        layout=_BOTH,
        dtypes="bf16, fp16",
        fallback="sdpa",
        tests=ATTENTION_TESTS,
        receipt=_PACKED_RECEIPT,
        exit_when="a kernel that takes dv 64 as it is serves packed documents on the pinned stack",
    ),
    _core(
        backend="flash_4",
        role="vendor",
        keep="keep",
        removes="what sdpa_cudnn does, and a seventh of its time: 1.34 / 5.06 ms, and 0.59 / 2.03 "
        "with 8 documents, v unpadded there, too, where sdpa_flash takes 1.48 / 4.80 (an MLA layer "
        "8.42 beside 9.22, and 5.34 beside 8.09). On Hopper it pads v for grouped queries "
        "and for dims that are no multiples of 64, and is refused where its gradients are wrong "
        f"(4.0.0b36). Of flash-attn-4, {_NOT_PINNED}",
        layout=_BOTH,
        dtypes="bf16, fp16",
        fallback="sdpa_flash",
        tests=ATTENTION_TESTS,
        receipt=_RECEIPT,
        exit_when="another backend is faster over a whole step, or its versions stop agreeing with "
        "the definition",
        skips={"graph": "its kernels are no operators of torch's: a break before and after each"},
    ),
    _core(
        backend="flash_3",
        role="vendor",
        keep="borderline",
        removes="what sdpa_flash does, with Hopper's asynchronous matrix products: 0.88 / 3.00 ms "
        "with 8 documents. Whole rows take it 1.72 / 6.18, v being padded to dqk, and sdpa_cudnn "
        f"5.92. Version 3.0.0, built from its source tree, {_NOT_PINNED}",
        layout=_BOTH,
        dtypes="bf16, fp16",
        fallback="sdpa_flash",
        tests=ATTENTION_TESTS,
        receipt=_PACKED_RECEIPT,
        exit_when="flash_4 serves whatever it does",
    ),
    _core(
        backend="flash_2",
        role="vendor",
        keep="borderline",
        removes="what sdpa_flash, an older build of the same kernel, does: 1.28 / 4.53 ms with 8 "
        "documents, whole rows 2.96 / 11.3. And it has dropout in packed documents, and a "
        f"deterministic backward pass. Version 2.8.4, built from its source tree, {_NOT_PINNED}",
        layout=_BOTH,
        dtypes="bf16, fp16",
        fallback="sdpa_flash",
        tests=ATTENTION_TESTS,
        receipt=_PACKED_RECEIPT,
        exit_when="torch's own varlen attention has dropout",
    ),
    _core(
        backend="sdpa",
        role="vendor",
        keep="keep",
        removes="the [s, s] scores of every head, on a CPU and in fp32 too",
        layout=f"{_WHOLE}; thd packed, one document at a time",
        dtypes="bf16, fp16, fp32, fp64",
        fallback="reference",
        tests=ATTENTION_TESTS,
        receipt=_RECEIPT,
        exit_when="the CPU lane has another attention",
    ),
    _core(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: softmax(q k^T) v with the scores in memory",
        layout=f"{_WHOLE}; thd packed, one document at a time",
        dtypes="bf16, fp16, fp32, fp64; softmax in fp32 or wider",
        tests=ATTENTION_TESTS,
        receipt=_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
)

_ROPE_LAYOUT = (
    "projection [s, b, groups, (heads / groups + 2) * dim] -> q [s, b, heads, dim], k, v [s, b, "
    "groups, dim], or q and k apart; packed thd; any rotated share, pairs beside or half apart"
)
_ROPE_TESTS = (
    "tests/kernels/test_rope_qk.py",
    "tests/layers/test_attention.py",
    "tests/layers/test_attention_parallel.py",
    *GPU_TESTS,
)

_rope = partial(Row, surface="rope_qk", blocks="A")
_ROPE_RECEIPT = "examples/receipts/h200/rope_qk.json"

ROPE_QK = (
    _rope(
        backend="triton",
        role="chosen",
        keep="keep",
        removes="all but one read and one write of the projection each way: the queries' copy, two "
        "launches for RoPE, and the concatenation of three gradients. 0.084 / 0.164 ms, packed or "
        "not, 85 % of what a copy moves, against Megatron's 0.291 / 0.509 with TE's kernels; the "
        "whole layer takes 8.46 ms against 8.80, with 8 documents 7.03 against 7.61 "
        "(layer-gqa.json, layer-gqa-thd.json)",
        layout=_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32; angles, sine and turns in fp32, rounded once",
        fallback="megatron",
        tests=_ROPE_TESTS,
        receipt=_ROPE_RECEIPT,
        exit_when="an attention kernel turns queries and keys as it loads them",
    ),
    _rope(
        backend="megatron",
        role="vendor",
        keep="keep",
        removes="nothing by itself; with Transformer Engine each turn is one kernel. It alone has "
        "output gates and context parallelism",
        layout=_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32; sine and cosine rounded to it without Transformer Engine",
        fallback="reference",
        tests=_ROPE_TESTS,
        receipt=_ROPE_RECEIPT,
        exit_when="the kernel has both",
        skips={"graph": TE_SKIPS["graph"]},
    ),
    _rope(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: the definition in plain torch",
        layout=_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; turned in fp32 or wider, rounded once",
        tests=_ROPE_TESTS,
        receipt=_ROPE_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _rope(
        backend="te_fused_qkv",
        role="vendor",
        keep="not carried",
        removes="the queries' copy and one of two launches: TE's kernel on the whole projection, "
        "which Megatron's fused_single_qkv_rope calls",
        fallback="triton",
        not_carried="0.224 / 0.443 ms in a probe, against 0.277 / 0.498 of TE's two kernels; whole "
        "rows only, and Megatron refuses its own flag where a norm or packed documents need the "
        "other path",
        exit_when="it is faster than the kernel in a bench",
    ),
)
