"""Surface `moe_dispatch`: how a MoE layer's tokens reach the ranks of their experts, and return.

Megatron's keys moe_token_dispatcher_type and moe_flex_dispatcher_backend name the same backends in
its own words (`MEGATRONS`). A recipe says it once; what it leaves out follows from the other.
"""

import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megacpp_mcore.surfaces import deep_ep, moe_experts
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import cuda_only, whatever_the_machine
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

NAME = "moe_dispatch"
UNMOVED, LOCAL = "unmoved", "local"
ALLGATHER, ALLTOALL, DEEPEP, HYBRIDEP = "allgather", "alltoall", "deepep", "hybridep"
WITH_DEEP_EP = (DEEPEP, HYBRIDEP)
# Every token stays on its rank: no size depends on what the router chooses.
ON_ONE_RANK = (UNMOVED, LOCAL)


class Words(NamedTuple):
    """Megatron's: moe_token_dispatcher_type, and moe_flex_dispatcher_backend where that is read."""

    type: str
    flex: str | None = None


# UNMOVED and LOCAL are subclasses of Megatron's all-to-all dispatcher.
MEGATRONS = {
    UNMOVED: Words(ALLTOALL), LOCAL: Words(ALLTOALL), ALLGATHER: Words(ALLGATHER),
    ALLTOALL: Words(ALLTOALL), DEEPEP: Words("flex", DEEPEP), HYBRIDEP: Words("flex", HYBRIDEP),
    REFERENCE: Words(ALLGATHER),
}  # fmt: skip
# DeepEP v1.2.1's intranode kernels: half a token and a barrier in a warp's 8 KiB of shared memory,
# copied 32 bytes at a time; a lane of a warp for each of a token's experts.
_RANKS, _HIDDEN, _HIDDEN_UNIT, _TOPK, _LOCAL_EXPERTS = (2, 4, 8), 8176, 16, 32, 128


def named_by(type: str, flex: str) -> str | None:
    """The backend that Megatron's two words name; None for one that is none of ours."""
    for name in (ALLGATHER, ALLTOALL, DEEPEP, HYBRIDEP):
        words = MEGATRONS[name]
        if words.type == type and words.flex in (None, flex):
            return name
    return None


def ranks_of_a_host() -> int:
    """Processes of this run on this host, as a launcher says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def workload(device: str, config, routes: bool, host_ranks: int) -> Workload:
    """routes: the experts take tokens in their order, with a map. host_ranks: processes a host."""
    modules = [getattr(m, "name", m) for m in getattr(config, "cuda_graph_modules", None) or ()]
    graphs = config.cuda_graph_impl not in ("none", "full_iteration")
    return Workload.of(
        device,
        dtype_of(config),
        routes=routes,
        host_ranks=host_ranks,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        hidden_size=config.hidden_size,
        router_dtype=config.moe_router_dtype,
        sms=config.moe_flex_dispatcher_num_sms,
        capacity_factor=config.moe_expert_capacity_factor,
        padded=config.moe_pad_expert_input_to_capacity
        or config.moe_router_padding_for_quantization,
        shared_expert_overlap=config.moe_shared_expert_overlap,
        cuda_graph_impl=config.cuda_graph_impl,
        graphed_moe=graphs and (not modules or any(name.startswith("moe") for name in modules)),
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    if "E" not in recipe.plan.letters:
        return None
    config, routes = config_of(recipe), moe_experts.routes(recipe, device)
    return workload(device, config, routes, recipe.launch.nproc_per_node)


def _every_expert_is_here(workload: Workload) -> str | None:
    """Why LocalTokenDispatcher would not compute what Megatron's does, on any device."""
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if workload.size(name) != 1:
            return f"{name} {workload.size(name)}: experts are on other ranks"
    return _every_token_goes(workload)


def _every_token_goes(workload: Workload) -> str | None:
    if workload.size("capacity_factor") is not None:
        return "moe_expert_capacity_factor: it drops no token"
    if workload.size("padded"):
        return "padded inputs: it delivers each token once for each of its experts"
    if (impl := workload.size("cuda_graph_impl")) not in ("none", "full_iteration"):
        return f"cuda_graph_impl {impl}: Megatron captures parts of its own dispatchers"
    return None


def _streams(workload: Workload) -> str | None:
    return cuda_only("Megatron's all-to-all dispatcher makes CUDA streams and runs", workload)


def _local(workload: Workload) -> str | None:
    return _every_expert_is_here(workload) or _streams(workload)


def _unmoved(workload: Workload) -> str | None:
    if reason := _local(workload):
        return reason
    if not workload.size("routes"):
        return "the experts take tokens sorted by expert"
    return _gathered(workload)


def _gathered(workload: Workload) -> str | None:
    """All-gather, ours or Megatron's; without it the shared expert would be left out."""
    if workload.size("shared_expert_overlap"):
        return "moe_shared_expert_overlap: the shared expert runs between steps that it has not"
    return None


def _exchange(workload: Workload) -> str | None:
    if workload.size("expert_model_parallel_size") == 1:
        return "expert_model_parallel_size 1: there is nothing to exchange"
    return None


def _deepep_shapes(workload: Workload) -> str | None:
    """What DeepEP's intranode kernels and our adapter do not take, on any machine."""
    size = workload.size
    ranks, experts = size("expert_model_parallel_size"), size("num_experts")
    reasons = {
        f"expert_model_parallel_size {ranks}: its kernels within a host are for "
        f"{', '.join(map(str, _RANKS))} ranks": ranks not in _RANKS,
        f"expert_tensor_parallel_size {size('expert_tensor_parallel_size')}: a token goes to one "
        "rank of an expert": size("expert_tensor_parallel_size") != 1,
        f"{size('host_ranks')} processes a host: the {ranks} ranks that exchange tokens must be on "
        "one host": size("host_ranks") % ranks,
        f"hidden_size {size('hidden_size')}: its kernels take multiples of {_HIDDEN_UNIT} up to "
        f"{_HIDDEN}": size("hidden_size") % _HIDDEN_UNIT or size("hidden_size") > _HIDDEN,
        f"moe_router_topk {size('topk')}: its kernels take at most {_TOPK}": size("topk") > _TOPK,
        f"{experts // ranks} experts a rank: its kernels take at most {_LOCAL_EXPERTS}":
            experts // ranks > _LOCAL_EXPERTS,
        f"moe_flex_dispatcher_num_sms {size('sms')}: one of two sends, so that it takes an even "
        "number": (size("sms") or 0) % 2,
        f"{workload.dtype}: its kernels add up bfloat16": workload.dtype != "bfloat16",
        f"moe_router_dtype {size('router_dtype')}: it carries probabilities in float32, set "
        '"fp32"': size("router_dtype") != "fp32",
        "moe_expert_capacity_factor or padded inputs: our adapter delivers every token":
            size("capacity_factor") is not None or size("padded"),
        "moe_shared_expert_overlap: our adapter runs the shared expert while tokens return, anyway":
            size("shared_expert_overlap"),
        'cuda_graph_impl "full_iteration": the host waits for the number of tokens':
            size("cuda_graph_impl") == "full_iteration",
        f'cuda_graph_impl "{size("cuda_graph_impl")}" with MoE modules: the host waits for the '
        "number of tokens": size("graphed_moe"),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def _deepep(workload: Workload) -> str | None:
    reason = _exchange(workload) or cuda_only("its kernels run", workload)
    return (
        reason
        or _deepep_shapes(workload)
        or deep_ep.package_reason()
        or deep_ep.device_reason(workload.size("expert_model_parallel_size"))
    )


def _hybridep(workload: Workload) -> str | None:
    reason = cuda_only("its kernels run", workload)
    return reason or _not_captured(workload) or deep_ep.hybrid_reason()


def _not_captured(workload: Workload) -> str | None:
    if workload.size("cuda_graph_impl") == "full_iteration":
        return 'cuda_graph_impl "full_iteration": the host reads how many tokens each expert gets'
    return None


def _alltoall(workload: Workload) -> str | None:
    return _streams(workload) or _not_captured(workload)


def _slower_gathered(workload: Workload) -> str | None:
    """Why `auto` takes all-to-all where both can serve: all-gather is not known to be faster."""
    if _alltoall(workload):
        return None
    size, ranks = workload.size, workload.size("expert_model_parallel_size")
    if not size("routes"):
        return "the experts take tokens sorted by expert"
    # With one expert-parallel rank every tensor-parallel one has a part of every expert, and gets
    # every token either way: by all-to-all once for each of its experts, by all-gather once.
    reasons = {} if ranks == 1 else {
        f"{ranks} ranks: faster between two, and not timed between more": ranks != 2,
        f"{size('host_ranks')} processes a host: faster within one": size("host_ranks") % 2,
        f"expert_tensor_parallel_size {size('expert_tensor_parallel_size')}: not timed":
            size("expert_tensor_parallel_size") != 1,
    }  # fmt: skip
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or _every_token_goes(workload)


_TESTS = ("tests/layers/test_moe.py", "tests/layers/test_moe_dispatch.py")
_GPU_TESTS = (*_TESTS, "tests/gpu/test_moe_dispatch_gpu.py")
_NO_RECEIPT = (
    "a bench runs in one process: `tests/gpu/dispatch_over_ranks.py` times a layer on two GPUs "
    "(docs/deepep.md has what it said)"
)
_MEGATRON = "megatron.core.transformer.moe.token_dispatcher"
_backend = partial(Backend, tests=_TESTS, no_receipt=_NO_RECEIPT, dtypes="the model's")

SURFACE = Surface(
    NAME,
    (
        _backend(
            UNMOVED, "megacpp_mcore.layers.moe_dispatchers:UnmovedTokenDispatcher", _unmoved,
            role="chosen", ruled_out=whatever_the_machine(_every_expert_is_here),
            removes="the permuted copies of the tokens, where every expert is on this rank and the "
            "experts gather their tokens themselves",
            layout="tokens [s, b, h] as they are, the router's map and weights", fallback=LOCAL,
            exit_when="the experts of a rank never take tokens in their order",
        ),
        _backend(
            LOCAL, "megacpp_mcore.layers.moe_dispatchers:LocalTokenDispatcher", _local,
            ruled_out=whatever_the_machine(_every_expert_is_here),
            removes="the sort of chunks from other ranks and the host's wait for the counts, where "
            "every expert is on this rank",
            layout="tokens [t, h] sorted by expert, counts [experts] on the device",
            fallback=REFERENCE,
            exit_when="Megatron's dispatchers skip both on one rank",
        ),
        _backend(
            DEEPEP, "megacpp_mcore.layers.deepep:DeepEPTokenDispatcher", _deepep,
            opt_in=True, role="experimental",
            ruled_out=whatever_the_machine(_exchange, _deepep_shapes), tests=_GPU_TESTS,
            removes="copies of a token to one rank: each goes once to every rank that has one of "
            "its experts, and its partial sums are added up as they return. Within a host",
            layout="tokens [r, h] in the order of arrival, top-k [r, k] on the device",
            dtypes="bf16, float32 router weights", fallback=ALLTOALL,
            exit_when="an exchange of torch's or NCCL's is as fast within a host",
        ),
        _backend(
            ALLGATHER, "megacpp_mcore.layers.moe_dispatchers:GatheredTokenDispatcher", _gathered,
            opt_in=_slower_gathered, tests=_GPU_TESTS,
            removes="the permuted copies and the host's wait for the counts: every rank of the "
            "group gets every token once. As many bytes as all-to-all where the ranks are as many "
            "as a token's experts, fewer below",
            layout="tokens [ranks t, h] in their order, the router's map and weights",
            fallback=ALLTOALL,
            exit_when="DeepEP is faster with two ranks",
        ),
        _backend(
            ALLTOALL, f"{_MEGATRON}:MoEAlltoAllTokenDispatcher", _alltoall,
            ruled_out=whatever_the_machine(_not_captured), tests=_GPU_TESTS,
            removes="nothing: Megatron's, a permuted copy and NCCL's all-to-all in each direction",
            layout="tokens [t, h] sorted by expert, counts [experts] on the host",
            fallback=REFERENCE,
            exit_when="another serves every layout that it does, and is not slower",
        ),
        _backend(
            HYBRIDEP, f"{_MEGATRON}:MoEFlexTokenDispatcher", _hybridep,
            opt_in=True, role="experimental",
            ruled_out=whatever_the_machine(_not_captured),
            removes="the permutation around DeepEP's exchange. Megatron's own adapter to DeepEP's "
            "branch hybrid-ep; not run by us",
            layout="tokens [t, h] sorted by expert", dtypes="bf16", fallback=ALLTOALL,
            exit_when="it has run on two H200s, or upstream merges the branch",
        ),
        reference(
            f"{_MEGATRON}:MoEAllGatherTokenDispatcher", _gathered,
            removes="nothing: Megatron's all-gather dispatcher, collectives and indexing in torch",
            layout="tokens [t, h] sorted by expert, counts [experts] on the host",
            dtypes="any", tests=_TESTS, no_receipt=_NO_RECEIPT,
        ),
    ),
    of_recipe,
    blocks="E",
)  # fmt: skip
