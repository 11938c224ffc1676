"""The M2RNN mixer in Megatron's TransformerLayer: math, dtypes, documents, inference, refusals."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.hybrid.hybrid_block import (
    HybridStack,
    HybridStackSubmodules,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.block_settings import M2RNNSettings
from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout
from megacpp_mcore.layers.m2rnn import M2RNNMixer
from megacpp_mcore.layers.mixer import MixerSubmodules
from megacpp_mcore.layers.norm import TorchNorm
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, K, V = 27, 5, 4
SETTINGS = M2RNNSettings(k_head_dim=K, v_head_dim=V, chunk_size=8)  # 27 // (5 + 4) = 3 heads
HEADS = 3
FP32_PARAMETERS = {"W", "A_log", "dt_bias", "D"}
LINEARS = MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)


@pytest.fixture(scope="module", autouse=True)
def process_groups():
    with single_process(0):
        yield


def config(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 3,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "layernorm_epsilon": 1e-3,
    }
    return TransformerConfig(**(fields | changes))


def build(settings=SETTINGS, seed=0, model_config=None, **changes):
    """The mixer with every parameter moved off its initial value."""
    torch.manual_seed(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer = M2RNNMixer(model_config or config(**changes), LINEARS, 1, groups, settings=settings)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def stack_of_two(**changes):
    """Two R layers as Megatron's HybridStack builds them, in the slot of `G`."""
    torch.manual_seed(0)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=TorchNorm,
            self_attention=ModuleSpec(module=M2RNNMixer, submodules=LINEARS),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    return HybridStack(
        attach(config(**changes), PluginSettings(m2rnn=SETTINGS)),
        HybridStackSubmodules(gdn_layer=layer),
        layer_type_list=["G", "G"],
        post_layer_norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def hidden(seq, batch, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(seq, batch, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def packed(bounds, padded=None, qkv_format="thd"):
    return PackedSeqParams(
        qkv_format=qkv_format,
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
    )


def formulas(p, x, heads=HEADS, k_dim=K, v_dim=V, kernel=4, eps=1e-3):
    """One row of the batch, token by token and head by head: x (s, h) -> (s, h)."""
    channels = 2 * k_dim + heads * v_dim
    # Behind the parts there are rows of padding, which nothing may read.
    rows = x @ p["in_proj.weight"][: channels + heads * v_dim + heads].T
    outputs, state = [], [torch.zeros(k_dim, v_dim, dtype=x.dtype) for _ in range(heads)]
    for t in range(x.shape[0]):
        conv = p["conv1d_bias"].clone()
        for back in range(min(kernel, t + 1)):
            conv = conv + p["conv1d_weight"][:, 0, kernel - 1 - back] * rows[t - back, :channels]
        conv = conv * torch.sigmoid(conv)
        q, k, v = conv[:k_dim], conv[k_dim : 2 * k_dim], conv[2 * k_dim :]
        gate, x_f = rows[t, channels : channels + heads * v_dim], rows[t, -heads:]
        y = []
        for h in range(heads):
            softplus = torch.log(1 + torch.exp(x_f[h] + p["dt_bias"][h]))
            f = torch.exp(-torch.exp(p["A_log"][h]) * softplus)
            v_h = v[h * v_dim : (h + 1) * v_dim]
            z = torch.tanh(state[h] @ p["W"][h] + torch.outer(k, v_h))
            state[h] = f * state[h] + (1 - f) * z
            y.append(state[h].T @ q)
        u = (torch.cat(y) + v * p["D"]) * gate * torch.sigmoid(gate)
        u = u / torch.sqrt((u * u).mean() + eps) * p["norm_weight"]
        outputs.append(p["out_proj.weight"] @ u)
    return torch.stack(outputs)


def assert_close(actual, expected, what, terms):
    """Both in float64, sums of up to `terms` terms in another order, through the block's stages."""
    bound = 8 * terms * torch.finfo(torch.float64).eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def test_matches_the_formulas_in_every_gradient():
    seq, batch = 13, 2
    mixer = build().double()
    x = hidden(seq, batch).requires_grad_()
    direction = hidden(seq, batch, seed=2)
    y, bias = mixer(x)
    assert bias is None
    (y * direction).sum().backward()

    p = {name: w.detach().clone().requires_grad_() for name, w in mixer.named_parameters()}
    x_again = x.detach().clone().requires_grad_()
    expected = torch.stack([formulas(p, x_again[:, b]) for b in range(batch)], dim=1)
    (expected * direction).sum().backward()
    terms = seq * batch * HIDDEN
    assert_close(y, expected, "output", terms)
    assert_close(x.grad, x_again.grad, "input gradient", terms)
    assert len(p) == 9
    for name, parameter in mixer.named_parameters():
        assert p[name].grad.abs().max() > 0, name
        assert_close(parameter.grad, p[name].grad, f"gradient of {name}", terms)


def test_serves_the_g_slot_of_a_hybrid_stack():
    stack = stack_of_two()
    x = hidden(9, 2, torch.float32)
    y = stack(x, attention_mask=None)
    assert y.shape == x.shape
    y.square().sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert [layer.self_attention.layer_number for layer in stack.layers] == [1, 2]
    assert isinstance(stack.layers[0].self_attention, M2RNNMixer)


def test_is_causal():
    mixer = build().double()
    x = hidden(12, 1)
    changed = x.clone()
    changed[7] += 1
    y, y_changed = mixer(x)[0], mixer(changed)[0]
    assert torch.equal(y[:7], y_changed[:7])
    assert all((y[t] != y_changed[t]).any() for t in range(7, 12))


@torch.no_grad()
def test_initial_values():
    torch.manual_seed(0)
    settings = M2RNNSettings(k_head_dim=2, v_head_dim=3, num_heads=500)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer = M2RNNMixer(config(), LINEARS, 1, groups, settings=settings)
    assert torch.equal(mixer.W, torch.eye(3).expand(500, 3, 3))
    assert torch.equal(mixer.D, torch.ones(1500)) and torch.equal(mixer.norm_weight, mixer.D)
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    # softplus and its inverse lose a few roundings of 1 at dt = 1e-3
    slack = 8 * torch.finfo(torch.float32).eps
    assert dt.min() >= 1e-3 - slack and dt.max() <= 1e-1 + slack
    assert dt.median() == pytest.approx(1e-2, rel=0.5)  # log-uniform
    A = mixer.A_log.exp()
    assert A.min() >= 1 - slack and A.max() <= 16 + 16 * slack and A.std() > 3
    assert 0.4 < mixer.conv1d_weight.abs().max() <= 0.5  # 1 / sqrt(4 taps)


def test_the_seed_alone_decides_the_weights():
    first, second, other = build(seed=3), build(seed=3), build(seed=4)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b) and not torch.equal(a, c), name


CASTS = {
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "to": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "bfloat16-then-float": (lambda m: m.bfloat16().float(), torch.float32),
    "move-and-cast": (lambda m: m.to("meta", torch.bfloat16), torch.bfloat16),
    "empty": (lambda m: m.bfloat16().to_empty(device="cpu"), torch.bfloat16),
    "Float16Module": (
        lambda m: Float16Module(config(bf16=True, params_dtype=torch.bfloat16), m).module,
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("cast", CASTS)
def test_fp32_parameters_stay_fp32(cast):
    mixer = build()
    mixer(hidden(3, 1, torch.float32))[0].sum().backward()
    before = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    function, dtype = CASTS[cast]
    mixer = function(mixer)
    for name, parameter in mixer.named_parameters():
        expected = torch.float32 if name in FP32_PARAMETERS else dtype
        assert parameter.dtype == parameter.grad.dtype == expected, name
        if name in FP32_PARAMETERS and not parameter.is_meta and cast != "empty":
            assert torch.equal(parameter, before[name]), name


def test_bfloat16_is_close_to_float64():
    mixer = build(bf16=True, params_dtype=torch.bfloat16)
    assert {p.dtype for p in mixer.parameters()} == {torch.bfloat16, torch.float32}
    x = hidden(40, 2, torch.bfloat16)
    y, _ = mixer(x)
    (y * y).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in mixer.parameters())
    assert y.dtype == torch.bfloat16
    exact, _ = build(bf16=True, params_dtype=torch.bfloat16).double()(x.double())
    # About ten bf16 tensors one after another, each rounded to half an eps
    assert (y - exact).norm() <= 10 / 2 * torch.finfo(torch.bfloat16).eps * exact.norm()


@pytest.mark.parametrize("padded", [None, [0, 4, 4, 11, 17]], ids=["plain", "padded"])
def test_packed_documents_start_anew(padded):
    """In state and convolution, forward and backward; behind the last is a document of its own."""
    mixer = build().double()
    bounds = padded or [0, 4, 4, 11, 17]
    params = packed([0, 3, 3, 9, 14] if padded else bounds, padded)
    x, direction = hidden(20, 1), hidden(20, 1, seed=2)
    x_packed, x_alone = (x.clone().requires_grad_() for _ in range(2))
    y, _ = mixer(x_packed, packed_seq_params=params)
    (y * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in mixer.named_parameters()}
    mixer.zero_grad()
    parts = x_alone.split([4, 7, 6, 3])
    alone = torch.cat([mixer(part)[0] for part in parts])
    (alone * direction).sum().backward()
    assert_close(y, alone, "output", HIDDEN)
    assert_close(x_packed.grad, x_alone.grad, "input gradient", 20 * HIDDEN)
    for name, parameter in mixer.named_parameters():
        assert_close(gradients[name], parameter.grad, name, 20 * HIDDEN)


def test_recompute_gives_the_same_gradients():
    x = hidden(10, 2).requires_grad_()
    mixer = build().double()
    plain = torch.autograd.grad(mixer(x)[0].square().sum(), [x, *mixer.parameters()])
    y, _ = torch.utils.checkpoint.checkpoint(mixer, x, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("cuts", [[1] * 11, [6, 1, 1, 3], [11]], ids=["tokens", "mixed", "whole"])
@torch.no_grad()
def test_steps_are_the_sequence(cuts):
    mixer = build().double()
    x = hidden(11, 2)
    state, outputs = mixer.zero_state(2), []
    for part in x.split(cuts):
        given = [t.clone() for t in state]
        y, _, after = mixer.step(part, state)
        assert all(torch.equal(a, b) for a, b in zip(given, state, strict=True))
        outputs.append(y)
        state = after
    assert_close(torch.cat(outputs), mixer(x)[0], "output", 11 * HIDDEN)


@torch.no_grad()
def test_static_inference_context_is_the_sequence():
    stack = stack_of_two()
    x = hidden(9, 2, torch.float32)
    expected = stack(x, attention_mask=None)
    context = StaticInferenceContext(max_batch_size=2, max_sequence_length=9)
    for _ in range(2):  # the second time, a new prompt must not see the first one's state
        outputs = []
        for part in x.split([6, 1, 1, 1]):
            context.sequence_len_offset = sum(y.shape[0] for y in outputs)
            outputs.append(stack(part, attention_mask=None, inference_context=context))
        # float32 sums of HIDDEN terms through two layers of eight stages
        bound = 16 * HIDDEN * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (torch.cat(outputs) - expected).abs().max() <= bound
        context.reset()


def test_settings_and_backend_come_from_the_plugin(monkeypatch):
    plugin = PluginSettings(m2rnn=SETTINGS, backends={"m2rnn": "reference"})
    mixer = build(settings=None, model_config=attach(config(), plugin))
    assert mixer.settings is SETTINGS
    decision = dispatch.decisions()[-1]
    assert (decision.surface, decision.requested, decision.observed) == (
        "m2rnn",
        *2 * ["reference"],
    )
    monkeypatch.setenv("MEGACPP_BACKENDS", "m2rnn=none-such")
    with pytest.raises(MegacppError, match="none-such"):
        build()


def test_the_state_s_gradient_is_clamped_as_the_settings_say():
    def gradient(grad_clamp):
        mixer = build(dataclasses.replace(SETTINGS, grad_clamp=grad_clamp))
        x = hidden(20, 1, torch.float32).requires_grad_()
        mixer(x)[0].square().sum().backward()
        return x.grad

    true = gradient(None)
    # The clamp adds the two halves of a step's gradient in another order.
    torch.testing.assert_close(gradient(1e9), true, rtol=1e-4, atol=1e-4)
    assert (gradient(1e-4) - true).norm() > 1e-3 * true.norm()


def test_the_recurrence_is_told_which_tanh_the_settings_name():
    for tanh in ("approximate", "exact"):
        mixer = build(dataclasses.replace(SETTINGS, tanh=tanh))
        backend, told = mixer.m2rnn, []

        def spy(*tensors, tanh, backend=backend, told=told, **options):
            told.append(tanh)
            return backend(*tensors, tanh=tanh, **options)

        mixer.m2rnn = spy
        mixer(hidden(20, 1, torch.float32))
        assert told == [tanh]


class DynamicContext(SimpleNamespace):
    def is_static_batching(self):
        return False


CALLS = {
    "dynamic": ({"inference_context": DynamicContext()}, "DynamicContext"),
    "bias": ({"attention_bias": torch.zeros(1)}, "attention_bias"),
    "packed-format": ({"packed_seq_params": packed([0, 4], qkv_format="sbhd")}, "'sbhd'"),
    "packed-batch": ({"packed_seq_params": packed([0, 4])}, "batch 2"),
    "packed-without": ({"packed_seq_params": PackedSeqParams(qkv_format="thd")}, "missing"),
    "packed-inference": (
        {
            "inference_context": StaticInferenceContext(2, 8),
            "packed_seq_params": packed([0, 4]),
        },
        "packed documents",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_refuses_calls(call):
    arguments, message = CALLS[call]
    with pytest.raises(MegacppError, match=message):
        build()(hidden(4, 2, torch.float32), **arguments)


def test_refuses_to_decode_without_a_prompt():
    context = StaticInferenceContext(2, 8)
    context.sequence_len_offset = 3
    with pytest.raises(MegacppError, match="layer 1 has no state at token 3"):
        build()(hidden(1, 2, torch.float32), inference_context=context)


def test_refuses_documents_longer_than_the_row():
    with pytest.raises(MegacppError, match="cu_seqlens"):
        build()(hidden(4, 1, torch.float32), packed_seq_params=packed([0, 5]))


def test_refuses_step_under_sequence_parallelism():
    mixer = build()
    mixer.config.sequence_parallel = True
    with pytest.raises(MegacppError, match="sequence_parallel"):
        mixer.step(hidden(1, 2, torch.float32), mixer.zero_state(2))


def test_refuses_context_parallelism_in_the_layer():
    """Where TransformerLayer also passes cp_comm_type; Megatron re-raises with the class kept."""
    with pytest.raises(MegacppError, match="context_parallel_size is 2"):
        stack_of_two(context_parallel_size=2, cp_comm_type="p2p")


LAYOUTS = {
    "heads": (M2RNNSettings(4, 4, num_heads=6), 4, {}, "6 m2rnn heads .* 4 tensor-parallel"),
    "k-dim": (M2RNNSettings(5, 4, num_heads=6), 2, {}, "5 channels of m2rnn.k_head_dim"),
    "no-heads": (M2RNNSettings(64, 16), 1, {}, "m2rnn.num_heads is 0 at hidden_size 27"),
    "negative": (M2RNNSettings(8, -8), 1, {}, "m2rnn.v_head_dim is -8"),
    "kernel": (M2RNNSettings(5, 4, conv_kernel=0), 1, {}, "m2rnn.conv_kernel is 0"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_refuses_layouts(case):
    settings, tp, changes, message = LAYOUTS[case]
    sizes = SimpleNamespace(**({"hidden_size": 27, "context_parallel_size": 1} | changes))
    with pytest.raises(MegacppError, match=message):
        M2RNNLayout.of(sizes, settings, tp)


@pytest.mark.parametrize("bounds", [None, [0, 6, 13]], ids=["whole", "documents"])
def test_one_operator_in_place_of_prep_and_recurrence_gets_what_they_get(bounds):
    """As dispatch has it on a GPU: here the definition of the operator."""
    from megacpp_mcore.kernels.m2rnn_core import m2rnn_core

    mixer = build()
    found = []
    for fused in (None, m2rnn_core):
        mixer.fused = fused
        x = hidden(21, 1, torch.float32).requires_grad_()
        y, _ = mixer(x, packed_seq_params=None if bounds is None else packed(bounds))
        mixer.zero_grad()
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in mixer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_layout_of_nam56r():
    for hidden_size, heads, tp in ((3584, 44, 4), (4096, 51, 1)):
        sizes = SimpleNamespace(hidden_size=hidden_size, context_parallel_size=1)
        layout = M2RNNLayout.of(sizes, M2RNNSettings(), tp)
        assert (layout.heads, layout.channels) == (heads, heads * 16)
        assert sum(layout.in_proj.values()) * tp == 2 * 64 + 2 * heads * 16 + heads
        assert (sum(layout.in_proj.values()) + layout.padding) % 16 == 0 <= layout.padding < 16


def test_sharded_state_dict_names_each_part():
    mixer = build()
    sharded = mixer.sharded_state_dict("layer.")
    assert set(sharded) == {f"layer.{n}" for n in mixer.state_dict()}
    parts = sharded["layer.in_proj.weight"].build()
    assert [p.key.rpartition(".")[2] for p in parts] == ["query", "key", "value", "gate", "decay"]
    assert [p.local_shape[0] for p in parts] == [K, K, HEADS * V, HEADS * V, HEADS]
    assert math.prod(sharded["layer.W"].global_shape) == HEADS * V * V


def test_padding_is_zero_and_in_no_checkpoint():
    mixer = stack_of_two().layers[0].self_attention  # as it is initialised
    padding, weight = mixer.layout.padding, mixer.in_proj.weight
    assert padding > 0 and weight.shape[0] % 16 == 0
    assert not weight[-padding:].any() and weight[:-padding].any()
    out, _ = mixer(hidden(5, 2, weight.dtype))
    out.square().sum().backward()
    assert not weight.grad[-padding:].any() and weight.grad[:-padding].any()
    factory = mixer.sharded_state_dict("layer.")["layer.in_proj.weight"]
    shards = factory.build()
    assert sum(shard.local_shape[0] for shard in shards) == weight.shape[0] - padding
    assert torch.equal(factory.merge_fn([shard.data for shard in shards]), weight)
