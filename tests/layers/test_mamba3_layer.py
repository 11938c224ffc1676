"""The Mamba-3 mixer inside Megatron's MambaLayer: math, dtypes, documents, inference, refusals."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.block_settings import Mamba3Settings
from megacpp_mcore.kernels.mamba3_core import mamba3_core
from megacpp_mcore.layers.mamba3 import Mamba3Mixer
from megacpp_mcore.layers.mixer import MixerSubmodules
from megacpp_mcore.layers.norm import TorchNorm
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN = 24
SIZES = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
}
SISO = Mamba3Settings(chunk_size=8, decay_floor=0.6)  # a floor that tokens reach
MIMO = Mamba3Settings(variant="mimo", mimo_rank=3, decay="rational", rope_fraction=1.0)
FP32_PARAMETERS = {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}


@pytest.fixture(scope="module", autouse=True)
def process_groups():
    with single_process(0):
        yield


def config(**changes):
    fields = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**(fields | SIZES | changes))


def build(settings=SISO, seed=0, **changes):
    """The layer as HybridStack builds it, every parameter moved off its initial value."""
    torch.manual_seed(seed)
    mixer = ModuleSpec(
        module=Mamba3Mixer,
        submodules=MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        params={"settings": settings},
    )
    spec = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=TorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add
        ),
    )
    layer = build_module(
        spec,
        config(**changes),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        name="decoder.layers.0",
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def mixer_by_hand(mixer, settings, hidden):
    """The block in float64, one token, head and rank at a time. hidden [s, b, h] -> [s, b, h]."""
    H, P, N, G = SIZES.values()
    R = settings.mimo_rank if settings.variant == "mimo" else 1
    A = int(N * settings.rope_fraction) // 2
    w = {name: p.detach().double() for name, p in mixer.named_parameters()}
    rows = [H * P, H * P, G * R * N, G * R * N, H, H, H, A]
    # Behind the parts there are rows of padding, which nothing may read.
    weight = w["in_proj.weight"][: sum(rows)]
    z, x, B, C, dd_dt, dd_A, trap, angle = (hidden @ weight.T).split(rows, -1)
    per_rank = {n: w[n].reshape(H, R, -1) for n in ("B_bias", "C_bias")}
    mimo = {n: w.get(n, torch.ones(H, R, P).double()) for n in ("mimo_x", "mimo_z", "mimo_o")}

    def rms_norm(v, weight):
        return v / (v.square().mean() + 1e-5).sqrt() * weight

    def turn(v, theta):
        v = v.clone()
        for i, angle in enumerate(theta):
            a, b = (i, i + N // 2) if settings.variant == "mimo" else (2 * i, 2 * i + 1)
            v[a], v[b] = (
                v[a] * angle.cos() - v[b] * angle.sin(),
                v[a] * angle.sin() + v[b] * angle.cos(),
            )
        return v

    seq, batch, _ = hidden.shape
    y = torch.zeros(seq, batch, H, P).double()
    for b in range(batch):
        for h in range(H):
            g, theta, state = h // (H // G), torch.zeros(A).double(), torch.zeros(P, N).double()
            last = [(torch.zeros(P).double(), torch.zeros(N).double())] * R
            for t in range(seq):
                logit = dd_A[t, b, h]
                if settings.decay == "softplus":
                    rate = F.softplus(logit)
                else:
                    rate = 1 + logit if logit >= 0 else 1 / (1 - logit)
                dt = F.softplus(dd_dt[t, b, h] + w["dt_bias"][h])
                alpha = (-max(rate, settings.decay_floor) * dt).exp()
                lam = trap[t, b, h].sigmoid()
                theta = theta + math.pi * angle[t, b].tanh() * dt
                values, queries = [], []
                for r in range(R):
                    at = slice((g * R + r) * N, (g * R + r + 1) * N)
                    k = rms_norm(B[t, b, at], w["B_norm.weight"]) + per_rank["B_bias"][h, r]
                    q = rms_norm(C[t, b, at], w["C_norm.weight"]) + per_rank["C_bias"][h, r]
                    v = x[t, b, h * P : (h + 1) * P] * mimo["mimo_x"][h, r]
                    values.append((v, turn(k, theta)))
                    queries.append(turn(q, theta))
                state = alpha * state
                for (v, k), (last_v, last_k) in zip(values, last, strict=True):
                    state = state + (1 - lam) * dt * alpha * last_v.outer(last_k)
                    state = state + lam * dt * v.outer(k)
                for r in range(R):
                    gate = F.silu(z[t, b, h * P : (h + 1) * P] * mimo["mimo_z"][h, r])
                    skip = w["D"][h] * values[r][0]
                    y[t, b, h] += (state @ queries[r] + skip) * gate * mimo["mimo_o"][h, r]
                last = values
    return y.flatten(2) @ w["out_proj.weight"].T


def tolerance(expected, dtype=torch.float64):
    """Sums of at most 200 terms (tokens, hidden, N R) in a chain of five: in_proj, norm, scores,
    state, out_proj; each term rounds by one eps of the largest."""
    return 5 * 200 * torch.finfo(dtype).eps * expected.detach().abs().max().item()


@pytest.mark.parametrize("settings", [SISO, MIMO], ids=["siso", "mimo"])
def test_layer_is_the_block_written_by_hand(settings):
    layer = build(settings).double()
    hidden = torch.randn(19, 2, HIDDEN, dtype=torch.float64)
    normed = F.rms_norm(hidden, (HIDDEN,), layer.norm.weight, 1e-5)
    expected = hidden + mixer_by_hand(layer.mixer, settings, normed)
    layer.config.params_dtype = torch.float64  # MambaLayer casts its input to it
    torch.testing.assert_close(layer(hidden), expected, rtol=0, atol=tolerance(expected))


@pytest.mark.parametrize("settings", [SISO, MIMO], ids=["siso", "mimo"])
def test_every_parameter_learns(settings):
    layer = build(settings)
    hidden = torch.randn(21, 2, HIDDEN, requires_grad=True)
    layer(hidden).square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    rows = layer.mixer.in_proj.weight.grad.abs().amax(1)
    parts = len(rows) - layer.mixer.layout.padding
    assert (rows[:parts] > 0).all(), "a row of in_proj feeds nothing"
    assert not rows[parts:].any(), "padding has a gradient"
    assert hidden.grad.abs().min() > 0


@pytest.mark.parametrize("offsets", [None, [0, 6, 13]], ids=["whole", "documents"])
def test_one_operator_in_place_of_prep_and_scan_gets_what_they_get(offsets):
    """As dispatch has it on a GPU: here the definition of the operator."""
    from megacpp_mcore.kernels.mamba3_core import mamba3_core

    mixer, packed = build().mixer, None
    if offsets is not None:
        packed = TestDocuments().packed(offsets)
    found = []
    for fused in (None, mamba3_core):
        mixer.fused = fused
        hidden = torch.randn(21, 1, HIDDEN, generator=torch.Generator().manual_seed(3))
        hidden.requires_grad_()
        y, _ = mixer(hidden, packed_seq_params=packed)
        mixer.zero_grad()
        y.square().sum().backward()
        found.append([y.detach(), hidden.grad, *(p.grad for p in mixer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_later_tokens_do_not_change_earlier_ones():
    layer = build()
    hidden = torch.randn(20, 1, HIDDEN)
    changed = hidden.clone()
    changed[13:] += 1
    assert torch.equal(layer(hidden)[:8], layer(changed)[:8])  # whole chunks: the same arithmetic
    torch.testing.assert_close(layer(hidden)[:13], layer(changed)[:13])
    assert not torch.allclose(layer(hidden)[13:], layer(changed)[13:])


class TestParameters:
    def dtypes(self, layer):
        return {name: p.dtype for name, p in layer.mixer.named_parameters()}

    @pytest.mark.parametrize("settings", [SISO, MIMO], ids=["siso", "mimo"])
    @pytest.mark.parametrize("cast", ["bfloat16", "half"])
    def test_the_recurrence_stays_float32(self, settings, cast):
        layer = build(settings)
        before = {name: p.detach().clone() for name, p in layer.mixer.named_parameters()}
        getattr(layer, cast)()
        for name, parameter in layer.mixer.named_parameters():
            if name in FP32_PARAMETERS:
                assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name])
            else:
                assert parameter.dtype == getattr(torch, cast), name
        layer.float()
        assert set(self.dtypes(layer).values()) == {torch.float32}
        layer.to(torch.bfloat16)
        assert self.dtypes(layer)["D"] == torch.float32
        layer.double()
        assert set(self.dtypes(layer).values()) == {torch.float64}

    def test_device_moves_work(self):
        layer = build(mamba_num_groups=3).to("meta")
        assert all(t.device.type == "meta" for t in (*layer.parameters(), *layer.buffers()))
        assert layer.to(torch.bfloat16).mixer.D.device.type == "meta"
        assert layer.mixer.D.dtype == torch.float32
        both = build().to("meta", torch.bfloat16).mixer
        assert (both.D.device.type, both.D.dtype) == ("meta", torch.float32)

    def test_gradients_and_identity_survive_a_cast(self):
        layer = build()
        layer(torch.randn(4, 1, HIDDEN)).sum().backward()
        parameter, gradient = layer.mixer.dt_bias, layer.mixer.dt_bias.grad.clone()
        layer.bfloat16()
        assert layer.mixer.dt_bias is parameter and torch.equal(parameter.grad, gradient)
        assert parameter.tensor_model_parallel

    @pytest.mark.parametrize("settings", [SISO, MIMO], ids=["siso", "mimo"])
    def test_float16_module_runs_close_to_float32(self, settings):
        """bf16 weights and activations: five roundings of half an eps in a row, each of the size
        of the largest value, which the norm of B and C and the decays at most double."""
        layer = build(settings)
        hidden = torch.randn(30, 2, HIDDEN)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(parameter.bfloat16())
        expected = layer(hidden.bfloat16().float())
        layer.config.bf16, layer.config.params_dtype = True, torch.bfloat16
        model = Float16Module(layer.config, layer)
        y = model.module(hidden.bfloat16())
        assert y.dtype == torch.bfloat16
        error = (y.float() - expected).abs().max()
        assert error <= 5 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
        y.float().square().mean().backward()
        assert layer.mixer.dt_bias.grad.dtype == torch.float32

    def test_initial_values(self):
        torch.manual_seed(3)
        settings = Mamba3Settings(variant="mimo", mimo_rank=2, dt_min=0.01, dt_max=0.02)
        mixer = Mamba3Mixer(
            config(mamba_num_heads=512, mamba_num_groups=1),
            MixerSubmodules(ColumnParallelLinear, RowParallelLinear),
            HIDDEN,
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            settings=settings,
        )
        dt = F.softplus(mixer.dt_bias.detach())
        assert dt.min() >= 0.01 * (1 - 1e-5) and dt.max() <= 0.02 * (1 + 1e-5)
        # log-uniform: the median is the geometric mean, to 3 sigma of a median of 512 draws
        spread = 3 * math.log(2) * 0.5 / math.sqrt(512)
        assert abs(dt.median().log() - math.log(0.01 * 0.02) / 2) < spread
        for name in ("D", "B_bias", "C_bias", "mimo_z"):
            assert (getattr(mixer, name) == 1).all()
        assert (mixer.mimo_x == 0.5).all() and (mixer.mimo_o == 0.5).all()
        assert mixer.in_proj.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)
        # Megatron decays no vector
        assert mixer.dt_bias.dim() == mixer.D.dim() == 1

    def test_seed_decides(self):
        same, other = build(seed=1), build(seed=2)
        assert torch.equal(build(seed=1).mixer.dt_bias, same.mixer.dt_bias)
        assert not torch.equal(other.mixer.dt_bias, same.mixer.dt_bias)


class TestDocuments:
    def packed(self, offsets, padded=None):
        cu = torch.tensor(offsets, dtype=torch.int32)
        padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded
        )

    @pytest.mark.parametrize("offsets", [[0, 7, 20, 24], [0, 24], [0, 3, 3, 11]])
    def test_packed_documents_do_not_see_each_other(self, offsets):
        mixer = build().double().mixer
        hidden = torch.randn(24, 1, HIDDEN, dtype=torch.float64)
        y, bias = mixer(hidden, packed_seq_params=self.packed(offsets))
        assert bias is None
        ends = [*offsets[1:], 24]  # what follows the last offset is a document of its own
        pieces = [hidden[a:b] for a, b in zip(offsets, ends, strict=True) if b > a]
        expected = torch.cat([mixer(piece)[0] for piece in pieces])
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance(expected))

    def test_padding_between_documents_counts(self):
        mixer = build().double().mixer
        hidden = torch.randn(16, 1, HIDDEN, dtype=torch.float64)
        y, _ = mixer(hidden, packed_seq_params=self.packed([0, 6, 13], padded=[0, 8, 16]))
        expected = torch.cat([mixer(hidden[:8])[0], mixer(hidden[8:])[0]])
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance(expected))

    def test_refuses_packing_it_cannot_read(self):
        mixer = build().mixer
        with pytest.raises(MegacppError, match="qkv_format 'sbhd'"):
            mixer(torch.randn(8, 1, HIDDEN), packed_seq_params=PackedSeqParams(qkv_format="sbhd"))
        with pytest.raises(MegacppError, match="the batch is 2"):
            mixer(torch.randn(8, 2, HIDDEN), packed_seq_params=self.packed([0, 8]))


class TestInference:
    @pytest.mark.parametrize("name", ["siso", "mimo", "siso, one operator"])
    def test_prompt_then_tokens_is_the_whole_sequence(self, name):
        mixer = build(MIMO if name == "mimo" else SISO).double().mixer
        if "operator" in name:  # as where a GPU has mamba3_core: it has no scan of the mixer's
            mixer.fused, mixer.scan = mamba3_core, None
        hidden = torch.randn(15, 2, HIDDEN, dtype=torch.float64)
        expected, _ = mixer(hidden)
        context = StaticInferenceContext(max_batch_size=2, max_sequence_length=15)
        outputs = []
        for start, stop in [(0, 6), (6, 10), *((t, t + 1) for t in range(10, 15))]:
            context.sequence_len_offset = start
            outputs.append(mixer(hidden[start:stop], inference_context=context)[0])
        y = torch.cat(outputs)
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance(expected))
        context.reset()  # a new prompt starts from nothing
        again, _ = mixer(hidden[:6], inference_context=context)
        torch.testing.assert_close(again, expected[:6], rtol=0, atol=tolerance(expected))

    def test_refusals(self):
        mixer, hidden = build().mixer, torch.randn(1, 1, HIDDEN)
        dynamic = SimpleNamespace(is_static_batching=lambda: False)
        with pytest.raises(MegacppError, match="dynamic batching is not supported"):
            mixer(hidden, inference_context=dynamic)
        with pytest.raises(MegacppError, match="StaticInferenceContext"):
            mixer.mamba_state_shapes_per_request()
        context = StaticInferenceContext(max_batch_size=1, max_sequence_length=9)
        context.sequence_len_offset = 4
        with pytest.raises(MegacppError, match="no state at token 4"):
            mixer(hidden, inference_context=context)
        with pytest.raises(MegacppError, match="packed documents are not supported"):
            packed = TestDocuments().packed([0, 1])
            mixer(hidden, inference_context=context, packed_seq_params=packed)


class TestConstruction:
    @pytest.mark.parametrize(
        "settings, changes, message",
        [
            (SISO, {"mamba_num_heads": None}, "mamba_num_heads is not set"),
            (
                SISO,
                {"mamba_num_heads": 5},
                "mamba_num_heads 5 must be a multiple of mamba_num_groups 2",
            ),
            (SISO, {"mamba_state_dim": 7}, "mamba_state_dim 7"),
            (Mamba3Settings(rope_fraction=0.1), {}, "rotates 0 pairs"),
            (Mamba3Settings(rope_fraction=1.5), {}, "rotates 6 pairs"),
            (Mamba3Settings(variant="simo"), {}, "variant 'simo' is not one of siso, mimo"),
            (Mamba3Settings(decay="exp"), {}, "decay 'exp' is not one of softplus, rational"),
        ],
    )
    def test_refuses_what_it_cannot_build(self, settings, changes, message):
        with pytest.raises(MegacppError, match=message):
            build(settings, **changes)

    def test_refuses_context_parallelism(self):
        with pytest.raises(MegacppError, match="context_parallel_size is 2"):
            build(context_parallel_size=2)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"mamba_num_heads": 6, "mamba_num_groups": 1}, "mamba_num_heads is 6"),
            ({"mamba_num_heads": 8, "mamba_state_dim": 8}, "number of angles"),
            (
                {"mamba_num_heads": 8, "mamba_state_dim": 6, "mamba_num_groups": 1},
                "groups \\* rank",
            ),
        ],
    )
    def test_refuses_sizes_that_do_not_divide_over_the_ranks(self, changes, message):
        four_ranks = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
        with pytest.raises(MegacppError, match=message):
            Mamba3Mixer(
                config(**changes),
                MixerSubmodules(ColumnParallelLinear, RowParallelLinear),
                HIDDEN,
                pg_collection=SimpleNamespace(tp=four_ranks),
                settings=SISO,
            )

    def test_settings_and_backend_come_from_the_plugin(self):
        mixer = Mamba3Mixer(
            attach(config(), PluginSettings(mamba3=MIMO, backends={"mamba3_scan": "reference"})),
            MixerSubmodules(ColumnParallelLinear, RowParallelLinear),
            HIDDEN,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        assert mixer.settings is MIMO and mixer.mimo_x.shape == (6, 3, 5)
        decision = next(d for d in reversed(dispatch.decisions()) if d.surface == "mamba3_scan")
        assert (decision.requested, decision.observed) == ("reference", "reference")
