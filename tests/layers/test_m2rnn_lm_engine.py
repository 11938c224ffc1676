"""lm-engine's M2RNN weights in ours and back: the same function, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import softplus

from megacpp_mcore.hybrid.block_settings import M2RNNSettings
from megacpp_mcore.hybrid.m2rnn_layout import (
    M2RNNLayout,
    M2RNNMixerError,
    from_lm_engine,
    to_lm_engine,
)
from megacpp_mcore.kernels.m2rnn import m2rnn

HIDDEN, HEADS, K, V, KERNEL, EPS = 10, 3, 5, 4, 4, 1e-3
CHANNELS = HEADS * V


def layout(tp=1):
    config = SimpleNamespace(hidden_size=HIDDEN, context_parallel_size=1, fp8=None)
    settings = M2RNNSettings(k_head_dim=K, v_head_dim=V, num_heads=HEADS, conv_kernel=KERNEL)
    return M2RNNLayout.of(config, settings, tp)


def lm_engine_weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input_projection.weight": (2 * K + CHANNELS + HEADS + CHANNELS, HIDDEN),
        "conv1d.weight": (2 * K + CHANNELS, 1, KERNEL),
        "conv1d.bias": (2 * K + CHANNELS,),
        "decay_gate.A_log": (HEADS,),
        "decay_gate.dt_bias": (HEADS,),
        "D": (HEADS, V),
        "state_weight": (HEADS, V, V),
        "g_norm.weight": (CHANNELS,),
        "output_projection.weight": (HIDDEN, CHANNELS),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2
        for name, shape in shapes.items()
    }


def core(qkv, decay, gate, w, conv, A_log, dt_bias, D, norm, out):
    """What both layers do behind their projections, (b, s, rows) each; lm-engine's `forward`."""
    padded = torch.nn.functional.pad(qkv.transpose(1, 2), (KERNEL - 1, 0))
    convolved = torch.nn.functional.conv1d(padded, *conv, groups=qkv.shape[-1])
    q, k, v = torch.nn.functional.silu(convolved).transpose(1, 2).split((K, K, CHANNELS), -1)
    f = torch.exp(-A_log.exp() * softplus(decay + dt_bias))
    v = v.unflatten(-1, (HEADS, V))
    y, _ = m2rnn(q.unsqueeze(2), k.unsqueeze(2), v, w, f)
    x = (y + v * D).flatten(2) * torch.nn.functional.silu(gate)
    return torch.nn.functional.rms_norm(x, (CHANNELS,), norm, EPS) @ out.T


def test_the_layer_is_the_same_function():
    theirs = lm_engine_weights()
    ours = from_lm_engine(layout(), theirs)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    sizes = (2 * K + CHANNELS, HEADS, CHANNELS)
    qkv, decay, gate = (x @ theirs["input_projection.weight"].T).split(sizes, -1)
    expected = core(
        qkv, decay, gate, theirs["state_weight"],
        (theirs["conv1d.weight"], theirs["conv1d.bias"]),
        theirs["decay_gate.A_log"], theirs["decay_gate.dt_bias"], theirs["D"],
        theirs["g_norm.weight"], theirs["output_projection.weight"],
    )  # fmt: skip
    rows = [*layout().in_proj.values(), layout().padding]
    *qkv, gate, decay, padding = (x @ ours["in_proj.weight"].T).split(rows, -1)
    assert padding.shape[-1] and not padding.any()
    actual = core(
        torch.cat(qkv, -1), decay, gate, ours["W"], (ours["conv1d_weight"], ours["conv1d_bias"]),
        ours["A_log"], ours["dt_bias"], ours["D"].view(HEADS, V), ours["norm_weight"],
        ours["out_proj.weight"],
    )  # fmt: skip
    assert expected.abs().max() > 0
    # The projection's rows in another order: a matrix product may round them in another way.
    bound = 8 * 9 * HIDDEN * torch.finfo(torch.float64).eps * expected.abs().max()
    assert (actual - expected).abs().max() <= bound


def test_there_and_back_is_the_same():
    theirs = lm_engine_weights()
    ours = from_lm_engine(layout(), theirs)
    assert ours["D"].shape == (CHANNELS,)
    again = to_lm_engine(layout(), ours | {"in_proj._extra_state": None})
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], x) for name, x in theirs.items())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"D": None}, r"missing \['D'\]"),
        ({"input_projection.weight": None}, r"missing \['input_projection.weight'\]"),
        ({"input_projection.bias": torch.zeros(3)}, r"not known \['input_projection.bias'\]"),
        ({"state_weight": torch.zeros(1, V, V)}, r"state_weight of .* is \(1, 4, 4\)"),
        ({"D": torch.zeros(CHANNELS)}, r"D of lm-engine's M2RNN is \(12,\)"),
        ({"output_projection.weight": torch.zeros(HIDDEN + 1, CHANNELS)}, r"is \(11, 12\)"),
    ],
    ids=str,
)
def test_refuses_other_weights(change, message):
    weights = lm_engine_weights() | change
    weights = {name: x for name, x in weights.items() if x is not None}
    with pytest.raises(M2RNNMixerError, match=message):
        from_lm_engine(layout(), weights)


def test_refuses_a_slice_of_the_model():
    sliced = M2RNNLayout(3, HEADS, 1, K, V, {}, {}, 0)
    for convert in (from_lm_engine, to_lm_engine):
        with pytest.raises(M2RNNMixerError, match="one of 3 tensor-parallel ranks"):
            convert(sliced, lm_engine_weights())


def test_refuses_other_names_of_ours():
    ours = from_lm_engine(layout(), lm_engine_weights())
    with pytest.raises(M2RNNMixerError, match=r"missing \['W'\], not known \['w'\]"):
        to_lm_engine(layout(), {name if name != "W" else "w": x for name, x in ours.items()})
