"""[recompute] on a GPU, each word through the recipe, in bf16 and FP8: equal losses and gradients.

Equal but for kernels that add with atomics, whose order changes from run to run: a gradient may
differ by roundings to bf16, the losses not at all.
"""

import pytest
import torch
from recompute_slice import GPU_SIZES, train_once

from megacpp_mcore.layers.moe_block import MoEBlock
from megacpp_mcore.recipe import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

SIZES = [
    *GPU_SIZES, "model.pattern=AEMR", "model.depth=4", "attention.q_lora_rank=32",
    "attention.kv_lora_rank=32", "attention.qk_head_dim=32", "attention.qk_pos_emb_head_dim=32",
    "attention.v_head_dim=32", "moe.moe_ffn_hidden_size=64",
    "moe.moe_shared_expert_intermediate_size=64",
]  # fmt: skip
PRECISIONS = {
    "bf16": [],
    "fp8": ["precision.fp8=hybrid", "precision.fp8_recipe=tensorwise"],
}
WORDS = [
    "mamba3=core", "mamba3=mixer", "m2rnn=core", "m2rnn=mixer", "moe=experts", "moe=act",
    "moe=shared_experts", "moe=layer", "attention=up_proj", "attention=core_attn",
    "layernorm=true",
]  # fmt: skip
# What `auto` takes with the word where it takes another without: both runs have the same kernels.
BACKENDS = {
    ("bf16", "layernorm=true"): "backends.norm=te",
    ("fp8", "layernorm=true"): "backends.norm=te",
    ("bf16", "moe=act"): "backends.moe_experts=te",
}
# With these the residual is added to E's rounded output, as in Megatron's layer (`moe_block`).
RESIDUAL_OUTSIDE = {("bf16", "layernorm=true"), ("bf16", "moe=layer")}
_KEPT = {}


def plain(precision, *backends, residual_outside=False):
    key = precision, backends, residual_outside
    if key not in _KEPT:
        with pytest.MonkeyPatch.context() as patch:
            if residual_outside:
                patch.setattr(MoEBlock, "_sums_inside", lambda *arguments: False)
            _KEPT[key] = train_once(recipe(precision, *backends), "cuda")
    return _KEPT[key]


def recipe(precision, *overrides):
    return load_recipe("nam56r-tiny", [*SIZES, *PRECISIONS[precision], *overrides])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_word(precision, word):
    backends = filter(None, [BACKENDS.get((precision, word))])
    outside = (precision, word) in RESIDUAL_OUTSIDE
    expected, size = plain(precision, *backends, residual_outside=outside)
    found, smaller = train_once(recipe(precision, f"recompute.{word}"), "cuda")
    assert torch.equal(found["losses"], expected["losses"])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        distance = (found[name].float() - gradient.float()).norm()
        assert distance <= 4 * torch.finfo(torch.bfloat16).eps * gradient.float().norm(), name
    # cuDNN's attention keeps its inputs and one number a row, no scores to save
    assert smaller < size or word == "attention=core_attn"


def test_fp8_is_not_bf16():
    """Otherwise the half of these tests would show nothing."""
    assert not torch.equal(plain("fp8")[0]["losses"], plain("bf16")[0]["losses"])
