"""The exchange of tokens between two ranks: all-gather and DeepEP (its Buffer faked on gloo)."""

import gc
import sys

import fake_deep_ep
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megacpp_mcore import dispatch
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces import deep_ep, moe_dispatch, support

HIDDEN, EXPERTS, TOPK = 16, 6, 3
SHARED = {"moe_shared_expert_intermediate_size": 24}
ON_TWO = ["parallel.expert_model_parallel_size=2", "launch.nproc_per_node=2"]


def layer(cls, dispatcher: str, experts, seed: int = 3, **more):
    """A MoE layer over the ranks of the process group; the same weights for every class."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.layers.settings import PluginSettings, attach

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=24, moe_token_dispatcher_type="allgather",
        moe_router_score_function="sigmoid", moe_router_dtype="fp32", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, moe_grouped_gemm=False,
        bias_activation_fusion=False, use_cpu_initialization=True,
        moe_router_load_balancing_type="none",
        **({"expert_model_parallel_size": dist.get_world_size(), "moe_router_topk": TOPK} | more),
    )  # fmt: skip
    attach(config, PluginSettings(backends={"moe_dispatch": dispatcher}))
    submodules = get_moe_module_spec(use_te=False, num_experts=1).keywords["submodules"]
    submodules.experts = experts
    built = cls(config, submodules, layer_number=1)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in built.named_parameters():
        of_experts = ".experts." in f".{name}" and "shared" not in name
        # A rank has some of the experts, or a part of each.
        count = built.num_local_experts * dist.get_world_size() if of_experts else 1
        whole = 0.3 * torch.randn(count, *parameter.shape[-2:], generator=generator)
        with torch.no_grad():
            part = whole.chunk(dist.get_world_size())[dist.get_rank()] if of_experts else whole
            parameter.copy_(part.view(parameter.shape))
    return built


def run(built, tokens: int, skew: bool = False):
    """Output and gradients of this rank's tokens; the last three experts get none where skewed."""
    generator = torch.Generator().manual_seed(tokens + 100 * dist.get_rank())
    x = torch.randn(tokens, 2, HIDDEN, generator=generator)
    if skew:
        x[..., 0] = 5.0
        with torch.no_grad():
            built.router.weight[3:, 0] = -9.0
    x.requires_grad_()
    y, _ = built(x)
    (y * torch.randn(y.shape, generator=generator)).sum().backward()
    grads = {name: parameter.grad for name, parameter in built.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def deviation(found, expected) -> float:
    """The largest difference, in units of a value's largest."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in expected.items()
    )


def start() -> None:
    """In a rank: Megatron's groups, a fake deep_ep, and a layer that takes this for a GPU."""
    from megatron.core import parallel_state

    from megacpp_mcore.layers import moe

    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    fake_deep_ep.install()
    fake_deep_ep.calls.clear()
    moe.current_device = lambda: "cuda"
    deep_ep.device_reason = lambda ranks: None
    moe_dispatch.dtype_of = lambda config: "bfloat16"  # the fake takes float32, too


def check_values(rank: int, folder: str) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megacpp_mcore.layers import deepep, moe_dispatchers
    from megacpp_mcore.layers.experts import FusedExperts, GroupedMMExperts
    from megacpp_mcore.layers.moe import MegacppMoELayer

    start()
    classes = {
        "deepep": deepep.DeepEPTokenDispatcher,
        "allgather": moe_dispatchers.GatheredTokenDispatcher,
    }
    # float32; a value is a sum of at most ffn 24 x top-3 products, a weight's gradient of 2 x 2 t
    for tokens, skew in ((1, False), (7, False), (9, True)):
        bound = 8 * torch.finfo(torch.float32).eps * max(24 * 3, 4 * tokens)
        for shared in ({}, SHARED):
            theirs = layer(MoELayer, "reference", GroupedMMExperts, **shared)
            expected = run(theirs, tokens, skew)
            for experts in (FusedExperts, GroupedMMExperts):
                for name, cls in classes.items():
                    ours = layer(MegacppMoELayer, name, experts, **shared)
                    assert type(ours.token_dispatcher) is cls
                    assert ours.delivered_whole == (experts is FusedExperts)
                    found = run(ours, tokens, skew)
                    worst = deviation(found, expected)
                    assert worst <= bound, (name, experts.__name__, tokens, skew, worst / bound)
                    assert ours._shared is None and ours._tokens is None
    assert fake_deep_ep.calls["buffers"] == 1, "one for all layers of a group"
    said = {d.observed: d for d in dispatch.decisions() if d.surface == "moe_dispatch"}
    assert said["deepep"].requested == "deepep" and said["deepep"].load() is classes["deepep"]
    deepep.close()
    deepep.close()
    assert fake_deep_ep.calls["destroyed"] == 1


@pytest.mark.slow
def test_two_ranks_compute_what_megatrons_dispatcher_does(tmp_path):
    run_ranks(check_values, tmp_path)


def check_few_experts(rank: int, folder: str) -> None:
    """A rank has three of a token's four experts at most, and rows for no more."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megacpp_mcore.layers import deepep
    from megacpp_mcore.layers.experts import FusedExperts, GroupedMMExperts
    from megacpp_mcore.layers.moe import MegacppMoELayer

    start()
    more, tokens = {"moe_router_topk": 4}, 7
    bound = 8 * torch.finfo(torch.float32).eps * max(24 * 4, 4 * tokens)
    expected = run(layer(MoELayer, "reference", GroupedMMExperts, **more), tokens)
    for name in ("allgather", "deepep"):
        rows = []
        ours = layer(MegacppMoELayer, name, FusedExperts, **more)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept, rows=rows: rows.append(kept.shape) or kept, lambda kept: kept
        ):
            found = run(ours, tokens)
        assert deviation(found, expected) <= bound, name
        arrived = max(shape[0] for shape in rows if shape[1:] == (HIDDEN,))
        assert (3 * arrived, 48) in rows, (name, rows)
    deepep.close()


@pytest.mark.slow
def test_rows_are_for_the_experts_that_a_rank_has(tmp_path):
    run_ranks(check_few_experts, tmp_path)


SPLIT = {
    "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True,
    "expert_model_parallel_size": 1,
}  # fmt: skip


def check_split_experts(rank: int, folder: str) -> None:
    """Each rank has half of every expert, and of the tokens."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megacpp_mcore.layers.experts import FusedExperts, GroupedMMExperts
    from megacpp_mcore.layers.moe import MegacppMoELayer

    parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=2)
    for tokens, skew in ((1, False), (7, False), (9, True)):
        # As above; what a rank returns is a sum over both.
        bound = 8 * torch.finfo(torch.float32).eps * max(2 * 24 * 3, 4 * tokens)
        expected = run(layer(MoELayer, "reference", GroupedMMExperts, **SPLIT), tokens, skew)
        ours = layer(MegacppMoELayer, "allgather", FusedExperts, **SPLIT)
        assert ours.delivered_whole
        worst = deviation(run(ours, tokens, skew), expected)
        assert worst <= bound, (tokens, skew, worst / bound)


@pytest.mark.slow
def test_experts_split_by_tensor_parallelism_compute_what_megatrons_dispatcher_does(tmp_path):
    run_ranks(check_split_experts, tmp_path)


def check_memory(rank: int, folder: str) -> None:
    """No tensor of a step is kept, without the garbage collector; recomputed it is the same."""
    from functools import partial

    from megacpp_mcore.kernels.moe_experts.weights import Experts
    from megacpp_mcore.layers import exchange
    from megacpp_mcore.layers.experts import FusedExperts
    from megacpp_mcore.layers.moe import MegacppMoELayer
    from megacpp_mcore.layers.recompute import recomputed

    start()
    for name in ("deepep", "allgather"):
        ours = layer(MegacppMoELayer, name, FusedExperts, **SHARED)
        gc.collect()
        gc.disable()
        counted = []
        for _ in range(5):
            kept = run(ours, 7)
            counted.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
        gc.enable()
        # What is kept adds up; gloo's threads may hold the last exchange a moment longer.
        assert min(counted[2:]) <= counted[1], (name, counted)
        again = layer(MegacppMoELayer, name, FusedExperts, **SHARED)
        again.experts.routed = partial(recomputed, again.config, None, again.experts.routed)
        kept = run(layer(MegacppMoELayer, name, FusedExperts, **SHARED), 7)
        found = run(again, 7)
        assert all(torch.equal(found[key], value) for key, value in kept.items())
        with torch.no_grad():
            x = torch.randn(3, 2, HIDDEN)
            y, _ = ours(x)
        assert not y.requires_grad and ours._tokens is None and ours._shared is None
    # The sums return while the shared expert computes: it is asked between the two.
    order = []
    dispatcher = ours.token_dispatcher
    for owner, name in ((dispatcher, "begin_combine"), (ours.shared_experts, "forward"),
                        (dispatcher, "end_combine")):  # fmt: skip
        call = getattr(owner, name)
        setattr(owner, name, lambda *a, call=call, name=name: order.append(name) or call(*a))
    run(ours, 3)
    assert order == ["begin_combine", "forward", "end_combine"]
    # In the backward pass the tokens' gradients travel while those of fc1's weight are computed.
    order.clear()
    summed, weight_gradient = exchange.AllGather.backward, Experts.gradient

    def spy_sum(self, gradient):
        order.append("sum") if gradient.shape[1] == HIDDEN else None
        return summed(self, gradient)

    def spy_weight(experts, weight, *arguments):
        order.append("w1" if weight is experts.w1 else "w2")
        return weight_gradient(experts, weight, *arguments)

    exchange.AllGather.backward, Experts.gradient = spy_sum, spy_weight
    run(ours, 3)
    forward = ["begin_combine", "sum", "forward", "end_combine"]
    assert order == [*forward, "w2", "sum", "w1"], order


@pytest.mark.slow
def test_nothing_is_kept_and_recomputing_changes_nothing(tmp_path):
    run_ranks(check_memory, tmp_path)


def test_a_worst_case_that_is_allocated_brings_no_row_of_its_own():
    """Rows that nothing arrived for are marked -1, whatever their weights are."""
    from megacpp_mcore.layers.moe_dispatchers import as_map, chosen_experts

    routing_map = torch.rand(9, EXPERTS).argsort(1) < 2
    routing_map[4] = False
    probs = torch.rand(9, EXPERTS).masked_fill(~routing_map, 0.0)
    probs[2] = 0.0  # chosen all the same
    probs.requires_grad_()
    chosen, weights = chosen_experts(routing_map, probs, TOPK)
    assert chosen.dtype == torch.int64 and (chosen[4] == -1).all()
    found, spread = as_map(chosen, weights, EXPERTS)
    assert torch.equal(found, routing_map) and torch.equal(spread, probs)
    direction = torch.randn(9, EXPERTS)
    (spread * direction).sum().backward()
    assert torch.equal(probs.grad, torch.where(routing_map, direction, 0.0))


@pytest.fixture
def no_deep_ep(monkeypatch):
    """As where it is not installed, whatever is; asked on a GPU."""
    for name in ("deep_ep", "deep_ep.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(deep_ep, "device_reason", lambda ranks: None)
    support.import_reason.cache_clear()
    dispatch.forget()
    yield monkeypatch
    support.import_reason.cache_clear()
    dispatch.forget()
    for name in ("deep_ep", "deep_ep.utils"):
        sys.modules.pop(name, None)


def asked(*overrides):
    return moe_dispatch.SURFACE.workload(load_recipe("nam56r", [*ON_TWO, *overrides]), "cuda")


def test_absent_it_is_passed_over_with_the_reason_and_refused_by_name(no_deep_ep):
    decision = dispatch.choose("moe_dispatch", asked())
    assert decision.observed == "allgather"
    assert "deepep: cannot import deep_ep: ModuleNotFoundError" in decision.reason
    assert "docs/deepep.md" in decision.reason
    with pytest.raises(dispatch.DispatchError, match=r"'deepep' is named .* cannot import deep_ep"):
        dispatch.choose("moe_dispatch", asked(), {"moe_dispatch": "deepep"})
    dispatch.strict(True)
    assert dispatch.choose("moe_dispatch", asked()).observed == "allgather", "absent, not broken"


@pytest.mark.parametrize("padding", [
    ["moe.moe_router_padding_for_quantization=true", "moe.moe_router_fusion=false"],
    ["moe.moe_pad_expert_input_to_capacity=true", "moe.moe_expert_capacity_factor=1.0"],
])  # fmt: skip
def test_padded_inputs_are_known_by_either_key(padding):
    assert asked(*padding).size("padded") and not asked().size("padded")


FOUR = ["parallel.expert_model_parallel_size=4", "launch.nproc_per_node=4"]
NOT_GATHERED = {
    "four ranks": (FOUR, "4 ranks: faster between two"),
    "two hosts": (["launch.nproc_per_node=1", "launch.nnodes=2"], "1 processes a host"),
    "sorted rows": (["backends.moe_experts=grouped_mm"], "sorted by expert"),
    "dropped": (["moe.moe_expert_capacity_factor=1.0"], "moe_expert_capacity_factor"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_all_gather_is_taken_where_it_was_faster_and_elsewhere_by_name(no_deep_ep, name):
    overrides, reason = NOT_GATHERED[name]
    workload = asked(*overrides)
    decision = dispatch.choose("moe_dispatch", workload)
    assert decision.observed == "alltoall"
    assert reason in decision.reason.partition("allgather: ")[2]
    named = dispatch.choose("moe_dispatch", workload, {"moe_dispatch": "allgather"})
    assert named.observed == "allgather"


TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
       "parallel.expert_model_parallel_size=1"]  # fmt: skip


def test_experts_split_by_tensor_parallelism_get_each_token_once(no_deep_ep):
    for hosts in ([], ["launch.nproc_per_node=1", "launch.nnodes=2"]):
        assert dispatch.choose("moe_dispatch", asked(*TP2, *hosts)).observed == "allgather"
    sorted_rows = asked(*TP2, "backends.moe_experts=grouped_mm")
    assert dispatch.choose("moe_dispatch", sorted_rows).observed == "alltoall"
    both = asked(*TP2[:2], "launch.nproc_per_node=4")
    assert "expert_tensor_parallel_size 2: not" in dispatch.choose("moe_dispatch", both).reason


@pytest.mark.parametrize("named", ["allgather", "reference"])
def test_all_gather_has_no_steps_for_a_shared_expert_to_run_between(no_deep_ep, named):
    """Megatron's layer leaves the shared expert to a dispatcher that would never call it."""
    workload = asked("moe.moe_shared_expert_overlap=true")
    assert dispatch.choose("moe_dispatch", workload).observed == "alltoall"
    with pytest.raises(dispatch.DispatchError, match="moe_shared_expert_overlap: the shared"):
        dispatch.choose("moe_dispatch", workload, {"moe_dispatch": named})


FAILURES = {
    "V2 raises": (AssertionError("NCCL version mismatch"), "AssertionError: NCCL version"),
    "another torch": (
        ImportError("deep_ep_cpp.so: undefined symbol: _ZN3c106detail14torchCheckFail"),
        "built for another torch",
    ),
    "NVSHMEM": (
        ImportError("libnvshmem_host.so.3: cannot open shared object file"), "NVSHMEM, whose",
    ),
    "NVSHMEM symbols": (ImportError("undefined symbol: nvshmem_ptr"), "NVSHMEM, whose library"),
    "not device-linked": (
        ImportError("undefined symbol: __cudaRegisterLinkedBinary_ab_intranode"), "-rdc=true",
    ),
    "another CUDA": (ImportError("libcudart.so.12: cannot open"), "built for another CUDA"),
    "no driver": (OSError("libcuda.so.1: cannot open shared object file"), "OSError"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_an_import_that_fails_is_a_reason_and_broken(no_deep_ep, name):
    error, words = FAILURES[name]

    class Finder:
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module == "deep_ep":
                raise error

    no_deep_ep.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    reason = deep_ep.package_reason()
    assert words in reason and isinstance(reason, support.Broken)
    dispatch.strict(True)
    with pytest.raises(dispatch.DispatchError, match="its package is broken"):
        dispatch.choose("moe_dispatch", asked())


INTERFACES = {
    "V2, which Megatron takes for absent": (("EventOverlap", "EventHandle"), {}, "EventOverlap"),
    "a package of that name": (("Buffer",), {"__version__": "0.1"}, "deep_ep 0.1 lacks Buffer"),
    "an older tag": (
        (), {"Buffer": fake_deep_ep.without_argument("dispatch", "num_worst_tokens")},
        "Buffer.dispatch(num_worst_tokens=)",
    ),
    "an older constructor": (
        (), {"Buffer": fake_deep_ep.without_argument("__init__", "explicitly_destroy")},
        "Buffer.__init__(explicitly_destroy=)",
    ),
    "a Buffer without a method": ((), {"Buffer": type("Buffer", (), {})}, "Buffer.combine"),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERFACES)
def test_another_interface_is_a_reason(no_deep_ep, name):
    lacking, more, words = INTERFACES[name]
    fake_deep_ep.install(lacking, **more)
    reason = deep_ep.package_reason()
    assert words in reason and "not v1.2.1" in reason and isinstance(reason, support.Broken)


def test_v1_2_1_serves_and_the_hybrid_branch_is_another_package(no_deep_ep):
    fake_deep_ep.install()
    assert deep_ep.package_reason() is None
    assert dispatch.choose("moe_dispatch", asked(), {"moe_dispatch": "deepep"}).observed == "deepep"
    with pytest.raises(dispatch.DispatchError, match="branch hybrid-ep"):
        dispatch.choose("moe_dispatch", asked(), {"moe_dispatch": "hybridep"})
    support.import_reason.cache_clear()
    fake_deep_ep.install(HybridEPBuffer=object)
    assert deep_ep.hybrid_reason() is None


SHAPES = {
    "three ranks": (["parallel.expert_model_parallel_size=16", "launch.nproc_per_node=16"],
                    "2, 4, 8 ranks"),
    "two hosts": (["launch.nproc_per_node=1", "launch.nnodes=2"], "on one host"),
    "width": (["model.hidden_size=3592", "model.num_attention_heads=449",
               "attention.kv_channels=8"], "multiples of 16"),
    "wide": (["model.hidden_size=8192", "model.num_attention_heads=64"], "up to 8176"),
    "fp32": (["precision.bf16=false"], "bfloat16"),
    "weights": (["moe.moe_router_dtype=fp64"], "moe_router_dtype fp64"),
    "SMs": (["moe.moe_flex_dispatcher_num_sms=21"], "even number"),
    "dropped": (["moe.moe_expert_capacity_factor=1"], "every token"),
    "overlap": (["moe.moe_shared_expert_overlap=true"], "anyway"),
    "top-k": (["moe.num_experts=64", "moe.moe_router_topk=33"], "at most 32"),
    "experts": (["moe.num_experts=512"], "256 experts a rank"),
    "expert TP": (["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
                   "launch.nproc_per_node=4"],
                  "expert_tensor_parallel_size 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_its_kernels_do_not_take_are_reasons(no_deep_ep, name):
    overrides, words = SHAPES[name]
    fake_deep_ep.install()
    verdicts = dispatch.verdicts("moe_dispatch", asked(*overrides))
    assert words in verdicts["deepep"]


def test_gpus_without_nvlink_and_other_chips_are_reasons(monkeypatch):
    cuda = {
        "get_device_capability": lambda: (9, 0), "device_count": lambda: 4,
        "can_device_access_peer": lambda i, j: {i, j} != {0, 3},
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(deep_ep, "_without_nvlink", lambda i, j: {i, j} == {1, 2})
    ask = deep_ep.device_reason.__wrapped__
    assert ask(2) is None
    assert ask(4) == "no NVLink between GPUs 2 and 1, 3 and 0"
    assert "4 GPUs are visible" in ask(8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ask(8) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "compute capability 10.0" in ask(2)


WORDS = {
    # what a recipe says -> (the request, Megatron's two words)
    "nothing": ([], ("auto", "alltoall", "deepep")),
    "nothing, one rank": (
        ["parallel.expert_model_parallel_size=1"], ("auto", "alltoall", "deepep")
    ),
    "ours": (["backends.moe_dispatch=deepep"], ("deepep", "flex", "deepep")),
    "ours, hybrid": (["backends.moe_dispatch=hybridep"], ("hybridep", "flex", "hybridep")),
    "ours, gathered": (["backends.moe_dispatch=allgather"], ("allgather", "allgather", "deepep")),
    "Megatron's": (["moe.moe_token_dispatcher_type=flex"], ("deepep", "flex", "deepep")),
    "Megatron's two": (
        ["moe.moe_token_dispatcher_type=flex", "moe.moe_flex_dispatcher_backend=hybridep"],
        ("hybridep", "flex", "hybridep"),
    ),
    "Megatron's default": (
        ["moe.moe_token_dispatcher_type=allgather"], ("allgather", "allgather", "deepep")
    ),
    "both, the same": (
        ["backends.moe_dispatch=alltoall", "moe.moe_token_dispatcher_type=alltoall"],
        ("alltoall", "alltoall", "deepep"),
    ),
    "auto over Megatron's": (
        ["backends.moe_dispatch=auto", "moe.moe_token_dispatcher_type=allgather"],
        ("auto", "allgather", "deepep"),
    ),
    "Megatron's, where nothing is exchanged": (
        ["moe.moe_token_dispatcher_type=alltoall", "parallel.expert_model_parallel_size=1"],
        (None, "alltoall", "deepep"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_recipe_says_it_in_one_way_and_the_other_follows(name):
    overrides, expected = WORDS[name]
    recipe = load_recipe("nam56r", [*ON_TWO, *overrides])
    moe = recipe.moe
    assert (
        recipe.backends.get("moe_dispatch"),
        moe.moe_token_dispatcher_type,
        moe.moe_flex_dispatcher_backend,
    ) == expected


def test_on_one_rank_nothing_is_exchanged():
    recipe = load_recipe("nam56r-tiny")
    assert recipe.moe.moe_token_dispatcher_type == "allgather", "the others make CUDA streams"
    workload = moe_dispatch.SURFACE.workload(recipe, "cpu")
    assert dispatch.choose("moe_dispatch", workload).observed == "allgather"
    whole = load_recipe("nam56r", ["launch.nproc_per_node=2"])
    sizes = {**dict(moe_dispatch.SURFACE.workload(whole, "cuda").sizes), "routes": True}
    one_rank = moe_dispatch.Workload.of("cuda", "bfloat16", **sizes)
    assert dispatch.choose("moe_dispatch", one_rank).observed == "unmoved"
    captured = moe_dispatch.Workload.of("cuda", "bfloat16", **(sizes | {"routes": False}))
    assert dispatch.choose("moe_dispatch", captured).observed == "local"
