"""Our router: its gating product, its choice of experts, and its part of the tokens' gradient."""

import dataclasses
from functools import partial

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed
from megacpp_mcore.kernels.moe_experts.readers import MOST_GATES, readers
from megacpp_mcore.kernels.moe_experts.routing import allocated
from megacpp_mcore.kernels.router_gating.fp32_output import router_gating
from megacpp_mcore.kernels.router_topk import fused
from megacpp_mcore.layers.router import DispatchedTopKRouter
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, EXPERTS, TOPK = 16, 6, 3
_EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def process():
    with single_process(1):
        yield


def config(**more) -> TransformerConfig:
    fields = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2,
        "num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "add_bias_linear": False,
        "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32",
        "use_cpu_initialization": True, "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    return TransformerConfig(**(fields | more))


def router(cls, settings: TransformerConfig, **ours):
    torch.manual_seed(3)
    built = cls(config=settings, pg_collection=get_default_pg_collection(), **ours)
    built.set_layer_number(1)
    if built.expert_bias is not None:
        built.expert_bias.normal_(std=0.3)
    return built


CHOICES = {
    "plain": {},
    "biased": {"moe_router_enable_expert_bias": True},
    "scaled": {"moe_router_topk_scaling_factor": 2.5},
    "balanced": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
    "all": {
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 0.5,
        "moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.3],
        "moe_z_loss_coeff": 0.1, "calculate_per_token_loss": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", ["training", "evaluation", "no_grad"])
@pytest.mark.parametrize("case", CHOICES)
def test_our_choice_is_megatrons_router(case, mode):
    """Weights, map, counts, gradients, and the losses that are logged; Megatron's are unfused."""
    settings, tokens, found = config(**CHOICES[case]), 37, []
    logits = torch.randn(tokens, 1, EXPERTS) * 2
    directions = torch.randn(tokens, EXPERTS)
    for build in (
        TopKRouter,
        partial(DispatchedTopKRouter, product=None, choose=fused.router_topk),
    ):
        built = router(build, settings).train(mode == "training")
        leaf = logits.clone().requires_grad_()
        get_moe_metrics_tracker().clear()
        with torch.set_grad_enabled(mode != "no_grad"), torch.compiler.set_stance("force_eager"):
            probs, routing_map = built.routing(leaf)
        if mode != "no_grad":
            (probs * directions).sum().backward()
        logged = {n: e.values.clone() for n, e in get_moe_metrics_tracker().metrics.items()}
        found.append((probs, leaf.grad, built.local_tokens_per_expert, routing_map, logged))
    (*expected, of_map, of_log), (*values, routing_map, logged) = found
    assert torch.equal(routing_map, of_map) and logged.keys() == of_log.keys()
    balanced = "load_balancing_loss" in logged
    assert balanced == (mode == "training" and "moe_aux_loss_coeff" in CHOICES[case])
    expected += of_log.values()
    values += logged.values()
    for ours, theirs in zip(values, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:  # sums over tokens or experts, in another order
            bound = 4 * (tokens + EXPERTS) * _EPS * theirs.abs().amax()
            assert (ours - theirs).abs().amax() <= bound


def test_a_batch_with_padding_is_megatrons_and_the_record_says_so():
    dispatch.forget()
    settings = attach(config(**CHOICES["all"]), PluginSettings(backends={"router_topk": "triton"}))
    built = router(DispatchedTopKRouter, settings, product=None, choose=None)
    logits, padding = torch.randn(9, 2, EXPERTS), torch.rand(9, 2) < 0.3
    with torch.compiler.set_stance("force_eager"):
        expected, _ = built.routing(logits, padding)
        built.choose = fused.router_topk
        assert not dispatch.decisions()
        found, _ = built.routing(logits, padding)
    assert torch.equal(found, expected)
    (said,) = dispatch.decisions()
    assert (said.surface, said.requested, said.observed) == ("router_topk", "triton", "reference")
    assert "mask of padding" in said.reason


def layer_gradients(apart: bool, shared: bool) -> dict[str, Tensor]:
    """Of router and experts on the same tokens, which get the router's gradient by its logits."""
    torch.manual_seed(5)
    tokens, ffn = 37, 24
    x, direction = (torch.randn(tokens, HIDDEN).bfloat16() for _ in range(2))
    w1 = (torch.randn(EXPERTS, 2 * ffn, HIDDEN) * 0.3).bfloat16()
    w2 = (torch.randn(EXPERTS, HIDDEN, ffn) * 0.3).bfloat16()
    settings = config(params_dtype=torch.bfloat16, bf16=True, **CHOICES["balanced"])
    built = router(DispatchedTopKRouter, settings, product=router_gating, choose=fused.router_topk)
    leaf = x.requires_grad_()
    gate = built.gate(leaf) if apart else None
    experts, size = Experts(w1, w2), allocated(tokens, TOPK, EXPERTS, 1)
    found = readers(leaf.view(tokens, 1, HIDDEN), size, experts, gate)
    assert (found.logits is not None) == apart
    built.computed = found.logits
    probs, routing_map = built(found.router)
    addend = found.shared.view(tokens, HIDDEN) * 2 if shared else None
    more = found.rows, found.hidden, found
    y = experts_routed(leaf.detach(), routing_map, probs, experts, TOPK, addend, None, *more)
    y.backward(direction)
    return {"x": leaf.grad, "gate": built.weight.grad}


@pytest.mark.parametrize("shared", [True, False])
def test_a_gradient_of_logits_is_summed_as_that_of_tokens(shared):
    apart, usual = (layer_gradients(apart, shared) for apart in (True, False))
    assert torch.equal(apart["gate"], usual["gate"])
    # Its own rounding, and those of the router's and the rounded sum of the others.
    bound = 4 * torch.finfo(torch.bfloat16).eps / 2 * usual["x"].abs().amax()
    assert 0 < (apart["x"].float() - usual["x"].float()).abs().amax() <= bound


def test_who_gates_apart():
    settings = config(params_dtype=torch.bfloat16)
    tokens = torch.zeros(2, 1, HIDDEN, dtype=torch.bfloat16)
    ours = router(DispatchedTopKRouter, settings, product=router_gating, choose=None)
    assert ours.gate(tokens) is ours.weight
    for other, product in (
        (settings, None),
        (dataclasses.replace(settings, moe_input_jitter_eps=0.1), router_gating),
        (dataclasses.replace(settings, num_moe_experts=MOST_GATES + 1), router_gating),
    ):
        built = router(DispatchedTopKRouter, other, product=product, choose=None)
        assert built.gate(tokens) is None


def routed_three_times(built) -> Tensor:
    """The tokens that each expert has had after three batches: no two experts as many."""
    counts = 1000 + torch.arange(EXPERTS)
    logits = torch.nn.functional.one_hot(torch.arange(EXPERTS).repeat_interleave(counts)).float()
    for _ in range(3):
        built.routing(logits.requires_grad_())
    return 3 * counts


@pytest.mark.parametrize("choose", [None, fused.router_topk], ids=["megatrons", "ours"])
def test_a_bf16_model_counts_every_token(choose):
    """bf16 has eight bits: it would lose a lead of a few tokens, which the bias follows."""
    settings = config(moe_router_enable_expert_bias=True, moe_router_topk=1)
    built = router(DispatchedTopKRouter, settings, product=router_gating, choose=choose)
    built.expert_bias.zero_()
    built = built.bfloat16()
    built._maintain_float32_expert_bias()  # as its forward pass begins
    counts = routed_three_times(built)
    assert torch.equal(built.local_tokens_per_expert, counts)
    model, before = [torch.nn.ModuleList([built])], built.expert_bias.clone()
    _update_router_expert_bias(model, settings, torch.distributed.group.WORLD)
    step = settings.moe_router_bias_update_rate
    expected = step * torch.tensor([1.0] * (EXPERTS // 2) + [-1.0] * (EXPERTS // 2))
    assert torch.equal(built.expert_bias, before + expected)
    reset_model_temporary_tensors(settings, model)
    assert not built.local_tokens_per_expert.any()


def test_a_bf16_model_counts_every_token_of_a_global_batch():
    """For the balancing loss of a global batch, as a float32 model does."""
    settings = config(
        moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1,
        moe_router_topk=1,
    )  # fmt: skip
    built = router(DispatchedTopKRouter, settings, product=None, choose=None).bfloat16()
    counts = routed_three_times(built)
    assert torch.equal(built.global_tokens_per_expert, counts) and built.ga_steps == 3
    built.reset_global_aux_loss_tracker()
    assert not built.global_tokens_per_expert.any() and not built.ga_steps


def test_our_gating_product_is_megatrons_router():
    """Logits and gradients of a bf16 router with logits in fp32."""
    same = config(params_dtype=torch.bfloat16)
    groups = get_default_pg_collection()
    theirs = TopKRouter(config=same, pg_collection=groups)
    ours = DispatchedTopKRouter(
        config=same, pg_collection=groups, product=router_gating, choose=None
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(7, 2, HIDDEN).bfloat16()
    weights = torch.randn(7, 2, EXPERTS)
    found = []
    for router in (theirs, ours):
        tokens = x.clone().requires_grad_()
        logits = router.gating(tokens)
        assert logits.dtype == torch.float32
        (logits * weights).sum().backward()
        found.append((logits, tokens.grad, router.weight.grad))
    for a, b in zip(*found, strict=True):
        eps = torch.finfo(a.dtype).eps
        torch.testing.assert_close(b, a, rtol=eps, atol=16 * torch.finfo(torch.float32).eps)


def test_our_router_counts_an_experts_tokens_as_megatrons_does():
    """In training alone, and none that is padding; Megatron's counts are compiled."""
    same = config(moe_router_enable_expert_bias=True)
    groups = get_default_pg_collection()
    chosen, padding = torch.rand(14, EXPERTS) < 0.5, torch.rand(14, 1) < 0.3
    found = []
    for build in (TopKRouter, partial(DispatchedTopKRouter, product=router_gating, choose=None)):
        router = build(config=same, pg_collection=groups)
        with torch.compiler.set_stance("force_eager"):
            router._apply_expert_bias(chosen)
            router._apply_expert_bias(chosen, padding)
            with torch.no_grad():
                router._apply_expert_bias(chosen)
        found.append(router.local_tokens_per_expert)
    assert [counts.dtype for counts in found] == [torch.float32, torch.int64]
    assert torch.equal(found[0], found[1].float())
    assert found[0].sum() == chosen.sum() + (chosen & ~padding).sum()
    without = DispatchedTopKRouter(
        config=config(), pg_collection=groups, product=router_gating, choose=None
    )
    without._apply_expert_bias(chosen)
    assert without.local_tokens_per_expert is None
