"""Our MoE layer where every expert is local, compared with Megatron's own dispatcher on the CPU."""

import contextlib
import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.utils.checkpoint import checkpoint

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.kernels.router_gating.fp32_output import router_gating
from megacpp_mcore.kernels.router_topk.fused import router_topk
from megacpp_mcore.layers import moe
from megacpp_mcore.layers.experts import FusedExperts, GroupedMMExperts
from megacpp_mcore.layers.moe import MegacppMoELayer, MoELayerError
from megacpp_mcore.layers.moe_dispatchers import (
    GatheredTokenDispatcher,
    LocalTokenDispatcher,
    UnmovedTokenDispatcher,
)
from megacpp_mcore.layers.recompute import recomputed
from megacpp_mcore.layers.router import DispatchedTopKRouter
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, EXPERTS = 16, 6


class _Stream:
    """Stands in for a CUDA stream, which Megatron's dispatcher makes as it is built."""

    def wait_stream(self, other):
        raise AssertionError("something was copied to the host")


class CopyingStream:
    """One on which something may be copied to the host."""

    waits = 0

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        CopyingStream.waits += 1


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(moe, "current_device", lambda: "cuda")
    with single_process(1):
        yield


_FIELDS = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
    "moe_router_topk": 3, "moe_ffn_hidden_size": 24, "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp64", "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
    "moe_grouped_gemm": False, "bias_activation_fusion": False, "use_cpu_initialization": True,
    "moe_router_load_balancing_type": "none",
}  # fmt: skip


def config(dispatcher: str, named: str = "auto", **more) -> TransformerConfig:
    built = TransformerConfig(moe_token_dispatcher_type=dispatcher, **(_FIELDS | more))
    return attach(built, PluginSettings(backends={"moe_dispatch": named}))


def layer(cls: type, dispatcher: str, experts=GroupedMMExperts, **more) -> MoELayer:
    torch.manual_seed(3)
    submodules = get_moe_module_spec(use_te=False, num_experts=1).keywords["submodules"]
    submodules.experts = experts
    built = cls(config(dispatcher, **more), submodules, layer_number=1)
    torch.manual_seed(4)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def run(built: MoELayer, tokens: int, skew: bool):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 2, HIDDEN, generator=generator)
    if skew:  # the last three experts get no token at all
        x[..., 0] = 5.0
        with torch.no_grad():
            built.router.weight[3:, 0] = -9.0
    x.requires_grad_()
    y, _ = built(x)
    (y * torch.randn(y.shape, generator=generator)).sum().backward()
    return y, x.grad, {n: p.grad for n, p in built.named_parameters()}


SERVED = [
    pytest.param(GroupedMMExperts, LocalTokenDispatcher, "local", id="grouped_mm"),
    pytest.param(FusedExperts, UnmovedTokenDispatcher, "unmoved", id="fused"),
]


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 32])
@pytest.mark.parametrize(("experts", "dispatcher", "name"), SERVED)
def test_it_computes_what_megatrons_dispatcher_does(
    process, experts, dispatcher, name, tokens, skew
):
    dispatch.forget()
    shared = {"moe_shared_expert_intermediate_size": 24}
    ours = layer(MegacppMoELayer, "alltoall", experts, **shared)
    theirs = layer(MoELayer, "allgather", **shared)
    assert type(ours.token_dispatcher) is dispatcher
    (said,) = [d for d in dispatch.decisions() if d.surface == "moe_dispatch"]
    assert (said.requested, said.observed) == ("auto", name)
    assert said.load() is dispatcher
    y, dx, grads = run(ours, tokens, skew)
    expected_y, expected_dx, expected = run(theirs, tokens, skew)
    # float32; a value is a sum of at most ffn 24 x top-3 products, a weight's gradient of 2 t
    bound = 4 * torch.finfo(torch.float32).eps * max(24 * 3, 2 * tokens)
    pairs = [(y, expected_y), (dx, expected_dx), *((grads[n], g) for n, g in expected.items())]
    assert grads.keys() == expected.keys()
    if skew:
        assert not expected["experts.linear_fc1.weight"][3:].any()
    for actual, reference in pairs:
        assert reference.abs().max() > 0
        assert (actual - reference).abs().max() <= bound * reference.abs().max()


def with_our_router(monkeypatch, built: MoELayer) -> None:
    """Its product takes bf16 alone; what it does is exact for float32, too, on a CPU."""
    router = built.router
    router.__class__ = DispatchedTopKRouter
    router.product, router.choose, router.computed = router_gating, router_topk, None
    monkeypatch.setattr(fp32_output, "_check", lambda *args: None)
    assert router.gate(router.weight) is router.weight


def with_exact_gradients(monkeypatch) -> None:
    """Those of our router's product, as Megatron's: not of parts in bf16."""
    exact = lambda dlogits, x, weight, for_x: (dlogits @ weight, dlogits.t() @ x)  # noqa: E731
    monkeypatch.setattr(fp32_output, "_backward", exact)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("what", ["experts", "layer"])
def test_recomputed_it_computes_the_same(process, monkeypatch, what, ours):
    """The experts' sum alone, or the whole layer, with the gradients' common sum."""
    # Megatron's own saves the CUDA device's random state
    monkeypatch.setattr(
        tensor_parallel,
        "checkpoint",
        lambda function, _, *args: checkpoint(function, *args, use_reentrant=True),
    )
    more = {"moe_shared_expert_intermediate_size": 24}
    if what == "layer":
        more |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    kept = layer(MegacppMoELayer, "alltoall", FusedExperts, moe_shared_expert_intermediate_size=24)
    again = layer(MegacppMoELayer, "alltoall", FusedExperts, **more)
    if what == "experts":
        again.experts.routed = partial(recomputed, again.config, None, again.experts.routed)
    for built in (kept, again) if ours else ():
        with_our_router(monkeypatch, built)
    expected_y, expected_dx, expected = run(kept, 7, skew=False)
    y, dx, grads = run(again, 7, skew=False)
    assert torch.equal(y, expected_y) and torch.equal(dx, expected_dx)
    assert all(torch.equal(grads[name], value) for name, value in expected.items())


def test_without_gradients_nothing_is_kept(process):
    ours = layer(MegacppMoELayer, "alltoall", FusedExperts)
    x = torch.randn(5, 2, HIDDEN)
    expected, _ = ours(x)
    with torch.no_grad():
        y, _ = ours(x)
    assert torch.equal(y, expected) and not y.requires_grad
    assert ours._readers is None and ours.token_dispatcher.probs is None


@pytest.mark.parametrize(
    ("experts", "router"),
    [(GroupedMMExperts, "megatrons"), (FusedExperts, "megatrons"), (FusedExperts, "ours")],
)
def test_nothing_of_a_step_is_left_for_the_garbage_collector(process, monkeypatch, experts, router):
    """The recipes switch it off (manual_gc): a cycle would keep a step's activations for ever."""
    ours = layer(MegacppMoELayer, "alltoall", experts, moe_shared_expert_intermediate_size=24)
    if router == "ours":
        with_our_router(monkeypatch, ours)

    def tensors() -> int:
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        counted = []
        for _ in range(3):
            run(ours, 7, skew=False)
            counted.append(tensors())
    finally:
        gc.enable()
    assert counted[1] == counted[2], counted


def test_a_shared_expert_that_overlaps_keeps_the_dispatcher(process):
    """It runs between the dispatcher's steps, of which experts that route inside have none."""
    overlapped = {
        "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True,
    }  # fmt: skip
    ours = layer(MegacppMoELayer, "alltoall", FusedExperts, **overlapped)
    assert type(ours.token_dispatcher) is LocalTokenDispatcher and not ours.routed_inside


class HostCountExperts(GroupedMMExperts):
    """Experts that need the tokens of each expert on the host, as Transformer Engine's do."""

    counts_on_device = False


def test_experts_that_count_on_the_host_get_their_counts_there(process, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", CopyingStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    ours = layer(MegacppMoELayer, "alltoall", HostCountExperts)
    assert not ours.token_dispatcher.counts_on_device
    before = CopyingStream.waits
    found = run(ours, 7, skew=False)
    assert CopyingStream.waits == before + 1
    expected = run(layer(MegacppMoELayer, "alltoall"), 7, skew=False)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_another_dispatcher_or_dropped_tokens_keep_megatrons(process):
    dispatch.forget()
    named = layer(MegacppMoELayer, "allgather", named="allgather")
    assert type(named.token_dispatcher) is GatheredTokenDispatcher
    dropping = layer(MegacppMoELayer, "alltoall", moe_expert_capacity_factor=1.0)
    assert type(dropping.token_dispatcher) is MoEAlltoAllTokenDispatcher
    assert dropping.config.moe_token_dispatcher_type == "alltoall"
    said = [d for d in dispatch.decisions() if d.surface == "moe_dispatch"]
    assert [(d.requested, d.observed) for d in said] == [
        ("allgather", "allgather"), ("auto", "alltoall"),
    ]  # fmt: skip
    assert "moe_expert_capacity_factor: it drops no token" in said[1].reason


def test_a_captured_step_refuses_what_the_host_has_to_know(process):
    captured = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    assert layer(MegacppMoELayer, "alltoall", **captured).token_dispatcher.counts_on_device
    with pytest.raises(MoELayerError, match="exchanged between ranks or dropped"):
        layer(MegacppMoELayer, "alltoall", moe_expert_capacity_factor=1.0, **captured)

    def on_the_host(num_local_experts, config, pg_collection=None, name=None):
        experts = torch.nn.Module()
        experts.config = SimpleNamespace()
        return experts

    with pytest.raises(MoELayerError, match=r'set backends.moe_experts = "grouped_mm"'):
        layer(MegacppMoELayer, "alltoall", experts=on_the_host, **captured)
    # An exchange by all-gather has no counts, for experts that take tokens in their order.
    gathered = captured | {"named": "allgather"}
    built = layer(MegacppMoELayer, "allgather", experts=FusedExperts, **gathered)
    assert type(built.token_dispatcher) is GatheredTokenDispatcher and built.delivered_whole
    with pytest.raises(MoELayerError, match=r'set backends.moe_experts = "fused_moe"'):
        layer(MegacppMoELayer, "allgather", **gathered)
    with pytest.raises(MoELayerError, match="exchanged between ranks or dropped"):
        layer(MegacppMoELayer, "allgather", experts=FusedExperts, moe_expert_capacity_factor=1.0,
              **gathered)  # fmt: skip
