"""GQA inside Megatron: the same module as upstream's, whatever serves rope_qk."""

import itertools

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import attention as upstream
from megatron.core.transformer.enums import AttnMaskType

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.rope_qk import REFERENCE, triton
from megacpp_mcore.layers.attention import AttentionError, SelfAttention
from megacpp_mcore.layers.core_attention import (
    CoreAttentionByLayout,
    CudnnCoreAttention,
    FlashCoreAttention,
    ReferenceCoreAttention,
)
from megacpp_mcore.layers.dispatched import DispatchedCoreAttention
from megacpp_mcore.layers.norm import TorchNorm
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.surfaces import rope_qk
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, SEQ, BATCH, DIM = 24, 9, 2, 8
VARIANTS = {
    "plain": {},
    "neighbours": {"rotary_interleaved": True},
    "multi-query": {"num_query_groups": 1},
    "every-head-its-own": {"num_query_groups": 6},
    "qk-layernorm": {"qk_layernorm": True},
    "l2-norm": {"qk_l2_norm": True},
    "some-layers": {"no_rope_freq": [1]},
    "recompute-core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Megatron's process groups, and no CUDA random states for its checkpoints to keep."""
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    with single_process(0):
        yield


def make_config(**changes):
    fields = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 6, "num_query_groups": 2,
        "kv_channels": DIM, "attention_dropout": 0.0, "normalization": "RMSNorm",
        "apply_rope_fusion": False, "add_bias_linear": False, "use_cpu_initialization": True,
    }  # fmt: skip
    return attach(TransformerConfig(**(fields | changes)), PluginSettings())


def build(cls, config, core=ReferenceCoreAttention, norm=TorchNorm):
    submodules = upstream.SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=core, linear_proj=RowParallelLinear,
        q_layernorm=norm, k_layernorm=norm,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return cls(config, submodules, 1, AttnMaskType.causal, pg_collection=groups)


def pair(rope=REFERENCE, **changes):
    """Ours and upstream's, of the same weights; a spec names norms for ours in any case."""
    normed = make_config(**changes).qk_layernorm
    norm = TorchNorm if normed else None
    theirs = build(upstream.SelfAttention, make_config(**changes), norm=norm)
    ours = build(SelfAttention, make_config(**changes))
    assert ours.rope is None  # on a CPU dispatch takes Megatron's own path
    ours.rope = rope
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def angles(config, positions=SEQ, percent=1.0):
    table = RotaryEmbedding(DIM, percent, config.rotary_interleaved, rotary_base=100)
    return table(positions)


def packed_of(bounds, longest=None):
    longest = longest or max(b - a for a, b in itertools.pairwise(bounds))
    bounds = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def run(module, hidden, table, bounds=None):
    """Output, input gradient, parameter gradients."""
    hidden = hidden.clone().requires_grad_()
    packed = None if bounds is None else packed_of(bounds)
    y, bias = module(hidden, None, rotary_pos_emb=table, packed_seq_params=packed)
    assert bias is None
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * direction).sum().backward()
    values = {"y": y.detach(), "dx": hidden.grad}
    return values | {name: p.grad for name, p in module.named_parameters()}


def assert_equal(found, expected):
    """Sums of at most SEQ * BATCH * HIDDEN terms, a few after one another, in another order."""
    eps = torch.finfo(torch.float32).eps
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 8 * SEQ * BATCH * HIDDEN * eps * value.abs().max()
        assert value.abs().max() > 0, name
        assert (found[name] - value).abs().max() <= bound, name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 9]], ids=["rows", "documents"])
def test_ours_is_upstreams(variant, bounds):
    if variant == "neighbours" and bounds:
        bounds = [0, 4, 9]  # upstream's cannot reshape an empty document's neighbours
    ours, theirs = pair(**VARIANTS[variant])
    hidden = torch.randn(SEQ, 1 if bounds else BATCH, HIDDEN)
    table = angles(ours.config, 5 if bounds else SEQ)
    assert_equal(run(ours, hidden, table, bounds), run(theirs, hidden, table, bounds))


@pytest.mark.parametrize("variant", ["plain", "qk-layernorm"])
@pytest.mark.parametrize("bounds", [None, [0, 4, 9]], ids=["rows", "documents"])
def test_the_kernel_in_the_layer(variant, bounds):
    ours, theirs = pair(triton.ROPE_QK, **VARIANTS[variant])
    hidden = torch.randn(SEQ, 1 if bounds else BATCH, HIDDEN)
    table = angles(ours.config, 5 if bounds else SEQ, percent=0.5)
    assert_equal(run(ours, hidden, table, bounds), run(theirs, hidden, table, bounds))


def test_the_surface_is_used_and_angles_are_given_once():
    """A spy in its place, twice over: nothing of a call is left for the next."""
    ours, theirs = pair()
    calls = []

    def spy(qkv, table, **how):
        calls.append((tuple(qkv.shape), tuple(table.shape), how["heads"]))
        return REFERENCE.projected(qkv, table, **how)

    ours.rope = type(REFERENCE)(spy, REFERENCE.apart)
    hidden, table = torch.randn(SEQ, BATCH, HIDDEN), angles(ours.config)
    ours(hidden, None, rotary_pos_emb=table)
    assert calls == [((SEQ, BATCH, 2, 5 * DIM), (SEQ, DIM // 2), 6)]
    torch.testing.assert_close(ours(hidden, None)[0], theirs(hidden, None)[0])  # without RoPE
    assert len(calls) == 1


def test_documents_start_anew_where_the_table_is_as_long_as_the_pack():
    """Upstream's own path would take such a table for one of the whole pack."""
    ours, _ = pair()
    hidden, table = torch.randn(SEQ, 1, HIDDEN), angles(ours.config)
    packed = packed_of([0, 5, SEQ], longest=SEQ)
    y, _ = ours(hidden, None, rotary_pos_emb=table, packed_seq_params=packed)
    for start, end in ((0, 5), (5, SEQ)):
        alone, _ = ours(hidden[start:end], None, rotary_pos_emb=table[: end - start])
        torch.testing.assert_close(y[start:end], alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_then_tokens_is_the_whole_sequence(variant):
    """Pieces of any length, from a cache of keys and values."""
    from megatron.core.inference.contexts import StaticInferenceContext

    ours, _ = pair(**VARIANTS[variant])
    ours.eval()
    hidden, table = torch.randn(SEQ, BATCH, HIDDEN), angles(ours.config)
    expected, _ = ours(hidden, None, rotary_pos_emb=table)
    context, found = StaticInferenceContext(BATCH, SEQ), []
    for start, end in ((0, 4), (4, 7), *((t, t + 1) for t in range(7, SEQ))):
        context.sequence_len_offset = start
        part = {"inference_context": context, "rotary_pos_emb": table}
        found.append(ours(hidden[start:end], None, **part)[0])
    torch.testing.assert_close(torch.cat(found), expected)


@pytest.mark.parametrize("variant", ["plain", "qk-layernorm"])
def test_checkpoint_keys_are_megatrons(variant):
    ours, theirs = pair(**VARIANTS[variant])
    found, expected = (m.sharded_state_dict("layer.") for m in (ours, theirs))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].key == getattr(tensor, "key", None)
        assert found[key].global_shape == tensor.global_shape


def test_refusals():
    ours, _ = pair()
    hidden, table = torch.randn(SEQ, BATCH, HIDDEN), angles(ours.config)
    with pytest.raises(AttentionError, match="angles of their own"):
        ours(hidden, None, rotary_pos_emb=(table, table.clone()))
    with pytest.raises(AttentionError, match=r"rotary_pos_emb is \(9, 2, 1, 8\)"):
        ours(hidden, None, rotary_pos_emb=table.expand(-1, 2, -1, -1))
    with pytest.raises(AttentionError, match="max_seqlen_q is 9, rotary_pos_emb has 5"):
        packed = packed_of([0, 5, SEQ], longest=SEQ)
        ours(hidden[:, :1], None, rotary_pos_emb=table[:5], packed_seq_params=packed)
    y, _ = ours(hidden, None, rotary_pos_emb=(table, table))
    assert torch.equal(y, ours(hidden, None, rotary_pos_emb=table)[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_output_gate": True}, "attention_output_gate: Megatron's own path"),
        ({"context_parallel_size": 2}, "context_parallel_size 2"),
        ({"tensor_model_parallel_size": 4}, "num_query_groups 2 with 4 tensor-parallel ranks"),
        ({"fused_single_qkv_rope": True}, "fused_single_qkv_rope"),
    ],
)
def test_what_upstreams_path_alone_can_do_is_left_to_it(changes, reason):
    config = make_config()
    for name, value in changes.items():
        setattr(config, name, value)
    workload = rope_qk.workload("cuda", config)
    decision = dispatch.choose("rope_qk", workload)
    assert decision.observed == "megatron" and reason in decision.reason


class TestDispatchedCoreAttention:
    """The choice for both layouts, as on an H200 with the pinned stack."""

    def build(self, monkeypatch, backends=None, **changes):
        for module in ("attention", "dispatched"):
            monkeypatch.setattr(f"megacpp_mcore.layers.{module}.current_device", lambda: "cuda")
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
        dispatch.forget()
        config = make_config(params_dtype=torch.bfloat16, bf16=True, **changes)
        attach(config, PluginSettings(backends=backends or {}))
        return build(SelfAttention, config, DispatchedCoreAttention).core_attention

    def test_both_layouts_are_decided_and_recorded(self, monkeypatch):
        core = self.build(monkeypatch)
        assert isinstance(core, CoreAttentionByLayout)
        assert type(core.whole) is CudnnCoreAttention and type(core.packed) is FlashCoreAttention
        decisions = [d for d in dispatch.decisions() if d.surface == "core_attention"]
        assert [d.observed for d in decisions] == ["sdpa_cudnn", "sdpa_flash"]
        assert [d.reason.split(":")[0] for d in decisions] == ["layout sbhd", "layout thd"]

    def test_one_backend_for_both_is_one_module(self, monkeypatch):
        core = self.build(monkeypatch, {"core_attention": "sdpa_flash"})
        assert type(core) is FlashCoreAttention

    def test_a_named_backend_without_packed_documents_refuses_them(self, monkeypatch):
        core = self.build(monkeypatch, {"core_attention": "sdpa_cudnn"})
        q, kv = torch.zeros(SEQ, 6, DIM), torch.zeros(SEQ, 2, DIM)
        words = "packed documents: backend 'sdpa_cudnn' is named .* gradients .* sdpa_flash: can"
        with pytest.raises(Exception, match=words):
            core(q, kv, kv, None, packed_seq_params=packed_of([0, SEQ]))

    def test_a_window_is_for_the_one_that_has_it(self, monkeypatch):
        core = self.build(monkeypatch, window_size=(4, 0))
        assert type(core) is ReferenceCoreAttention and core.window == 4
