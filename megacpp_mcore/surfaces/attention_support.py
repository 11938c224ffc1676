"""The `supports` of core attention and of GQA's RoPE: layouts, dims, versions, GPUs.

A core_attention problem has a layout, "sbhd" for whole rows or "thd" for packed documents, and
`needs`, what the config asks beyond causal attention: a backend serves those that it names here.
No torch at import.
"""

import functools
from importlib import metadata

from megacpp_mcore.surfaces.backend import Problem, import_reason

TE_ATTENTION_CUDNN = 92200  # TE 2.17.1 is compiled against it
_HALF = ("bfloat16", "float16")
# Not `flash_attn`: version 4 alone is a package of that name, too, with nothing in it.
FLASH_2_MODULE = "flash_attn.flash_attn_interface"
FLASH_4_MODULE = "flash_attn.cute"
_FLASH_3 = ("flash_attn_3.flash_attn_interface", "flash_attn_interface")
_FLASH_4_VERSION = "4.0.0b20"  # the first that Megatron takes, too


def te_attention(problem: Problem) -> str | None:
    """The `supports` of TE's fused attention, whose backward pass needs a newer cuDNN than torch's.

    TE checks the cuDNN version when it is compiled only; with torch 2.11's own 9.19 the forward
    pass works and the backward pass raises CUDNN_STATUS_BAD_PARAM.
    """
    if problem.device != "cuda":
        return f"Transformer Engine runs on cuda only, the problem is on {problem.device}"
    if reason := import_reason("transformer_engine.pytorch"):
        return reason
    import torch

    version = torch.backends.cudnn.version()
    if version is None or version < TE_ATTENTION_CUDNN:
        return (
            f"cuDNN {version} at run time; TE 2.17.1's fused attention needs {TE_ATTENTION_CUDNN} "
            "or newer"
        )
    return None


def torch_attention(problem: Problem) -> str | None:
    """The `supports` of attention in plain torch; packed documents one after the other."""
    return _beyond(problem, "dropout", "deterministic_mode")


def reference_attention(problem: Problem) -> str | None:
    """The `supports` of the definition."""
    return _beyond(problem, "dropout", "window", "deterministic_mode")


def cudnn_attention(problem: Problem) -> str | None:
    """The `supports` of cuDNN's attention through torch, backward pass included.

    Packed documents: torch 2.11 can hand cuDNN 9.19 their offsets, but the gradients that come back
    are wrong, and take some 90 ms (seen in a probe on an H200).
    """
    dqk, dv = problem.size("dqk", 0), problem.size("dv", 0)
    if reason := _beyond(problem, "dropout") or _half_on_cuda("cuDNN's attention", problem):
        return reason
    if problem.size("layout") == "thd":
        return "layout thd: cuDNN 9.19's gradients for packed documents are wrong"
    if max(dqk, dv) > 128 or dqk % 8 or dv % 8:
        return f"dqk {dqk}, dv {dv}: cuDNN takes multiples of 8 up to 128"
    return None


def flash_attention(problem: Problem) -> str | None:
    """The `supports` of torch's FlashAttention-2 with v padded to dqk, its varlen form for thd."""
    served = () if problem.size("layout") == "thd" else ("dropout",)  # varlen has none
    if reason := _beyond(problem, *served) or _half_on_cuda("flash attention", problem):
        return reason
    return _padded_v(problem, 256)


def flash_2(problem: Problem) -> str | None:
    """The `supports` of the package flash-attn 2, v padded to dqk."""
    served = ("dropout", "deterministic_mode")
    if reason := _package(problem, "flash-attn 2", served, (FLASH_2_MODULE,), capability=(8, 0)):
        return reason
    return _padded_v(problem, 256)


def flash_3(problem: Problem) -> str | None:
    """The `supports` of FlashAttention-3, v padded to dqk: its narrow v starts above dqk 128."""
    served = ("deterministic_mode",)
    if reason := _package(problem, "FlashAttention-3", served, _FLASH_3, (9, 0), (9, 0)):
        return reason
    dqk, needs = problem.size("dqk", 0), problem.size("needs", ())
    if "deterministic_mode" in needs and dqk > 192:
        return f"deterministic_mode, dqk {dqk}: its backward pass has it up to 192"
    return _padded_v(problem, 256)


def flash_4(problem: Problem) -> str | None:
    """The `supports` of FlashAttention-4 (CuTe DSL), v padded to dqk where it takes no other."""
    served, modules = ("deterministic_mode",), (FLASH_4_MODULE,)
    if reason := _package(problem, "FlashAttention-4", served, modules, (9, 0), (11, 9)):
        return reason
    if reason := _flash_4_version():
        return reason
    import torch

    hopper = torch.cuda.get_device_capability()[0] == 9
    if reason := _padded_v(problem, 256 if hopper else 128):
        return reason
    # 4.0.0b36 keeps dq (and of grouped queries dk and dv) in rows of dqk rounded up to 16 while it
    # adds them up, and reads them in rows of dqk rounded up to 32. On an H200 they were wrong at
    # dqk 8, 16, 48, 80 and 112, and right at 24, 32, 64, 96, 128, 144, 160, 192 and 256.
    dqk = problem.size("dqk", 0)
    if hopper and dqk <= 128 and -(-dqk // 16) % 2:
        return (
            f"dqk {dqk}: FlashAttention-4's gradients on Hopper are wrong where dqk, rounded up "
            "to 16, is no multiple of 32"
        )
    return None


def flash_3_module() -> str:
    """The name under which FlashAttention-3 is installed: its package's, or a source build's."""
    packaged, built = _FLASH_3
    return packaged if import_reason(packaged) is None else built


def rope_qk(problem: Problem) -> str | None:
    """The `supports` of GQA's RoPE apart from Megatron's own path."""
    ranks = problem.size("context_parallel_size", 1)
    if ranks > 1:
        return f"context_parallel_size {ranks}: it counts positions in the rows of one rank"
    needs = problem.size("needs", ())
    return f"{', '.join(needs)}: Megatron's own path alone has it" if needs else None


def rope_qk_triton(problem: Problem) -> str | None:
    """The `supports` of our Triton kernel of GQA's RoPE."""
    if problem.device != "cuda":
        return f"a Triton kernel, the problem is on {problem.device}"
    if reason := rope_qk(problem) or import_reason("triton"):
        return reason
    from megacpp_mcore.kernels.rope_qk.triton import DTYPES

    return None if problem.dtype in DTYPES else f"it takes {', '.join(DTYPES)}, not {problem.dtype}"


def _beyond(problem: Problem, *served: str) -> str | None:
    """Why what every attention here but TE's lacks, or this one, is asked of it."""
    ranks = problem.size("context_parallel_size", 1)
    if ranks > 1:
        return f"context_parallel_size {ranks}: it sees one rank's tokens only"
    missing = [need for need in problem.size("needs", ()) if need not in served]
    return f"{', '.join(missing)}: it has none" if missing else None


def _half_on_cuda(name: str, problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"{name} runs on cuda only, the problem is on {problem.device}"
    if problem.dtype not in _HALF:
        return f"{name} takes {' and '.join(_HALF)}, not {problem.dtype}"
    return None


def _padded_v(problem: Problem, most: int) -> str | None:
    dqk, dv = problem.size("dqk", 0), problem.size("dv", 0)
    if dv > dqk:
        return f"dv {dv} is larger than dqk {dqk}: only v can be padded"
    if dqk % 8:
        return f"dqk {dqk}: flash attention takes multiples of 8"
    return f"dqk {dqk}: flash attention takes at most {most}" if dqk > most else None


def _package(
    problem: Problem, name: str, served: tuple[str, ...], modules: tuple[str, ...],
    capability: tuple[int, int], last: tuple[int, int] = (99, 0),
) -> str | None:  # fmt: skip
    """Why a package of flash attention cannot serve; any of `modules` will do."""
    if reason := _beyond(problem, *served) or _half_on_cuda(name, problem):
        return reason
    reasons = [import_reason(module) for module in modules]
    if None not in reasons:
        return "; ".join(filter(None, reasons))
    import torch

    if not torch.cuda.is_available():
        return f"{name} serves some GPUs only, and there is none here to ask"
    major, minor = torch.cuda.get_device_capability()
    if capability <= (major, minor) <= last:
        return None
    return f"{name} is for other GPUs than compute capability {major}.{minor}"


@functools.cache
def _flash_4_version() -> str | None:
    from packaging.version import Version

    try:
        found = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash_attn.cute is not of a flash-attn-4 distribution: its version is unknown"
    if Version(found) >= Version(_FLASH_4_VERSION):
        return None
    return f"flash-attn-4 {found}; {_FLASH_4_VERSION} or newer is needed"
