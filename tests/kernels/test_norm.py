"""Norms: admission of every backend, the definitions, and what a backend refuses."""

import admission
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.kernels.norm import layer_norm, rms_norm
from megacpp_mcore.layers.norm import TorchNorm
from megacpp_mcore.surfaces.norm import workload

test_admission = admission.suite("norm", beyond_dispatch=("triton",))


def config(**changes):
    fields = {
        "num_layers": 1,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "normalization": "RMSNorm",
    }
    return TransformerConfig(**(fields | changes))


def test_the_definitions_are_the_formulas():
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=torch.float64)
    weight, bias = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.arange(4).double()
    root = (25 / 4 + 0.5) ** 0.5
    expected = torch.tensor([[3 / root, 8 / root, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 0.5), expected, rtol=1e-15, atol=0)
    mean, variance = 7 / 4, 25 / 4 - (7 / 4) ** 2
    expected = (x - mean) / (variance + 0.5) ** 0.5 * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.5), expected, rtol=1e-14, atol=0)


def test_torchs_layer_norm_is_the_definition():
    norm = TorchNorm(config=config(normalization="LayerNorm"), hidden_size=12, eps=1e-3).double()
    x = torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_()
    expected = layer_norm(x, norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=64 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_float32_residual_stream_is_normalised_as_it_is_and_given_on_in_the_models_dtype(kind):
    norm = TorchNorm(config=config(normalization=kind), hidden_size=12, eps=1e-5).bfloat16()
    x = 1 + 1e-3 * torch.randn(5, 12)  # of which bfloat16 would keep nothing
    x.requires_grad_()
    y = norm(x)
    wide = torch.nn.RMSNorm if kind == "RMSNorm" else torch.nn.LayerNorm
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wide(12, eps=1e-5)(x).bfloat16())
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and norm.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weights_are_marked_for_sequence_parallelism(sequence_parallel):
    parallel = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    norm = TorchNorm(config=config(**(parallel if sequence_parallel else {})), hidden_size=12)
    assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel]


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("reference", {"layernorm_zero_centered_gamma": True}, "only Transformer Engine's norms"),
        ("reference", {"normalization": "L2Norm"}, "torch has RMSNorm and LayerNorm"),
    ],
)
def test_a_norm_that_the_config_rules_out_is_not_chosen(backend, changes, message):
    wrong = config()
    for name, value in changes.items():
        setattr(wrong, name, value)
    with pytest.raises(DispatchError, match=message):
        dispatch.choose("norm", workload("cuda", wrong), {"norm": backend})
