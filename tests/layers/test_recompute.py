"""[recompute] in Megatron's real HybridModel: equal gradients, bit for bit, and less kept."""

import pytest
import torch
from recompute_slice import train_once

from megacpp_mcore.recipe import load_recipe

SMALL = [
    "model.pattern=AEMR", "model.depth=4", "model.hidden_size=32", "model.ffn_hidden_size=64",
    "model.num_attention_heads=4", "model.seq_length=32", "attention.q_lora_rank=8",
    "attention.kv_lora_rank=8", "attention.qk_head_dim=8", "attention.qk_pos_emb_head_dim=8",
    "attention.v_head_dim=8", "moe.moe_ffn_hidden_size=32",
    "moe.moe_shared_expert_intermediate_size=32", "mamba3.mamba_num_heads=4",
    "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=8", "mamba3.mamba_num_groups=2",
    "mamba3.chunk_size=8", "m2rnn.k_head_dim=8", "m2rnn.v_head_dim=8",
]  # fmt: skip
OURS = ["recompute.mamba3=core", "recompute.mamba3=mixer", "recompute.m2rnn=core",
        "recompute.m2rnn=mixer", "recompute.moe=experts"]  # fmt: skip
# Its norms and the experts' activation need Transformer Engine: tests/gpu/test_recompute_gpu.py
MEGATRONS = ["core_attn", "mla_up_proj", "moe", "shared_experts"]


def small(*overrides):
    return load_recipe("nam56r-tiny", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def plain():
    return train_once(small())


def check(found, plain):
    assert found[0].keys() == plain[0].keys()
    different = [name for name, value in plain[0].items() if not torch.equal(found[0][name], value)]
    assert different == []
    assert found[1] < plain[1]


@pytest.mark.parametrize("override", OURS)
def test_what_our_layers_recompute(override, plain):
    check(train_once(small(override)), plain)


def test_all_of_ours_together(plain):
    together = ["recompute.mamba3=mixer", "recompute.m2rnn=mixer", "recompute.moe=experts"]
    found = train_once(small(*together))
    check(found, plain)
    assert all(found[1] < train_once(small(override))[1] for override in together)


@pytest.mark.slow
@pytest.mark.parametrize("module", MEGATRONS)
def test_what_megatron_recomputes_around_our_layers(module, plain, monkeypatch):
    """Without CUDA there is no random state of its to keep; nothing here draws a random number."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *a, **k: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *a, **k: None)
    check(train_once(small(), modules=[module]), plain)


@pytest.mark.parametrize("override", OURS)
def test_without_a_gradient_nothing_is_recomputed(override, monkeypatch):
    """Evaluation runs a block once, as if nothing had been asked."""
    from megacpp_mcore.layers import recompute

    def never(*args, **more):
        raise AssertionError("recomputed without a gradient")

    monkeypatch.setattr(recompute, "checkpoint", never)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        train_once(small(override))  # forward is through when backward() finds no graph
