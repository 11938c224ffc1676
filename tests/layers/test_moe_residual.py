"""The E layer whose residual is added in the experts' own sum, in Megatron's HybridModel.

In float32 that sum adds, in Megatron's order, what Megatron adds: the two agree to the bit. In 16
bits Megatron rounds the experts' output, too.
"""

import contextlib
import dataclasses
import gc
import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel import random as megatrons_random
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)
from torch.nn import functional

from megacpp_mcore.layers import moe
from megacpp_mcore.layers.moe import MoELayerError
from megacpp_mcore.layers.moe_block import MoEBlock
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.surfaces import support
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process

NORMS = ("triton", "reference")
SMALL = [
    "model.hidden_size=40", "model.ffn_hidden_size=64", "model.num_attention_heads=4",
    "model.seq_length=12", "attention.q_lora_rank=8", "attention.kv_lora_rank=8",
    "attention.qk_head_dim=8", "attention.qk_pos_emb_head_dim=8", "attention.v_head_dim=8",
    "moe.num_experts=5", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=24",
    "moe.moe_shared_expert_intermediate_size=28", "mamba3.mamba_num_heads=4",
    "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=8", "mamba3.mamba_num_groups=2",
    "mamba3.chunk_size=8", "m2rnn.k_head_dim=8", "m2rnn.v_head_dim=8",
]  # fmt: skip
ONE_LAYER = ["model.pattern=E", "model.depth=1", "mtp.mtp_num_layers=0", "mtp.pattern=",
             "moe.moe_router_load_balancing_type=none", "moe.moe_aux_loss_coeff=0.0"]  # fmt: skip


# Megatron's count for the bias takes no mask of several rows.
WITHOUT_BIAS = "moe.moe_router_enable_expert_bias=false"


class _Stream:
    """Stands in for a CUDA stream, which Megatron's dispatcher makes as it is built."""

    def wait_stream(self, other):
        raise AssertionError("something was copied to the host")


class CopyingStream(_Stream):
    """One on which something may be copied to the host."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


@pytest.fixture
def machine(monkeypatch):
    """A process in which the kernels of a GPU serve: in Triton's interpreter."""
    for name in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    monkeypatch.setattr(moe, "current_device", lambda: "cuda")
    monkeypatch.setattr(support, "cuda_only", lambda what, workload: None)
    # No random state of CUDA's to keep: nothing that is recomputed here draws a random number.
    monkeypatch.setattr(megatrons_random, "_get_cuda_rng_state", lambda *a, **k: None)
    monkeypatch.setattr(megatrons_random, "_set_cuda_rng_state", lambda *a, **k: None)
    return monkeypatch


@contextlib.contextmanager
def model(machine, *overrides, norm="triton", backends="moe_experts=fused_moe", dtype=None, **args):
    """Megatron's HybridModel with weights drawn anew. args: Megatron's, which a recipe for the CPU
    may not have."""
    recipe = load_recipe("nam56r-tiny", [*SMALL, *overrides])
    machine.setenv("MEGACPP_BACKENDS", ",".join(filter(None, (f"norm={norm}", backends))))
    parsed = megatron_args(lower(recipe).argv)
    if dtype is not None:
        parsed.bf16, parsed.params_dtype = dtype == torch.bfloat16, dtype
    for name, value in args.items():
        setattr(parsed, name, value)
    with single_process(1):
        built = build_model(parsed, recipe)
        built = built if dtype is None else built.to(dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in built.parameters():
                value = torch.randn(parameter.shape, generator=generator)
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.125
                parameter.copy_(value * scale + (parameter.dim() == 1))
        yield built


def taken(layer: MoEBlock) -> list[torch.Tensor | None]:
    """What the experts' sum is given as a residual, call by call."""
    found, routed = [], layer.mlp.experts.routed

    def watched(tokens, routing_map, probs, addend, residual, *more):
        found.append(residual)
        return routed(tokens, routing_map, probs, addend, residual, *more)

    layer.mlp.experts.routed = watched
    return found


def as_megatrons(layer: MoEBlock, *args, **more):
    """Its own forward pass, which adds the residual by itself, on the same modules."""
    return MoETransformerLayer._forward_mlp(layer, *args, **more)


def run(layer, call, shape, dtype=torch.float32, **more):
    """Output and gradients of call(x, ...)."""
    generator = torch.Generator().manual_seed(3)
    x, direction = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    y = call(x, **more)
    y.backward(direction)
    found = {"y": y.detach(), "x": x.grad}
    found |= {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    for parameter in layer.parameters():
        parameter.grad = None
    return found


def definition(layer, shape, dtype=torch.float32):
    """The layer in float64, expert by expert: x plus the experts of its norm, and gradients."""
    generator = torch.Generator().manual_seed(3)
    x, direction = (torch.randn(shape, generator=generator).to(dtype).double() for _ in range(2))
    x.requires_grad_()
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    scale = (x.square().mean(-1, keepdim=True) + layer.config.layernorm_epsilon).rsqrt()
    tokens = (x * scale * wide["pre_mlp_layernorm.weight"]).flatten(0, 1)
    scores = torch.sigmoid(tokens @ wide["mlp.router.weight"].t())
    values, chosen = scores.topk(layer.config.moe_router_topk)
    probs = values / values.sum(-1, keepdim=True)

    def gated(t, up, down, weight=1.0):
        gate, linear = (t @ up.t()).chunk(2, dim=-1)
        return (weight * functional.silu(gate) * linear) @ down.t()

    y = x.flatten(0, 1)
    w1, w2 = (wide[f"mlp.experts.linear_fc{i}.weight"] for i in (1, 2))
    for expert in range(len(w1)):
        t, k = (chosen == expert).nonzero().unbind(1)
        y = y.index_add(0, t, gated(tokens[t], w1[expert], w2[expert], probs[t, k, None]))
    if layer.mlp.use_shared_expert:
        shared = (wide[f"mlp.shared_experts.linear_fc{i}.weight"] for i in (1, 2))
        y = y + gated(tokens, *shared)
    y = y.view(shape)
    y.backward(direction)
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in wide.items()}


def assert_near(found, expected, dtype, terms):
    """Of each value's largest: at most 16 roundings on the way to the output and back, four of the
    norm, one each of fc1, activation, fc2 and the sum, as many again backward, each of up to an
    epsilon as Triton's interpreter cuts off to bfloat16; and float32 sums of `terms` terms."""
    bound = 16 * torch.finfo(dtype).eps + terms * torch.finfo(torch.float32).eps
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        difference = (found[name].double() - truth).abs().max()
        assert truth.abs().max() > 0 and difference <= bound * truth.abs().max(), name


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == []


CASES = {
    "odd": ((7, 3), []),
    "one-token": ((1, 1), []),
    "every-expert": ((13, 2), ["moe.num_experts=3", "moe.moe_router_topk=3"]),
    "not-shared": ((9, 2), ["moe.moe_shared_expert_intermediate_size=null"]),
    "wider-than-a-tile": ((3, 1), ["model.hidden_size=4104", "moe.num_experts=2"]),
    "narrow-experts": ((5, 2), ["moe.moe_ffn_hidden_size=20"]),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_its_definition(machine, case, norm):
    rows, sizes = CASES[case]
    with model(machine, *ONE_LAYER, *sizes, norm=norm) as built:
        (layer,) = built.decoder.layers
        shape, residuals = (*rows, layer.config.hidden_size), taken(layer)
        found = run(layer, lambda x: layer(x, attention_mask=None)[0], shape)
        (residual,) = residuals
        assert residual.shape == (rows[0] * rows[1], shape[-1])
        expected = definition(layer, shape)
        terms = 2 * (layer.config.hidden_size + 28 + rows[0] * rows[1])
        assert_near(found, expected, torch.float32, terms)
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), shape))
        assert residuals[1:] == [None]


def test_in_bfloat16(machine):
    every = ["moe.num_experts=3", "moe.moe_router_topk=3"]  # no choice that a rounding turns over
    with model(machine, *ONE_LAYER, *every, dtype=torch.bfloat16) as built:
        (layer,) = built.decoder.layers
        residuals = taken(layer)
        found = run(layer, layer._forward_mlp, (7, 3, 40), torch.bfloat16)
        assert found["y"].dtype == residuals[0].dtype == torch.bfloat16
        expected = definition(layer, (7, 3, 40), torch.bfloat16)
        assert_near(found, expected, torch.bfloat16, 2 * (40 + 28 + 21))


def test_the_output_is_no_view_and_nothing_is_kept(machine):
    """A view could not be handed to a pipeline, nor kept by Megatron's checkpoint."""
    with model(machine, *ONE_LAYER) as built:
        (layer,) = built.decoder.layers
        x = torch.randn(5, 2, 40, requires_grad=True)
        y = layer._forward_mlp(x)
        assert y._base is None and y.is_contiguous() and y.shape == x.shape
        assert layer.mlp._residual is None and layer.mlp._readers is None

        def tensors() -> int:
            return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

        del y
        gc.collect()
        gc.disable()
        try:
            counted = []
            for _ in range(3):
                run(layer, layer._forward_mlp, (5, 2, 40))
                counted.append(tensors())
        finally:
            gc.enable()
        assert counted[1] == counted[2]


def test_without_gradients_and_in_evaluation(machine):
    with model(machine, *ONE_LAYER) as built:
        (layer,) = built.decoder.layers
        layer.hidden_dropout = 0.3  # does not matter in evaluation
        x = torch.randn(5, 2, 40)
        layer.eval()
        residuals = taken(layer)
        with torch.no_grad():
            y = layer._forward_mlp(x.clone())
            assert residuals[0] is not None and not y.requires_grad
            assert torch.equal(y, as_megatrons(layer, x.clone()))


def _set(name, value, of=lambda layer: layer):
    return lambda layer: setattr(of(layer), name, value)


def _in_config(name, value):
    return _set(name, value, lambda layer: layer.config)


def _another_sum(training, fused):
    return lambda x_with_bias, residual, prob: 2 * residual + x_with_bias[0]


# How the layer differs -> (what is set on it, keyword arguments of the call).
OUTSIDE = {
    "dropout": (_set("hidden_dropout", 0.3), {}),
    "fp32-residual": (_in_config("fp32_residual_connection", True), {}),
    "another-sum-in-the-spec": (_set("mlp_bda", _another_sum), {}),
    "chunks": (_in_config("mlp_chunks_for_training", 2), {}),
    "inference": (lambda layer: None, {"inference_context": SimpleNamespace()}),
    "packed": (
        lambda layer: None,
        {"packed_seq_params": SimpleNamespace(tokens_per_sample=4)},
    ),
    "packed-one-row": (
        lambda layer: None,
        {"packed_seq_params": SimpleNamespace(tokens_per_sample=None)},
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_elsewhere_megatron_adds_it(machine, case):
    differs, more = OUTSIDE[case]
    with model(machine, *ONE_LAYER) as built:
        (layer,) = built.decoder.layers
        differs(layer)
        residuals, found = taken(layer), []
        for call in (layer._forward_mlp, lambda x, **m: as_megatrons(layer, x, **m)):
            torch.manual_seed(11)
            found.append(run(layer, call, (8, 1, 40), **more))
        assert set(residuals) == {None}
        assert_same(*found)


@pytest.mark.parametrize("residual", [False, True])
def test_a_stream_of_another_dtype_than_the_experts(machine, residual):
    """Megatron returns the residual's dtype, and in float32 where it is asked to keep it so."""
    with model(machine, *ONE_LAYER, norm="reference", dtype=torch.bfloat16) as built:
        (layer,) = built.decoder.layers
        layer.config.fp32_residual_connection = residual
        residuals = taken(layer)
        calls = layer._forward_mlp, lambda x: as_megatrons(layer, x)
        for dtype in (torch.float32, torch.bfloat16) if residual else (torch.float32,):
            found = [run(layer, call, (5, 2, 40), dtype) for call in calls]
            assert set(residuals) == {None} and found[0]["y"].dtype == torch.float32
            assert_same(*found)


@pytest.mark.parametrize("norm", NORMS)
def test_where_megatron_recomputes_the_experts(machine, norm):
    """The second pass would not have the residual."""
    modules = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    with model(machine, *ONE_LAYER, norm=norm, **modules) as built:
        (layer,) = built.decoder.layers
        assert layer.mlp.moe_layer_recompute
        residuals, found = taken(layer), []
        for call in (layer._forward_mlp, lambda x: as_megatrons(layer, x)):
            found.append(run(layer, call, (7, 2, 40)))
        assert set(residuals) == {None}
        assert_same(*found)
        assert_near(found[0], definition(layer, (7, 2, 40)), torch.float32, 2 * (40 + 28 + 14))


@pytest.mark.parametrize("experts", ["fused_moe", "reference"])
@pytest.mark.parametrize("dispatcher", ["local", "reference"])
def test_experts_behind_another_dispatcher(machine, experts, dispatcher):
    machine.setattr(torch.cuda, "Stream", CopyingStream)
    machine.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    backends = f"moe_experts={experts},moe_dispatch={dispatcher}"
    with model(machine, *ONE_LAYER, backends=backends) as built:
        (layer,) = built.decoder.layers
        assert not layer.mlp.routed_inside
        calls = layer._forward_mlp, lambda x: as_megatrons(layer, x)
        found, expected = (run(layer, call, (7, 2, 40)) for call in calls)
        assert_same(found, expected)
        if experts == "fused_moe":  # the others have a parameter an expert
            assert_near(found, definition(layer, (7, 2, 40)), torch.float32, 2 * (40 + 28 + 14))


# What cannot run on a CPU.
NEEDS_A_GPU = {
    "offloaded-norm": _set("offload_mlp_norm", True),
    "recomputed-norm": _set("recompute_pre_mlp_layernorm", True),
    "recomputed-mlp": _set("recompute_mlp", True),
    "partial-graphs": _set("use_partial_cudagraphs", True),
    "captured-modules": _in_config("cuda_graph_impl", "transformer_engine"),
    "no-moe": _set("mlp", torch.nn.Identity()),
}


# The same step, captured as a whole.
INSIDE = {
    "nothing": lambda layer: None,
    "captured-step": _in_config("cuda_graph_impl", "full_iteration"),
}


@pytest.mark.parametrize("case", [*INSIDE, *NEEDS_A_GPU, "inference-mode"])
def test_megatrons_forward_pass_gets_every_argument(machine, case):
    calls = []

    def megatrons(layer, *args):
        calls.append(args)
        return args[0]

    machine.setattr(MoETransformerLayer, "_forward_mlp", megatrons)
    with model(machine, *ONE_LAYER, WITHOUT_BIAS) as built:
        (layer,) = built.decoder.layers
        (INSIDE | NEEDS_A_GPU).get(case, lambda layer: None)(layer)
        if case == "inference-mode":
            machine.setattr(InferenceMode, "is_active", lambda: True)
        x, mask = torch.randn(5, 2, 40), torch.zeros(2, 5, dtype=torch.bool)
        y = layer._forward_mlp(x, None, mask, None)
        assert calls == ([] if case in INSIDE else [(x, None, mask, None)])
        assert (y is x) == bool(calls)


def test_the_mask_of_padding_reaches_the_router(machine):
    with model(machine, *ONE_LAYER, WITHOUT_BIAS) as built:
        (layer,) = built.decoder.layers
        route, seen = layer.mlp.route, []
        layer.mlp.route = lambda x, mask: seen.append(mask) or route(x, mask)
        mask = torch.rand(2, 5) > 0.5
        layer._forward_mlp(torch.randn(5, 2, 40), padding_mask=mask)
        assert torch.equal(seen[0], mask.t())


def test_a_layer_that_cannot_take_the_residual_refuses_it(machine):
    with model(machine, *ONE_LAYER) as built:
        (layer,) = built.decoder.layers
        x = torch.randn(5, 2, 40)
        layer.mlp.moe_layer_recompute = True
        with pytest.raises(MoELayerError, match="residual"):
            layer.mlp(x, residual=x)
        layer.mlp.moe_layer_recompute = False
        with pytest.raises(MoELayerError, match="residual"):  # a part of the pass, without the sum
            layer.mlp(x, intermediate_tensors=(), residual=x)
        assert layer.mlp._residual is None
        layer.mlp.experts.routed = None
        with pytest.raises(TypeError):
            layer.mlp(x, residual=x)
        assert layer.mlp._residual is None


WHOLE = ["model.pattern=AEMER", "model.depth=5", "mtp.mtp_num_layers=1", "mtp.pattern=AE"]


def whole_step(machine, replaced: dict, *overrides, **args):
    """Losses and gradients of a model with MTP, and the residuals that each E layer's sum took."""
    with model(machine, *WHOLE, *overrides, **args) as built:
        layers = [m for m in built.modules() if isinstance(m, MoETransformerLayer)]
        assert len(layers) == 3 and all(type(layer) is MoEBlock for layer in layers)
        residuals = [taken(layer) for layer in layers]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in replaced.items():
                patch.setattr(MoEBlock, name, value)
            generator = torch.Generator().manual_seed(1)
            tokens = torch.randint(256, (2, 13), generator=generator)
            positions = torch.arange(12).expand(2, -1)
            losses = built(
                input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None,
                labels=tokens[:, 1:].contiguous(), loss_mask=torch.ones(2, 12),
            )  # fmt: skip
            losses.float().mean().backward()
        found = {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
        return {"losses": losses.detach(), **found}, residuals


MEGATRONS = {"_forward_mlp": MoETransformerLayer._forward_mlp}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("recipe", "args"),
    [
        pytest.param([], {}, id="kept"),
        pytest.param(["recompute.moe=experts"], {}, id="experts-recomputed"),
        pytest.param([], FULL, id="all-recomputed"),
    ],
)
def test_whole_models_train_as_with_megatrons_layer(machine, norm, recipe, args):
    """MTP's stack included; whoever recomputes, the residual's gradient reaches the embedding."""
    expected, none = whole_step(machine, MEGATRONS, norm=norm)
    found, residuals = whole_step(machine, {}, *recipe, norm=norm, **args)
    assert all(calls and all(x is None for x in calls) for calls in none)
    assert all(calls and all(x is not None for x in calls) for calls in residuals)
    assert_same(found, expected)


def test_megatrons_layer_has_no_step_that_ours_leaves_out():
    """Another Megatron may have a norm after the experts, or another way to its sum."""
    submodules = {field.name for field in dataclasses.fields(TransformerLayerSubmodules)}
    before = {"input_layernorm", "self_attention", "self_attn_bda", "pre_cross_attn_layernorm",
              "cross_attention", "cross_attn_bda"}  # fmt: skip
    ours = {"pre_mlp_layernorm", "mlp", "mlp_bda"}
    assert submodules == before | ours | {"sharded_state_dict_keys_map"}
    names = ["self", "hidden_states", "inference_context", "padding_mask", "packed_seq_params"]
    for cls in (MoEBlock, MoETransformerLayer, transformer_layer.TransformerLayer):
        assert list(inspect.signature(cls._forward_mlp).parameters) == names
