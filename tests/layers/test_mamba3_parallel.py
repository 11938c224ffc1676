"""Tensor and sequence parallelism of the Mamba-3 mixer, on two gloo processes in float64.

Each process first builds the mixer for one rank, saves it through Megatron's distributed
checkpointing and runs it. Then both load that checkpoint as two tensor-parallel ranks: outputs and
the gradients of inputs and parameters must be those of the one rank, and the checkpoint that the
two save must give the one rank's weights back.
"""

import os

import pytest
import torch
from ranks import run_ranks

from megacpp_mcore.settings import Mamba3Settings

HIDDEN, SEQ, BATCH = 12, 10, 2
# settings, groups (2 split over the ranks, 1 and 3 do not: B and C are gathered), sequence parallel
CASES = {
    "siso-split": (Mamba3Settings(chunk_size=4), 2, False),
    "siso-split-sp": (Mamba3Settings(chunk_size=4), 2, True),
    "siso-gathered-sp": (Mamba3Settings(chunk_size=4), 3, True),
    "mimo-gathered": (Mamba3Settings(variant="mimo", mimo_rank=2), 1, False),
    "mimo-split-sp": (Mamba3Settings(variant="mimo", mimo_rank=2), 6, True),
}


def build(settings, groups, sequence_parallel, seed):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.layers.mamba3 import Mamba3Mixer, Mamba3MixerSubmodules

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        mamba_num_heads=6,
        mamba_head_dim=3,
        mamba_state_dim=8,
        mamba_num_groups=groups,
    )
    mixer = Mamba3Mixer(
        config,
        Mamba3MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        HIDDEN,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        settings=settings,
    ).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def run(mixer, hidden, direction):
    """Output, input gradient and parameter gradients of sum(output * direction)."""
    hidden = hidden.clone().requires_grad_()
    y, _ = mixer(hidden)
    (y * direction).sum().backward()
    return y.detach(), hidden.grad, {name: p.grad for name, p in mixer.named_parameters()}


def local_slice(name, whole, mixer, rank):
    """What rank of two holds of a parameter (or its gradient): the layout, said once more."""
    if name.endswith("_norm.weight"):
        return whole
    if name == "out_proj.weight":
        return whole.chunk(2, dim=1)[rank]
    if name == "in_proj.weight":
        parts = whole.split([2 * rows for rows in mixer.layout.in_proj])
        return torch.cat([part.chunk(2)[rank] for part in parts])
    return whole.chunk(2)[rank]


def assert_close(actual, expected, what):
    """The same sums in another order: 2 * SEQ * HIDDEN terms at most, an eps of the largest each,
    through the five sums that follow one another in the block."""
    bound = 5 * 2 * SEQ * HIDDEN * torch.finfo(torch.float64).eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def build_all(tp, seed):
    """Every case's mixer over `tp` ranks, and their sharded state dicts as one checkpoint."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    mixers = {
        name: build(settings, groups, sequence_parallel and tp > 1, seed)
        for name, (settings, groups, sequence_parallel) in CASES.items()
    }
    return mixers, {name: m.sharded_state_dict(f"{name}.") for name, m in mixers.items()}


def load_all(mixers, sharded, folder):
    from megatron.core import dist_checkpointing

    for name, state in dist_checkpointing.load(sharded, folder).items():
        mixers[name].load_state_dict({k.removeprefix(f"{name}."): t for k, t in state.items()})


def check(name, one, two, rank, hidden, direction):
    """The mixer over two ranks against what the one of one rank gave."""
    weights, (y, input_gradient, gradients) = one
    for key, parameter in two.named_parameters():
        assert torch.equal(parameter, local_slice(key, weights[key], two, rank)), f"{name}: {key}"
        is_whole = key.endswith("_norm.weight")
        assert getattr(parameter, "tensor_model_parallel", False) is not is_whole, key
        # A norm's gradient is complete on each rank: Megatron must not sum it once more.
        assert not getattr(parameter, "sequence_parallel", False), key
    cut = (lambda t: t.chunk(2)[rank]) if CASES[name][2] else (lambda t: t)
    y_two, input_gradient_two, gradients_two = run(two, cut(hidden), cut(direction))
    assert_close(y_two, cut(y), f"{name}: output")
    assert_close(input_gradient_two, cut(input_gradient), f"{name}: input gradient")
    for key, gradient in gradients_two.items():
        expected = local_slice(key, gradients[key], two, rank)
        assert expected.abs().max() > 0, f"{name}: {key}"
        assert_close(gradient, expected, f"{name}: gradient of {key}")


def check_cases(rank, folder):
    from megatron.core import dist_checkpointing

    folder_of_one, folder_of_two = (os.path.join(folder, name) for name in ("tp1", "tp2"))

    generator = torch.Generator().manual_seed(5)
    hidden, direction = torch.randn(2, SEQ, BATCH, HIDDEN, generator=generator).double()
    mixers, sharded = build_all(tp=1, seed=1)
    dist_checkpointing.save(sharded, folder_of_one)
    ones = {
        name: (dict(mixer.named_parameters()), run(mixer, hidden, direction))
        for name, mixer in mixers.items()
    }
    mixers, sharded = build_all(tp=2, seed=2)
    load_all(mixers, sharded, folder_of_one)
    for name, mixer in mixers.items():
        check(name, ones[name], mixer, rank, hidden, direction)
    dist_checkpointing.save(
        {n: m.sharded_state_dict(f"{n}.") for n, m in mixers.items()}, folder_of_two
    )
    mixers, sharded = build_all(tp=1, seed=3)
    load_all(mixers, sharded, folder_of_two)
    for name, mixer in mixers.items():
        for key, parameter in mixer.named_parameters():
            assert torch.equal(parameter, ones[name][0][key]), f"{name}: {key}"


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    for folder in ("tp1", "tp2"):
        (tmp_path / folder).mkdir()
    run_ranks(check_cases, tmp_path)
