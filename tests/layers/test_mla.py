"""MLA inside Megatron: the same module as upstream's, whatever serves mla_rope."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from gather_hooks import of_data_parallelism
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer import multi_latent_attention as upstream
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mla_rope import triton
from megacpp_mcore.kernels.moe_experts.grouped_mm import _DenseGradient
from megacpp_mcore.layers import blocks, mla_down, parts
from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
from megacpp_mcore.layers.dispatched import DispatchedNorm
from megacpp_mcore.layers.hybrid_stack import stack_spec
from megacpp_mcore.layers.mla import (
    AbsorbedMLASelfAttention,
    FusedMLASelfAttention,
    MLASelfAttention,
)
from megacpp_mcore.layers.norm import TorchNorm
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, SEQ, BATCH = 24, 9, 2
MOE = get_moe_module_spec(use_te=False, num_experts=1)
VARIANTS = {
    "plain": {},
    "no-q-lora": {"q_lora_rank": None},
    "qk-layernorm": {"qk_layernorm": True},
    "yarn": {
        "rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 4,
    },
    "partial": {"rotary_percent": 0.5},
    "partial-odd": {"rotary_percent": 0.4},  # 3 of 8 dims, for which Megatron turns 4
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "recompute-core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Megatron's process groups, and no CUDA random states for its checkpoints to keep."""
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    with single_process(0):
        yield


def make_config(backend="reference", **changes):
    fields = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 3, "q_lora_rank": 10,
        "kv_lora_rank": 7, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 5,
        "rope_type": "rope", "rotary_base": 100, "apply_rope_fusion": False,
        "attention_dropout": 0.0, "normalization": "RMSNorm", "use_cpu_initialization": True,
        "multi_latent_attention": True, "add_bias_linear": False,
    }  # fmt: skip
    config = MLATransformerConfig(**(fields | changes))
    return attach(config, PluginSettings(backends={"mla_rope": backend}))


def build(cls, config, dtype=torch.float64):
    norm = TorchNorm if config.qk_layernorm else IdentityOp
    submodules = upstream.MLASelfAttentionSubmodules(
        linear_proj=RowParallelLinear, q_layernorm=norm, kv_layernorm=norm,
        linear_q_proj=ColumnParallelLinear, linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
        linear_qkv_down_proj=ColumnParallelLinear,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = cls(config, submodules, 1, AttnMaskType.causal, pg_collection=groups)
    return module.to(dtype)


def pair(backend="reference", dtype=torch.float64, **changes):
    """Ours and upstream's, of the same weights."""
    ours, theirs = (build(cls, make_config(backend, **changes), dtype)
                    for cls in (MLASelfAttention, upstream.MLASelfAttention))  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def run(module, hidden, bounds=None):
    """Output, input gradient, parameter gradients."""
    hidden = hidden.clone().requires_grad_()
    packed = None
    if bounds is not None:
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        bounds = torch.tensor(bounds, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    y, bias = module(hidden, attention_mask=None, packed_seq_params=packed)
    assert bias is None
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    (y * direction).sum().backward()
    values = {"y": y.detach(), "dx": hidden.grad}
    return values | {name: p.grad for name, p in module.named_parameters()}


def assert_equal(found, expected, eps):
    """Sums of at most SEQ * BATCH * HIDDEN terms, a few after one another, in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 8 * SEQ * BATCH * HIDDEN * eps * value.abs().max()
        assert value.abs().max() > 0, name
        assert (found[name] - value).abs().max() <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 9]], ids=["rows", "documents"])
def test_ours_is_upstreams(variant, bounds, monkeypatch):
    """In float64, where upstream turns in float64 by cosines of float32, as we do."""
    torch.manual_seed(3)
    ours, theirs = pair(**VARIANTS[variant])
    products, one = [], mla_down.one_product
    monkeypatch.setattr(mla_down, "one_product", lambda *of: products.append(of) or one(*of))
    hidden = torch.randn(SEQ, 1 if bounds else BATCH, HIDDEN, dtype=torch.float64)
    found, expected = run(ours, hidden, bounds), run(theirs, hidden, bounds)
    assert_equal(found, expected, torch.finfo(torch.float64).eps)
    assert bool(products) == (ours.config.q_lora_rank is not None)  # of both down projections


@pytest.mark.parametrize("name", ["linear_q_down_proj", "linear_kv_down_proj"])
def test_a_down_projection_with_a_hook_is_called(name):
    ours, theirs = pair()
    seen = []
    ours.get_submodule(name).register_forward_hook(lambda *of: seen.append(of))
    hidden = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64)
    assert_equal(run(ours, hidden), run(theirs, hidden), torch.finfo(torch.float64).eps)
    assert len(seen) == 1


def _of_dense_gradients(whole, q, *others):
    return whole(_DenseGradient.apply(q), *others)


@pytest.mark.parametrize("what", ["queries", "their gradient"])
def test_what_a_hook_keeps_is_not_turned(what):
    """The kernel turns queries and their gradient in their own memory where nobody has kept it."""
    ours, theirs = pair(dtype=torch.float32)
    ours._rope = triton.mla_rope  # dispatch serves it on cuda only
    hidden, kept = torch.randn(SEQ, BATCH, HIDDEN), []
    for layer in (ours, theirs):
        if what == "queries":
            keep = layer.linear_q_up_proj.register_forward_hook
        else:
            keep = layer.core_attention.register_full_backward_hook
            whole = layer.core_attention.whole  # whose gradients are contiguous, as a kernel's
            layer.core_attention.whole = partial(_of_dense_gradients, whole)
        keep(lambda _, inputs, outputs: kept.append((outputs if what == "queries" else inputs)[0]))
        run(layer, hidden)
    torch.testing.assert_close(*kept)


def test_one_down_projection_is_the_two():
    """From the checkpoint of the two, and under its keys."""
    torch.manual_seed(5)
    apart, _ = pair()
    together = build(FusedMLASelfAttention, make_config())
    together.load_state_dict(apart.state_dict(), strict=True)
    hidden = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64)
    found, expected = run(together, hidden), run(apart, hidden)
    parts = [expected.pop(f"linear_{x}_down_proj.weight") for x in ("q", "kv")]
    expected["linear_qkv_down_proj.weight"] = torch.cat(parts)
    assert_equal(found, expected, torch.finfo(torch.float64).eps)
    assert together.sharded_state_dict("x.").keys() == apart.sharded_state_dict("x.").keys()


@pytest.fixture
def fused_stack(monkeypatch):
    """Megatron's own stack, as it builds MTP's layers, of one fused MLA layer of our spec."""
    # Transformer Engine's, which there is none of here.
    monkeypatch.setattr(hybrid_block, "TELayerNormColumnParallelLinear", ColumnParallelLinear)

    def built(**backends):
        config = make_config(mla_down_proj_fusion=True)
        spec = stack_spec({"linear": "reference"})
        return hybrid_block.HybridStack(
            attach(config, PluginSettings(backends=backends)), spec.submodules, is_mtp_layer=True,
            layer_type_list=["+"], post_layer_norm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )  # fmt: skip

    return built


def test_an_mtp_depths_fused_attention_is_ours(fused_stack, monkeypatch):
    """Upstream's would take no notice of a named mla_rope, and be wrong over ranks."""
    monkeypatch.setenv("MEGACPP_BACKENDS", "mla_rope=reference")
    (layer,) = fused_stack().layers
    assert type(layer.self_attention) is FusedMLASelfAttention
    assert layer.self_attention._rope is not None


@pytest.mark.parametrize(("surface", "name"), [("norm", "reference"), ("linear", "reference")])
def test_a_named_norm_or_linear_that_the_fused_projection_has_no_room_for(
    fused_stack, monkeypatch, surface, name
):
    with pytest.raises(MegacppError, match=f'{surface} = "{name}" is asked for'):
        fused_stack(**{surface: name})
    monkeypatch.setenv("MEGACPP_BACKENDS", f"{surface}={name}")
    with pytest.raises(MegacppError, match=f'{surface} = "{name}" is asked for'):
        fused_stack()


DSA = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 4,
}  # fmt: skip


def test_dsa_of_megatrons_linears_is_refused():
    attention = stack_spec({"linear": "reference"}).submodules.dsa_layer.submodules.self_attention
    with pytest.raises(MegacppError, match="its indexer takes Transformer Engine's only"):
        build_module(attention, config=make_config(**DSA), layer_number=1)


def test_dsa_waits_for_the_weight_that_it_absorbs():
    """overlap_param_gather waits in a pre-hook of the module, which upstream does not call."""

    class OfMegatronsLinears(AbsorbedMLASelfAttention):
        """As far as it can be built here, without an indexer."""

        __init__ = absorbed_mla.AbsorbedMLASelfAttention.__init__

    attention = build(OfMegatronsLinears, make_config(**DSA))
    waited = []
    attention.linear_kv_up_proj.register_forward_pre_hook(
        of_data_parallelism(lambda *_: waited.append(True))
    )
    k_up, v_up = attention._get_kv_up_weights()
    assert waited and (k_up.shape, v_up.shape) == ((3, 6, 7), (3, 5, 7))


@pytest.mark.parametrize(
    ("norm", "inside"), [("auto", True), ("te", True), ("triton", False), ("reference", False)]
)
def test_a_named_norm_is_not_left_to_transformer_engines_linears(monkeypatch, norm, inside):
    linears = replace(parts.megatron_linears(), is_te=True)
    monkeypatch.setattr(parts, "megatron_linears", lambda: linears)
    monkeypatch.setattr(blocks, "get_moe_module_spec", lambda **kwargs: MOE)
    attention = stack_spec({"norm": norm}).submodules.mla_layer.submodules.self_attention
    norms = {attention.submodules.q_layernorm, attention.submodules.kv_layernorm}
    assert norms == {IdentityOp if inside else DispatchedNorm}


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, [0, 4, 9]], ids=["rows", "documents"])
def test_the_kernel_in_the_layer(bounds):
    torch.manual_seed(4)
    ours, theirs = pair(dtype=torch.float32, **VARIANTS["recompute"])
    ours._rope = triton.mla_rope  # dispatch serves it on cuda only
    hidden = torch.randn(SEQ, 1 if bounds else BATCH, HIDDEN)
    eps = torch.finfo(torch.float32).eps
    assert_equal(run(ours, hidden, bounds), run(theirs, hidden, bounds), eps)


def test_the_backend_named_megatron_is_upstreams_path():
    """Bit for bit, in bf16, where upstream rounds cos, sin and every step of a turn."""
    hidden = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16)
    for backend, same in (("megatron", True), ("reference", False)):
        ours, theirs = pair(backend, dtype=torch.bfloat16)
        found, expected = run(ours, hidden), run(theirs, hidden)
        assert all(torch.equal(found[name], expected[name]) for name in expected) == same


def test_one_long_document_starts_anew_behind_another():
    """Upstream's does not where max_seqlen_q says the length of the whole row."""
    ours, _ = pair()
    hidden = torch.randn(SEQ, 1, HIDDEN, dtype=torch.float64)
    bounds = torch.tensor([0, 5, SEQ], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=SEQ, max_seqlen_kv=SEQ)
    y, _ = ours(hidden, attention_mask=None, packed_seq_params=packed)
    for start, end in ((0, 5), (5, SEQ)):
        alone, _ = ours(hidden[start:end], attention_mask=None)
        torch.testing.assert_close(y[start:end], alone, rtol=1e-12, atol=1e-12)


def test_rows_may_grow():
    ours, theirs = pair()
    for seq in (4, 9, 6):
        hidden = torch.randn(seq, BATCH, HIDDEN, dtype=torch.float64)
        torch.testing.assert_close(
            ours(hidden, attention_mask=None)[0], theirs(hidden, attention_mask=None)[0],
            rtol=1e-12, atol=1e-12,
        )  # fmt: skip


@pytest.mark.parametrize("variant", ["plain", "no-q-lora", "qk-layernorm"])
def test_prompt_then_tokens_is_the_whole_sequence(variant):
    """Pieces of any length, with the latents as the only cache."""
    from megatron.core.inference.contexts import StaticInferenceContext

    ours, _ = pair(**VARIANTS[variant])
    ours.eval()
    hidden = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64)
    expected, _ = ours(hidden, attention_mask=None)
    context, found = StaticInferenceContext(BATCH, SEQ), []
    for start, end in ((0, 4), (4, 7), *((t, t + 1) for t in range(7, SEQ))):
        context.sequence_len_offset = start
        found.append(ours(hidden[start:end], attention_mask=None, inference_context=context)[0])
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)
    cache = context.key_value_memory_dict[ours.layer_number]
    config = ours.config
    kept = sum(x[0, 0].numel() for x in cache)
    assert kept == config.kv_lora_rank + config.qk_pos_emb_head_dim
    with pytest.raises(MegacppError, match=f"is of {SEQ} tokens, and {SEQ + 1} are needed"):
        context.sequence_len_offset = SEQ
        ours(hidden[:1], attention_mask=None, inference_context=context)
    with pytest.raises(MegacppError, match="has no state at token 3"):
        other = StaticInferenceContext(BATCH, SEQ)
        other.sequence_len_offset = 3
        ours(hidden[:1], attention_mask=None, inference_context=other)


def test_checkpoint_keys_are_megatrons():
    for variant in ("plain", "no-q-lora", "qk-layernorm"):
        ours, theirs = pair(**VARIANTS[variant])
        found, expected = (m.sharded_state_dict("layer.") for m in (ours, theirs))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].key == getattr(tensor, "key", None)
            assert found[key].global_shape == tensor.global_shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved with MLA"),
        ({"context_parallel_size": 2}, "context_parallel_size 2"),
    ],
)
def test_refusals(changes, message):
    config = make_config()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(MegacppError, match=message):
        build(MLASelfAttention, config)


def test_another_packed_layout_is_refused():
    ours, _ = pair()
    packed = PackedSeqParams("bshd", max_seqlen_q=SEQ, max_seqlen_kv=SEQ)
    with pytest.raises(MegacppError, match="qkv_format 'bshd'"):
        ours(torch.randn(SEQ, 1, HIDDEN).double(), attention_mask=None, packed_seq_params=packed)
