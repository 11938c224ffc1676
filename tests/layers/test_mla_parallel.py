"""Tensor and sequence parallelism of MLA, on two gloo processes in float64.

Each process first builds the layer for one rank, saves it through Megatron's distributed
checkpointing and runs it. Then both load that checkpoint as two tensor-parallel ranks: outputs and
gradients must be those of the one rank, k_pos's share of them, which every rank's heads have a part
in, included.
"""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megacpp_mcore.errors import MegacppError

HIDDEN, SEQ, HEADS, RANKS = 12, 10, 6, (8, 6)
CUT, DUPLICATED, ONE = "cut", "duplicated", "one"  # down projections: over ranks, as TE's, fused
# batch, document bounds, sequence parallel, down projections, q latent
CASES = {
    "plain": (2, None, False, CUT, True),
    "sp": (2, None, True, CUT, True),
    "documents-sp": (1, [0, 3, 10], True, CUT, True),
    "no-q-latent-sp": (2, None, True, CUT, False),
    "duplicated": (2, None, False, DUPLICATED, True),
    "duplicated-sp": (2, None, True, DUPLICATED, True),
    "one": (2, None, False, ONE, True),
    "one-sp": (2, None, True, ONE, True),
}


def layer_class(down):
    from megacpp_mcore.layers.mla import FusedMLASelfAttention, MLASelfAttention

    class Duplicated(MLASelfAttention):
        """With the down projections of TE, which there is none of here: every rank has them whole
        and projects its own tokens."""

        def _qkv_down_projection(self, hidden_states):
            whole = []
            for linear in (self.linear_q_down_proj, self.linear_kv_down_proj):
                parts = [torch.empty_like(linear.weight) for _ in range(self.tp_group.size())]
                dist.all_gather(parts, linear.weight.detach(), group=self.tp_group)
                whole.append(torch.cat(parts).requires_grad_())
            self.duplicates = whole
            return tuple(hidden_states @ weight.t() for weight in whole)

    return {CUT: MLASelfAttention, DUPLICATED: Duplicated, ONE: FusedMLASelfAttention}[down]


def build(name, tp, seed, backend="reference"):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer import multi_latent_attention as upstream
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp

    from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
    from megacpp_mcore.layers.settings import PluginSettings, attach

    _, _, sequence_parallel, down, q_latent = CASES[name]
    torch.manual_seed(seed)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_lora_rank=RANKS[1],
        q_lora_rank=RANKS[0] if q_latent else None, qk_head_dim=4, qk_pos_emb_head_dim=4,
        v_head_dim=3, rope_type="rope", rotary_base=100, multi_latent_attention=True,
        add_bias_linear=False, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel and tp > 1,
    )  # fmt: skip
    submodules = upstream.MLASelfAttentionSubmodules(
        linear_proj=RowParallelLinear, q_layernorm=IdentityOp, kv_layernorm=IdentityOp,
        linear_q_proj=ColumnParallelLinear, linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
        linear_qkv_down_proj=ColumnParallelLinear,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    settings = PluginSettings(backends={"mla_rope": backend})
    cls = layer_class(down)
    module = cls(attach(config, settings), submodules, 1, AttnMaskType.causal, pg_collection=groups)
    return module.double()


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

    batch, bounds, *_ = CASES[name]
    generator = torch.Generator().manual_seed(5)
    hidden, direction = torch.randn(2, SEQ, batch, HIDDEN, generator=generator).double()
    hidden = cut(hidden).clone().requires_grad_()
    packed = None
    if bounds is not None:
        bounds = torch.tensor(bounds, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=7, max_seqlen_kv=7)
    y, _ = layer(hidden, attention_mask=None, packed_seq_params=packed)
    (y * cut(direction)).sum().backward()
    gradients = {key: p.grad for key, p in layer.named_parameters()}
    return y.detach(), hidden.grad, gradients


def assert_close(actual, expected, what):
    """The same sums in another order: 2 * SEQ * HIDDEN terms at most, an eps of the largest each,
    through the eight products that follow one another in the block."""
    bound = 8 * 2 * SEQ * HIDDEN * torch.finfo(torch.float64).eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def check(name, one, two, rank):
    """The layer over two ranks against what the one of one rank gave."""
    y, input_gradient, gradients, duplicates = one
    _, _, sequence_parallel, down, _ = CASES[name]
    cut = (lambda t: t.chunk(2)[rank]) if sequence_parallel else (lambda t: t)
    y_two, input_gradient_two, gradients_two = run(name, two, cut)
    assert_close(y_two, cut(y), f"{name}: output")
    assert_close(input_gradient_two, cut(input_gradient), f"{name}: input gradient")
    for key, gradient in gradients_two.items():
        if down == DUPLICATED and "down_proj" in key:
            continue  # the test's own stand in for them
        axis = 1 if key == "linear_proj.weight" else 0
        parts = [gradients[key]]
        if "qkv_down" in key:
            parts = gradients[key].split([RANKS[0], gradients[key].shape[0] - RANKS[0]])
        expected = torch.cat([part.chunk(2, dim=axis)[rank] for part in parts], dim=axis)
        assert expected.abs().max() > 0, f"{name}: {key}"
        assert_close(gradient, expected, f"{name}: gradient of {key}")
    if down == DUPLICATED:
        for weight, expected in zip(two.duplicates, duplicates, strict=True):
            if sequence_parallel:  # Megatron sums replicated weights' gradients over the ranks
                dist.all_reduce(weight.grad)
            assert_close(weight.grad, expected, f"{name}: gradient of a duplicated projection")


def check_cases(rank, folder):
    from megatron.core import dist_checkpointing

    folder = os.path.join(folder, "tp1")

    layers = build_all(tp=1, seed=1)
    with torch.no_grad():
        for parameter in (p for layer in layers.values() for p in layer.parameters()):
            parameter += 0.3 * torch.randn_like(parameter)
    dist_checkpointing.save(sharded(layers), folder)
    ones = {}
    for name, layer in layers.items():
        values = run(name, layer, lambda t: t)
        duplicates = [weight.grad for weight in getattr(layer, "duplicates", [])]
        ones[name] = (*values, duplicates)
    layers = build_all(tp=2, seed=2)
    for name, state in dist_checkpointing.load(sharded(layers), folder).items():
        layers[name].load_state_dict({k.removeprefix(f"{name}."): t for k, t in state.items()})
    for name, layer in layers.items():
        check(name, ones[name], layer, rank)
    for name in ("plain", "sp"):  # upstream's own path, whose gradients would be wrong
        with pytest.raises(MegacppError, match="tensor_model_parallel_size 2: Megatron"):
            build(name, 2, seed=2, backend="megatron")


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    (tmp_path / "tp1").mkdir()
    run_ranks(check_cases, tmp_path)
