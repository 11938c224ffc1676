"""Tensor and sequence parallelism of the GQA layer, on two gloo processes in float64.

Each process first builds the layer for one rank, saves it through Megatron's distributed
checkpointing and runs it. Then both load that checkpoint as two tensor-parallel ranks: outputs and
gradients must be those of the one rank.
"""

import os

import pytest
import torch
from ranks import run_ranks

HIDDEN, SEQ, HEADS, DIM = 12, 10, 8, 4
# groups, batch, document bounds, sequence parallel
CASES = {
    "plain": (4, 2, None, False),
    "sp": (4, 2, None, True),
    "documents-sp": (2, 1, [0, 3, 10], True),
}


def build(name, tp, seed):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    from megacpp_mcore.layers.attention import SelfAttention
    from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
    from megacpp_mcore.layers.settings import PluginSettings, attach

    groups, _, _, sequence_parallel = CASES[name]
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=groups,
        kv_channels=DIM, add_bias_linear=False, attention_dropout=0.0, apply_rope_fusion=False,
        use_cpu_initialization=True, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
    )  # fmt: skip
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
        linear_proj=RowParallelLinear,
    )  # fmt: skip
    collection = ProcessGroupCollection.use_mpu_process_groups()
    config = attach(config, PluginSettings(backends={"rope_qk": "reference"}))
    mask = AttnMaskType.causal
    return SelfAttention(config, submodules, 1, mask, pg_collection=collection).double()


def build_all(tp, seed):
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    return {name: build(name, tp, seed) for name in CASES}


def sharded(layers):
    return {name: layer.sharded_state_dict(f"{name}.") for name, layer in layers.items()}


def run(name, layer, cut):
    """Output, input gradient and parameter gradients of sum(output * direction)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    _, batch, bounds, _ = CASES[name]
    generator = torch.Generator().manual_seed(5)
    hidden, direction = torch.randn(2, SEQ, batch, HIDDEN, generator=generator).double()
    hidden = cut(hidden).clone().requires_grad_()
    frequencies = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(SEQ)[:, None] * frequencies
    table = torch.cat([angles, angles], -1)[:, None, None]
    packed = None
    if bounds is not None:
        bounds = torch.tensor(bounds, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=7, max_seqlen_kv=7)
    y, _ = layer(hidden, None, rotary_pos_emb=table, packed_seq_params=packed)
    (y * cut(direction)).sum().backward()
    gradients = {key: p.grad for key, p in layer.named_parameters()}
    return y.detach(), hidden.grad, gradients


def assert_close(actual, expected, what):
    """The same sums in another order: 2 * SEQ * HIDDEN terms at most, an eps of the largest each,
    through the four products that follow one another in the block."""
    bound = 4 * 2 * SEQ * HIDDEN * torch.finfo(torch.float64).eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def check(name, one, two, rank):
    """The layer over two ranks against what the one of one rank gave."""
    y, input_gradient, gradients = one
    cut = (lambda t: t.chunk(2)[rank]) if CASES[name][-1] else (lambda t: t)
    y_two, input_gradient_two, gradients_two = run(name, two, cut)
    assert_close(y_two, cut(y), f"{name}: output")
    assert_close(input_gradient_two, cut(input_gradient), f"{name}: input gradient")
    for key, gradient in gradients_two.items():
        expected = gradients[key].chunk(2, dim=1 if key == "linear_proj.weight" else 0)[rank]
        assert expected.abs().max() > 0, f"{name}: {key}"
        assert_close(gradient, expected, f"{name}: gradient of {key}")


def check_cases(rank, folder):
    from megatron.core import dist_checkpointing

    folder = os.path.join(folder, "tp1")

    layers = build_all(tp=1, seed=1)
    dist_checkpointing.save(sharded(layers), folder)
    ones = {name: run(name, layer, lambda t: t) for name, layer in layers.items()}
    layers = build_all(tp=2, seed=2)
    for name, state in dist_checkpointing.load(sharded(layers), folder).items():
        layers[name].load_state_dict({k.removeprefix(f"{name}."): t for k, t in state.items()})
    for name, layer in layers.items():
        check(name, ones[name], layer, rank)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    (tmp_path / "tp1").mkdir()
    run_ranks(check_cases, tmp_path)
