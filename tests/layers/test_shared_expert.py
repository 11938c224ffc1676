"""The shared expert's SwiGLU: the definition's values, in Megatron's module."""

from functools import partial

import pytest
import torch
from admission_probes import poisoned_memory
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig, mlp
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch.nn import functional

from megacpp_mcore.kernels.moe_experts.activation import swiglu
from megacpp_mcore.layers import shared_expert
from megacpp_mcore.layers.shared_expert import SharedExpert
from megacpp_mcore.training.cpu.megatron_setup import single_process

SHAPES = {"even": (64, 2, 128), "odd": (3, 5, 2 * 37), "one": (1, 2), "wide": (2, 1, 2 * 1500),
          "no-rows": (0, 2, 16)}  # fmt: skip


def definition(h):
    gate, up = h.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def swiglu_in_float64(h, direction):
    """Values and gradient, and the gradient's bound: the sum of its terms without signs."""
    exact = h.detach().double().requires_grad_()
    y = definition(exact)
    (grad,) = torch.autograd.grad(y, exact, direction.double())
    gate, up = exact.detach().chunk(2, -1)
    s, g = torch.sigmoid(gate), direction.double().abs()
    terms = g * up.abs() * s * (1 + gate.abs()), g * gate.abs() * s  # 1 - s cancels
    return y.detach(), grad, torch.cat(terms, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_definitions(shape, dtype):
    h = (3 * torch.randn(SHAPES[shape])).to(dtype).requires_grad_()
    direction = torch.randn(*h.shape[:-1], h.shape[-1] // 2).to(dtype)
    expected, expected_grad, terms = swiglu_in_float64(h, direction)
    with poisoned_memory("cpu"):
        y = swiglu(h)
        (grad,) = torch.autograd.grad(y, h, direction)
    assert y.dtype == grad.dtype == dtype and y.shape == direction.shape
    # One rounding to dtype, which Triton's interpreter cuts off for bf16, and eight in float32 of
    # what a value is a product or a sum of; below normal numbers the error is the least number's.
    eps, tiny = torch.finfo(dtype).eps + 8 * 2**-24, torch.finfo(dtype).smallest_normal
    assert ((y - expected).abs() <= eps * expected.abs() + eps * tiny).all()
    assert ((grad - expected_grad).abs() <= eps * terms + eps * tiny).all()


def test_any_strides_are_read():
    h = torch.randn(3, 4, 6).transpose(0, 1).requires_grad_()
    direction = torch.randn(1, 3, 6)[..., ::2].expand(4, 3, 3)
    expected = torch.autograd.grad(definition(h), h, direction)
    found = torch.autograd.grad(swiglu(h), h, direction)
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * 16 * 2**-24)


def config(**more) -> TransformerConfig:
    fields = {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 2,
        "moe_shared_expert_intermediate_size": 24, "gated_linear_unit": True,
        "activation_func": functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": True, "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**fields | more)


@pytest.fixture
def upstream():
    with single_process(1):
        spec = get_moe_module_spec(use_te=False, num_experts=1)
        groups = get_default_pg_collection()
        shared = spec.keywords["submodules"].shared_experts
        yield partial(shared, pg_collection=groups, gate=False)


def test_the_module_is_megatrons_but_for_the_kernel(upstream, monkeypatch):
    launched = []
    monkeypatch.setattr(shared_expert, "swiglu", lambda h: launched.append(h) or swiglu(h))
    theirs, ours = upstream(config=config()), SharedExpert(upstream, config=config())
    assert type(ours) is type(theirs)
    keys = theirs.state_dict().keys()
    assert ours.state_dict().keys() == keys
    assert ours.sharded_state_dict("e.").keys() == theirs.sharded_state_dict("e.").keys()
    ours.load_state_dict(theirs.state_dict())
    x, direction = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    found, asked, megatrons = [], [], mlp.bias_swiglu_impl
    monkeypatch.setattr(mlp, "bias_swiglu_impl", lambda *a: asked.append(a) or megatrons(*a))
    for module, of_megatron in ((ours, 0), (theirs, 1)):
        leaf = x.clone().requires_grad_()
        with torch.compiler.set_stance("force_eager"):
            y = module(leaf)
        assert (len(launched), len(asked)) == (1, of_megatron)
        leaves = leaf, *module.parameters()
        found.append((y, *torch.autograd.grad(y, leaves, direction)))
    for a, b in zip(*found, strict=True):
        # float32: a sum of at most 24 terms, of 10 tokens in a weight's gradient.
        torch.testing.assert_close(a, b, rtol=32 * 2**-24, atol=32 * 2**-24 * b.abs().max().item())


@pytest.mark.parametrize(
    "more",
    [{"bias_activation_fusion": False}, {"activation_func_fp8_input_store": True},
     {"cpu_offloading": True, "cpu_offloading_num_layers": 0},
     {"activation_func": functional.gelu},
     {"gated_linear_unit": False, "bias_activation_fusion": False}],
)  # fmt: skip
def test_every_other_activation_stays_megatrons(upstream, more):
    asked = config(**more)
    built = SharedExpert(upstream, config=asked)
    assert built.activation_func is asked.activation_func
    assert not built.config.use_te_activation_func
    assert built.config.bias_activation_fusion == asked.bias_activation_fusion


def test_the_models_config_is_left(upstream):
    asked = config()
    before = vars(asked).copy()
    SharedExpert(upstream, config=asked)
    assert vars(asked) == before
