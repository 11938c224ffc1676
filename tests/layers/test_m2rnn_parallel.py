"""Tensor and sequence parallelism of the M2RNN mixer, on two gloo processes in float64.

Each process first builds the mixer for one rank, saves it through Megatron's distributed
checkpointing and runs it. Then both load that checkpoint as two tensor-parallel ranks: outputs and
the gradients of inputs and parameters must be those of the one rank, and the checkpoint that the
two save must give the one rank's weights back.
"""

import os

import pytest
import torch
from ranks import run_ranks

from megacpp_mcore.settings import M2RNNSettings

HIDDEN, SEQ = 12, 10
SETTINGS = M2RNNSettings(k_head_dim=6, v_head_dim=3, num_heads=4, chunk_size=4)
# batch, document bounds, sequence parallel
CASES = {"plain": (2, None, False), "sp": (2, None, True), "documents-sp": (1, [0, 3, 7], True)}


def build(sequence_parallel, seed):
    """A mixer as it is initialised."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.layers.m2rnn import M2RNNMixer, M2RNNMixerSubmodules

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
    )
    return M2RNNMixer(
        config,
        M2RNNMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        settings=SETTINGS,
    ).double()


def build_all(tp, seed):
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    return {name: build(case[2] and tp > 1, seed) for name, case in CASES.items()}


def sharded(mixers):
    return {name: mixer.sharded_state_dict(f"{name}.") for name, mixer in mixers.items()}


def load_all(mixers, folder):
    from megatron.core import dist_checkpointing

    for name, state in dist_checkpointing.load(sharded(mixers), folder).items():
        mixers[name].load_state_dict({k.removeprefix(f"{name}."): t for k, t in state.items()})


def run(name, mixer, cut):
    """Output, input gradient and parameter gradients of sum(output * direction)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch, bounds, _ = CASES[name]
    generator = torch.Generator().manual_seed(5)
    hidden, direction = torch.randn(2, SEQ, batch, HIDDEN, generator=generator).double()
    hidden = cut(hidden).clone().requires_grad_()
    packed = None
    if bounds is not None:
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))
    y, _ = mixer(hidden, packed_seq_params=packed)
    (y * cut(direction)).sum().backward()
    return y.detach(), hidden.grad, {key: p.grad for key, p in mixer.named_parameters()}


def local_slice(key, whole, rank):
    """What rank of two holds of a parameter (or its gradient): the layout, said once more."""
    s = SETTINGS
    values = s.num_heads * s.v_head_dim
    qkv = [s.k_head_dim, s.k_head_dim, values]
    sections = {
        "in_proj.weight": [*qkv, values, s.num_heads],
        "conv1d_weight": qkv,
        "conv1d_bias": qkv,
    }
    if key == "out_proj.weight":
        return whole.chunk(2, dim=1)[rank]
    parts = whole.split(sections.get(key, [whole.shape[0]]))
    return torch.cat([part.chunk(2)[rank] for part in parts])


def assert_close(actual, expected, what):
    """The same sums in another order: 2 * SEQ * HIDDEN terms at most, an eps of the largest each,
    through the five sums that follow one another in the block."""
    bound = 5 * 2 * SEQ * HIDDEN * torch.finfo(torch.float64).eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def check(name, one, two, rank):
    """The mixer over two ranks against what the one of one rank gave."""
    weights, (y, input_gradient, gradients) = one
    for key, parameter in two.named_parameters():
        assert torch.equal(parameter, local_slice(key, weights[key], rank)), f"{name}: {key}"
        # Every parameter is split, none replicated: Megatron has no gradient to sum over TP.
        assert parameter.tensor_model_parallel, key
        assert not getattr(parameter, "sequence_parallel", False), key
    cut = (lambda t: t.chunk(2)[rank]) if CASES[name][2] else (lambda t: t)
    y_two, input_gradient_two, gradients_two = run(name, two, cut)
    assert_close(y_two, cut(y), f"{name}: output")
    assert_close(input_gradient_two, cut(input_gradient), f"{name}: input gradient")
    for key, gradient in gradients_two.items():
        expected = local_slice(key, gradients[key], rank)
        assert expected.abs().max() > 0, f"{name}: {key}"
        assert_close(gradient, expected, f"{name}: gradient of {key}")


def check_cases(rank, folder):
    from megatron.core import dist_checkpointing

    folder_of_one, folder_of_two = (os.path.join(folder, name) for name in ("tp1", "tp2"))

    mixers = build_all(tp=1, seed=1)
    initial = {key: p.detach().clone() for key, p in mixers["plain"].named_parameters()}
    with torch.no_grad():
        for parameter in (p for mixer in mixers.values() for p in mixer.parameters()):
            parameter += 0.3 * torch.randn_like(parameter)
    dist_checkpointing.save(sharded(mixers), folder_of_one)
    ones = {
        name: (dict(mixer.named_parameters()), run(name, mixer, lambda t: t))
        for name, mixer in mixers.items()
    }
    mixers = build_all(tp=2, seed=1)
    for key, parameter in mixers["plain"].named_parameters():
        if "proj" not in key:  # Megatron's linears cut their whole by rows, whatever the parts
            assert torch.equal(parameter, local_slice(key, initial[key], rank)), key
    load_all(mixers, folder_of_one)
    for name, mixer in mixers.items():
        check(name, ones[name], mixer, rank)
    dist_checkpointing.save(sharded(mixers), folder_of_two)
    mixers = build_all(tp=1, seed=3)
    load_all(mixers, folder_of_two)
    for name, mixer in mixers.items():
        for key, parameter in mixer.named_parameters():
            assert torch.equal(parameter, ones[name][0][key]), f"{name}: {key}"


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    for folder in ("tp1", "tp2"):
        (tmp_path / folder).mkdir()
    run_ranks(check_cases, tmp_path)
