"""Core attention: admission of every backend, masks and documents, and Megatron's module."""

import math
from types import SimpleNamespace

import admission
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megacpp_mcore import dispatch
from megacpp_mcore.backend import Problem
from megacpp_mcore.kernels.core_attention import attention, sdpa, sdpa_flash
from megacpp_mcore.layers.core_attention import (
    CoreAttentionError,
    FlashCoreAttention,
    ReferenceCoreAttention,
    SDPACoreAttention,
)

# torch has the flash kernel for a CPU too, so that what surrounds it is tested here.
test_admission = admission.suite("core_attention", beyond_dispatch=("sdpa_flash",))

EPS = torch.finfo(torch.float64).eps


def module(cls, **changes):
    fields = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 16, "attention_dropout": 0.0, "use_cpu_initialization": True,
    }  # fmt: skip
    return cls(
        config=TransformerConfig(**(fields | changes)), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self", k_channels=16, v_channels=8,
        pg_collection=SimpleNamespace(),
    )  # fmt: skip


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_the_definition_is_the_formula():
    """One head and one query at a time, in Python's own numbers."""
    q, k, v = draw(1, 2, 5, 3), draw(1, 1, 5, 3) / 2, draw(1, 1, 5, 4)
    y = attention(q, k, v, scale=0.7)
    for head in range(2):
        for i in range(5):
            scores = [0.7 * float(q[0, head, i] @ k[0, 0, j]) for j in range(i + 1)]
            weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
            expected = sum(w * v[0, 0, j] for j, w in enumerate(weights))
            torch.testing.assert_close(y[0, head, i], expected, rtol=0, atol=16 * EPS)


@pytest.mark.parametrize("function", [attention, sdpa, sdpa_flash])
def test_a_token_does_not_see_the_ones_behind_it(function):
    q, k, v = draw(1, 2, 9, 8), draw(1, 2, 9, 8), draw(1, 2, 9, 8)
    before = function(q, k, v, scale=1.0)
    k[:, :, 6:], v[:, :, 6:] = 5.0, -5.0
    after = function(q, k, v, scale=1.0)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


@pytest.mark.parametrize("cls", [SDPACoreAttention, FlashCoreAttention, ReferenceCoreAttention])
def test_packed_documents_are_separate_sequences(cls):
    """An empty document among them, one token, and padding behind the last; gradients too."""
    attend = module(cls)
    bounds = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (draw(13, 4, 16), draw(13, 2, 16), draw(13, 2, 8))]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    y = attend(*leaves, None, packed_seq_params=packed)
    assert y.shape == (13, 32) and not y[11:].any()
    one_by_one = [
        attend(*(x[start:end].unsqueeze(1) for x in leaves), None).squeeze(1)
        for start, end in ((0, 4), (4, 5), (5, 11))
    ]
    torch.testing.assert_close(y[:11], torch.cat(one_by_one), rtol=0, atol=16 * EPS)
    direction = draw(13, 32)
    packed_gradients = torch.autograd.grad(y, leaves, direction)
    gradients = torch.autograd.grad(torch.cat(one_by_one), leaves, direction[:11])
    for actual, expected in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize("cls", [SDPACoreAttention, ReferenceCoreAttention])
def test_dropout_is_for_training_and_keeps_the_mean(cls):
    """Equal values: what is left of the weights sums to 1 on the mean over many draws."""
    attend = module(cls, attention_dropout=0.25)
    q, k, v = torch.zeros(64, 8, 4, 16), torch.zeros(64, 8, 2, 16), torch.ones(64, 8, 2, 8)
    torch.manual_seed(0)
    y = attend(q, k, v, None)
    # Row i is a mean of i + 1 weights of 1 / 0.75 with chance 0.75: a variance of 1 / (3 (i + 1)).
    heads = 8 * 4
    variance = sum(1 / (3 * (i + 1)) for i in range(64)) / (64**2 * heads)
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(variance)
    assert y.std() > 0.1
    torch.testing.assert_close(attend.eval()(q, k, v, None), torch.ones(64, 8, 32))


@pytest.mark.parametrize(
    ("problem", "backend", "reason"),
    [
        ({"dqk": 192, "dv": 128}, "sdpa_cudnn", "dqk 192, dv 128: cuDNN takes multiples of 8"),
        ({"dqk": 100, "dv": 64}, "sdpa_cudnn", "dqk 100"),
        ({"dqk": 64, "dv": 128}, "sdpa_flash", "dv 128 is larger than dqk 64"),
        ({"dqk": 320, "dv": 64}, "sdpa_flash", "dqk 320: flash attention takes at most 256"),
        ({"dqk": 128, "dv": 64}, "sdpa_cudnn", None),
        ({"dqk": 192, "dv": 128}, "sdpa_flash", None),
        ({"dqk": 64, "dv": 64, "context_parallel_size": 2}, "sdpa_cudnn", "context_parallel_size"),
    ],
)
def test_what_the_fused_kernels_say_they_can_serve(problem, backend, reason):
    found = dispatch.verdicts("core_attention", Problem.of("cuda", "bfloat16", **problem))[backend]
    assert found is None if reason is None else reason in found
    fp32 = dispatch.verdicts("core_attention", Problem.of("cuda", "float32", dqk=64, dv=64))
    assert "not float32" in fp32[backend]


@pytest.mark.parametrize(
    ("build", "call", "message"),
    [
        ({"context_parallel_size": 2}, {}, "context_parallel_size 2"),
        ({}, {"attn_mask_type": AttnMaskType.no_mask}, "mask 'no_mask' is not served"),
        ({}, {"attention_bias": torch.zeros(1)}, "attention_bias is not served"),
        ({}, {"packed_seq_params": PackedSeqParams(qkv_format="bshd")}, "qkv_format 'bshd'"),
    ],
)
def test_refusals(build, call, message):
    with pytest.raises(CoreAttentionError, match=message):
        module(SDPACoreAttention, **build)(
            draw(3, 1, 4, 16), draw(3, 1, 2, 16), draw(3, 1, 2, 8), None, **call
        )
