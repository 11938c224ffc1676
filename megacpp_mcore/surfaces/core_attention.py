"""Surface `core_attention`: causal softmax(q k^T) v, of whole rows or of packed documents.

q, k [s, b, heads, dqk], v [s, b, heads, dv] -> [s, b, heads * dv]; grouped queries. A workload has
a layout, "sbhd" for whole rows or "thd" for packed documents, and `needs`, what the config asks
beyond causal attention: a backend serves those that it names here.
"""

import functools
from importlib import metadata
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    TE,
    TE_GRAPH,
    cuda_only,
    import_reason,
    transformer_engine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

TE_ATTENTION_CUDNN = 92200  # TE 2.17.1 is compiled against it
_HALF = ("bfloat16", "float16")
FLASH_4_MODULE = "flash_attn.cute"
FLASH_4 = "4.0.0b36"  # exactly: functions are called that are private to the package
# The oldest that work together. Before 0.6.4 quack-kernels copies softmax's sums for the backward
# pass from all 32 lanes of a warp, where one copy is waited for, and the kernel never returns: so
# seen on an H200 with 0.6.3 and 4.6.3, and in the PTX. nvidia-cutlass-dsl 4.6.0 and 4.6.1 choose a
# lane themselves, which hangs where the caller has chosen one (flash-attention's issue 2797).
_FLASH_4_NEEDS = {"quack-kernels": "0.6.4", "nvidia-cutlass-dsl": "4.6.2"}


def workload(
    device: str,
    config,
    k_channels: int | None = None,
    v_channels: int | None = None,
    layout: str = "sbhd",
    window: int | None = None,
) -> Workload:
    """dqk, dv: head dims of queries and keys, and of values; they differ in MLA.

    layout: "sbhd" for whole rows, "thd" for packed documents. window: tokens before its own that a
    query of the layer sees, None: all. needs: what the config asks beyond causal attention.
    """
    dqk = k_channels or config.kv_channels
    needs = {
        "dropout": config.attention_dropout > 0,
        "window": window is not None,
        "softmax_type": config.softmax_type != "vanilla",
        "qk_clip": config.qk_clip,
        "log_max_attention_logit": config.log_max_attention_logit,
        "fp8_dot_product_attention": config.fp8_dot_product_attention,
        "fp8_multi_head_attention": config.fp8_multi_head_attention,
        "batch_invariant_mode": config.batch_invariant_mode,
        "deterministic_mode": config.deterministic_mode,
    }
    return Workload.of(
        device,
        dtype_of(config),
        dqk=dqk,
        dv=v_channels or dqk,
        heads=config.num_attention_heads,
        context_parallel_size=config.context_parallel_size,
        layout=layout,
        needs=tuple(name for name, is_asked in needs.items() if is_asked),
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    """None when no A layer has a core attention of its own: DSA brings its kernel with it."""
    a = recipe.attention
    layout = "thd" if recipe.data.dataloader_inter_document_masking else "sbhd"
    if "+" in recipe.plan.symbols:
        dqk = a.qk_head_dim + a.qk_pos_emb_head_dim
        return workload(device, config_of(recipe), dqk, a.v_head_dim, layout)
    return (
        workload(device, config_of(recipe), layout=layout) if "*" in recipe.plan.symbols else None
    )


def te_attention(workload: Workload) -> str | None:
    """TE's fused attention, whose backward pass needs a newer cuDNN than torch's.

    TE checks the cuDNN version when it is compiled only; with torch 2.11's own 9.19 the forward
    pass works and the backward pass raises CUDNN_STATUS_BAD_PARAM.
    """
    if reason := transformer_engine(workload):
        return reason
    import torch

    version = torch.backends.cudnn.version()
    if version is None or version < TE_ATTENTION_CUDNN:
        return (
            f"cuDNN {version} at run time; TE 2.17.1's fused attention needs {TE_ATTENTION_CUDNN} "
            "or newer"
        )
    return None


def _sdpa(workload: Workload) -> str | None:
    """Attention in plain torch; packed documents one after the other."""
    return _beyond(workload, "dropout", "deterministic_mode")


def _definition(workload: Workload) -> str | None:
    return _beyond(workload, "dropout", "window", "deterministic_mode")


def _sdpa_cudnn(workload: Workload) -> str | None:
    """cuDNN's attention through torch, backward pass included.

    Packed documents: torch 2.11 can hand cuDNN 9.19 their offsets, but the gradients that come back
    are wrong (seen in a probe on an H200).
    """
    dqk, dv = workload.size("dqk", 0), workload.size("dv", 0)
    if reason := _beyond(workload, "dropout") or _half_on_cuda("cuDNN's attention", workload):
        return reason
    if workload.size("layout") == "thd":
        return "layout thd: cuDNN 9.19's gradients for packed documents are wrong"
    if max(dqk, dv) > 128 or dqk % 8 or dv % 8:
        return f"dqk {dqk}, dv {dv}: cuDNN takes multiples of 8 up to 128"
    return None


def _sdpa_flash(workload: Workload) -> str | None:
    """torch's FlashAttention-2 with v padded to dqk, its varlen form for thd."""
    served = () if workload.size("layout") == "thd" else ("dropout",)  # varlen has none
    if reason := _beyond(workload, *served) or _half_on_cuda("flash attention", workload):
        return reason
    return _padded_v(workload, 256)


def flash_4(workload: Workload) -> str | None:
    """FlashAttention-4 (CuTe DSL), v padded to dqk where it takes no other."""
    reason = _beyond(workload, "deterministic_mode") or _half_on_cuda("FlashAttention-4", workload)
    if reason := reason or import_reason(FLASH_4_MODULE):
        return reason
    import torch

    if not torch.cuda.is_available():
        return "FlashAttention-4 serves some GPUs only, and there is none here to ask"
    major, minor = torch.cuda.get_device_capability()
    if not 9 <= major <= 11:
        return f"FlashAttention-4 is for other GPUs than compute capability {major}.{minor}"
    if reason := _flash_4_version():
        return reason
    hopper = major == 9
    if reason := _padded_v(workload, 256 if hopper else 128):
        return reason
    # 4.0.0b36 keeps dq (and of grouped queries dk and dv) in rows of dqk rounded up to 16 while it
    # adds them up, and reads them in rows of dqk rounded up to 32. On an H200 they were wrong at
    # dqk 8, 16, 48, 80 and 112, and right at 24, 32, 64, 96, 128, 144, 160, 192 and 256.
    dqk = workload.size("dqk", 0)
    if hopper and dqk <= 128 and -(-dqk // 16) % 2:
        return (
            f"dqk {dqk}: FlashAttention-4's gradients on Hopper are wrong where dqk, rounded up "
            "to 16, is no multiple of 32"
        )
    return None


def _beyond(workload: Workload, *served: str) -> str | None:
    """Why an attention that sees one rank's tokens, and has `served`, cannot do what is asked."""
    ranks = workload.size("context_parallel_size", 1)
    if ranks > 1:
        return f"context_parallel_size {ranks}: it sees one rank's tokens only"
    missing = [need for need in workload.size("needs", ()) if need not in served]
    return f"{', '.join(missing)}: it has none" if missing else None


def _half_on_cuda(name: str, workload: Workload) -> str | None:
    if reason := cuda_only(f"{name} runs", workload):
        return reason
    if workload.dtype not in _HALF:
        return f"{name} takes {' and '.join(_HALF)}, not {workload.dtype}"
    return None


def _padded_v(workload: Workload, most: int) -> str | None:
    dqk, dv = workload.size("dqk", 0), workload.size("dv", 0)
    if dv > dqk:
        return f"dv {dv} is larger than dqk {dqk}: only v can be padded"
    if dqk % 8:
        return f"dqk {dqk}: flash attention takes multiples of 8"
    return f"dqk {dqk}: flash attention takes at most {most}" if dqk > most else None


@functools.cache
def _flash_4_version() -> str | None:
    from packaging.version import Version

    for name, needed in {"flash-attn-4": FLASH_4, **_FLASH_4_NEEDS}.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{FLASH_4_MODULE} is there and {name} is not: its version is unknown"
        if needed == FLASH_4 != found:
            return f"{name} {found}; exactly {FLASH_4} is served"
        if Version(found) < Version(needed):
            return f"{name} {found}; {needed} or newer is needed"
    return None


_CLASSES = "megacpp_mcore.layers.core_attention"
_WHOLE = "q, k [s, b, heads, dqk], v [s, b, heads, dv] -> [s, b, heads * dv]; grouped queries"
_BOTH = f"{_WHOLE}; thd packed, all in one launch"
_ONE_BY_ONE = f"{_WHOLE}; thd packed, one document at a time"
_HALF_WORDS = "bf16, fp16"
_ROWS, _PACKED = "core_attention.json", "core_attention-thd.json"  # whole rows; 8 documents a row
_TESTS = {
    "tests": (
        "tests/kernels/test_core_attention.py", "tests/gpu/test_attention_gpu.py", *KERNEL_TESTS,
    ),
}  # fmt: skip

_SDPA_IS_CUDNN = {
    "sdpa": "sdpa is torch's own choice, in the receipt cuDNN's kernel: that one, sdpa_cudnn, "
    "stands before both, and where it cannot serve sdpa's kernel is another"
}

SURFACE = Surface(
    "core_attention",
    (
        Backend(
            TE, "megatron.core.extensions.transformer_engine:TEDotProductAttention", te_attention,
            removes="the [s, s] scores, as SDPA does; and it alone serves context parallelism, "
            "attention sinks, maximal logits and FP8 attention",
            layout=_BOTH,
            dtypes=_HALF_WORDS, fallback="sdpa_cudnn",
            no_receipt="cannot run a backward pass on the pinned stack: it needs cuDNN >= 9.22, "
            "torch 2.11 brings 9.19",
            exit_when="SDPA is as fast on the same cuDNN and serves context parallelism",
            skips=TE_GRAPH,
            **_TESTS,
        ),
        Backend(
            "flash_4", f"{_CLASSES}:Flash4CoreAttention", flash_4,
            role="chosen",
            removes="the [s, s] scores of every head; dqk 128 and dv 64 as they are, in packed "
            "documents, too. Gradients are added up in one order. On Hopper it pads v for grouped "
            "queries and for dims that are no multiples of 64, and is refused where its gradients "
            "are wrong (4.0.0b36). Of flash-attn-4, compiled at its first call and kept",
            layout=_BOTH,
            dtypes=_HALF_WORDS, fallback="sdpa_flash", receipt=_ROWS,
            figures=(
                Figure(_ROWS, "sdpa_cudnn", "whole rows"),
                Figure(_PACKED, "sdpa_flash", "packed"),
            ),
            exit_when="another backend is faster over a whole step, or its versions stop agreeing "
            "with the definition",
            skips={
                "graph": "its kernels are no operators of torch's: a break before and after each",
            },
            **_TESTS,
        ),
        Backend(
            "sdpa_cudnn", f"{_CLASSES}:CudnnCoreAttention", _sdpa_cudnn,
            removes="the [s, s] scores of every head; dqk 128 and dv 64, and grouped queries, as "
            "they are. Whole rows only: in a probe cuDNN 9.19's gradients for packed documents "
            "were wrong",
            layout=_WHOLE,
            dtypes=_HALF_WORDS, fallback="sdpa_flash", receipt=_ROWS,
            exit_when="another backend is faster over a whole step with the same dims",
            **_TESTS,
        ),
        Backend(
            "sdpa_flash", f"{_CLASSES}:FlashCoreAttention", _sdpa_flash,
            before=_SDPA_IS_CUDNN,
            removes="the [s, s] scores of every head where cuDNN cannot serve: packed documents "
            "above all, which torch's own choice takes one by one. In whole rows v is padded to "
            "dqk",
            layout=_BOTH,
            dtypes=_HALF_WORDS, fallback="sdpa", receipt=_PACKED,
            figures=(
                Figure(_PACKED, "sdpa", "torch's own choice"),
                Figure(_ROWS, "sdpa_flash", "whole rows"),
            ),
            exit_when="a kernel that takes dv 64 as it is serves packed documents on the pinned "
            "stack",
            **_TESTS,
        ),
        Backend(
            "sdpa", f"{_CLASSES}:SDPACoreAttention", _sdpa,
            removes="the [s, s] scores of every head, on a CPU and in fp32 too",
            layout=_ONE_BY_ONE,
            dtypes="bf16, fp16, fp32, fp64; on a GPU fp32 as three products of TF32",
            fallback=REFERENCE, receipt=_ROWS,
            exit_when="the CPU lane has another attention",
            **_TESTS,
        ),
        reference(
            f"{_CLASSES}:ReferenceCoreAttention", _definition,
            removes="nothing: softmax(q k^T) v with the scores in memory",
            layout=_ONE_BY_ONE,
            dtypes="bf16, fp16, fp32, fp64; softmax in fp32 or wider", receipt=_ROWS,
            **_TESTS,
        ),
    ),
    of_recipe,
    blocks="A",
    case="megacpp_mcore.kernels.core_attention.case:CoreAttentionCase",
)  # fmt: skip
