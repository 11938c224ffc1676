"""mamba3_prep and m2rnn_prep on Inductor in Megatron's real HybridModel: the same losses, gradients
and names, with and without recomputation, and never at inference."""

import shutil
from dataclasses import replace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from recompute_slice import train_once

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings
from megacpp_mcore.kernels import inductor
from megacpp_mcore.layers.m2rnn import M2RNNMixer, M2RNNMixerSubmodules
from megacpp_mcore.layers.mamba3 import Mamba3Mixer, Mamba3MixerSubmodules
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training.cpu.megatron_setup import single_process

SEQ = 32
SMALL = [
    "model.pattern=MRM", "model.depth=3", "model.hidden_size=32", "model.ffn_hidden_size=64",
    "model.num_attention_heads=4", f"model.seq_length={SEQ}", "mtp.mtp_num_layers=0",
    "mtp.pattern=", "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=8",
    "mamba3.mamba_state_dim=8", "mamba3.mamba_num_groups=2", "mamba3.chunk_size=8",
    "m2rnn.k_head_dim=8", "m2rnn.v_head_dim=8", "m2rnn.conv_kernel=3",
]  # fmt: skip
PREPS = ("mamba3_prep", "m2rnn_prep")
# Two computations, each off by up to an epsilon a term of the sums over all tokens (2 rows of SEQ)
# that a parameter's gradient is.
FAR = 2 * 2 * SEQ * torch.finfo(torch.float32).eps


@pytest.fixture
def named(monkeypatch):
    """Both are named, and this CPU counts as a place to compile for."""
    for surface in PREPS:
        backends = [replace(b, supports=always) for b in REGISTRY[surface].backends]
        monkeypatch.setitem(REGISTRY, surface, replace(REGISTRY[surface], backends=tuple(backends)))
    monkeypatch.setenv("MEGACPP_BACKENDS", ",".join(f"{s}=inductor" for s in PREPS))
    dispatch.forget()
    yield
    dispatch.forget()


def small(*overrides):
    return load_recipe("nam56r-tiny", [*SMALL, *overrides])


def check(found, plain):
    assert found.keys() == plain.keys()
    for name, expected in plain.items():
        assert (found[name] - expected).norm() <= FAR * expected.norm(), name


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: Inductor cannot build for a CPU")
def test_losses_and_gradients_are_those_of_the_plain_model(named, monkeypatch):
    again = ["recompute.mamba3=core", "recompute.m2rnn=mixer"]
    with monkeypatch.context() as patch:
        patch.setenv("MEGACPP_BACKENDS", "")
        plain, _ = train_once(small())
    monkeypatch.setattr(bridges, "before_megatron", lambda: None)  # it turns torch.compile off
    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        found, size = train_once(small())
        assert counters["stats"]["unique_graphs"] == 3  # the two M share theirs
        check(found, plain)
        found, smaller = train_once(small(*again))
        assert counters["stats"]["unique_graphs"] == 6  # the first passes, without a gradient
        torch._dynamo.reset()
    check(found, plain)
    assert smaller < size
    served = {d.surface: (d.requested, d.observed) for d in dispatch.decisions()}
    assert {served[surface] for surface in PREPS} == {("inductor", "inductor")}


def mixers():
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, use_cpu_initialization=True,
        mamba_num_heads=4, mamba_head_dim=4, mamba_state_dim=8, mamba_num_groups=2,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    torch.manual_seed(0)
    return {
        "M": Mamba3Mixer(
            config, Mamba3MixerSubmodules(**linears), 24, 1, groups, settings=Mamba3Settings()
        ),
        "R": M2RNNMixer(
            config, M2RNNMixerSubmodules(**linears), 1, groups,
            settings=M2RNNSettings(k_head_dim=4, v_head_dim=4),
        ),
    }  # fmt: skip


@pytest.fixture
def groups():
    with single_process(0):
        yield


def test_a_checkpoints_names_do_not_know_of_it(groups, named, monkeypatch):
    def names():
        return {
            letter: (sorted(mixer.state_dict()), sorted(mixer.sharded_state_dict()))
            for letter, mixer in mixers().items()
        }

    compiled = names()
    monkeypatch.setenv("MEGACPP_BACKENDS", "")
    assert names() == compiled


@pytest.mark.parametrize("letter", ["M", "R"])
def test_inference_runs_the_reference(letter, groups, named):
    """Prompts of any length and single tokens; what was chosen for training is not called."""
    mixer = mixers()[letter].eval()
    hidden = torch.randn(7, 2, 24)
    with torch.no_grad():
        expected = mixer(hidden)[0]
        mixer.prep = None
        context = StaticInferenceContext(max_batch_size=2, max_sequence_length=7)
        parts = []
        for rows in (hidden[:5], hidden[5:6], hidden[6:]):
            parts.append(mixer(rows, inference_context=context)[0])
            context.sequence_len_offset += rows.shape[0]
    found = torch.cat(parts)
    assert (found - expected).abs().max() <= FAR * expected.abs().max()


REFUSED = {
    "cpu": ({}, "cpu", "nothing is compiled on cpu"),
    "deterministic": ({"deterministic_mode": True}, "cuda", "chosen by timing"),
    "graphs": ({"cuda_graph_impl": "local"}, "cuda", "cannot be part of a captured graph"),
}


@pytest.mark.parametrize("surface", PREPS)
@pytest.mark.parametrize("why", REFUSED)
def test_it_is_refused_with_the_reason_where_it_cannot_serve(surface, why):
    sizes, device, words = REFUSED[why]
    dispatch.forget()
    problem = Workload.of(device, "bfloat16", **sizes)
    with pytest.raises(DispatchError, match=f"{words}.*Remove the name.*reference: can serve"):
        dispatch.choose(surface, problem, {surface: "inductor"})


@pytest.mark.parametrize("surface", PREPS)
def test_auto_waits_for_the_name(surface, monkeypatch):
    """On a machine that could: nothing is compiled that nobody has asked for."""
    backends = [replace(b, supports=always) for b in REGISTRY[surface].backends]
    monkeypatch.setitem(REGISTRY, surface, replace(REGISTRY[surface], backends=tuple(backends)))
    dispatch.forget()
    decision = dispatch.choose(surface, Workload.of("cuda", "bfloat16"))
    assert (decision.requested, decision.observed) == ("auto", "reference")
    assert decision.reason == "inductor: serves only where it is named"
    named = dispatch.choose(surface, Workload.of("cuda", "bfloat16"), {surface: "inductor"})
    assert (named.requested, named.observed) == ("inductor", "inductor")
    dispatch.forget()


def test_without_a_compiler_or_with_torch_compile_off_there_is_a_reason(monkeypatch):
    with torch._dynamo.config.patch(disable=False):
        monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        monkeypatch.setenv("CC", "gcc")
        assert inductor.reason() is None
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        assert "unset" in inductor.reason()
        monkeypatch.delenv("TORCHDYNAMO_DISABLE")
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", "")
        assert "install gcc, or set CC" in inductor.reason()
    with torch._dynamo.config.patch(disable=True):
        assert "switched off" in inductor.reason()
