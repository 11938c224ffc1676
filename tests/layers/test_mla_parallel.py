"""Tensor and sequence parallelism of MLA.

Every rank's heads have a part in the gradient of k_pos.
"""

import pytest
import torch
import torch.distributed as dist
from layer_ranks import HIDDEN, TwoRanks, packed, run_both

from megacpp_mcore.errors import MegacppError

HEADS, RANKS = 6, (8, 6)
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


def build(name, tp, sequence_parallel, backend="reference"):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer import multi_latent_attention as upstream
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp

    from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
    from megacpp_mcore.layers.settings import PluginSettings, attach

    _, _, _, down, q_latent = CASES[name]
    config = MLATransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_lora_rank=RANKS[1],
        q_lora_rank=RANKS[0] if q_latent else None, qk_head_dim=4, qk_pos_emb_head_dim=4,
        v_head_dim=3, rope_type="rope", rotary_base=100, multi_latent_attention=True,
        add_bias_linear=False, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    submodules = upstream.MLASelfAttentionSubmodules(
        linear_proj=RowParallelLinear, q_layernorm=IdentityOp, kv_layernorm=IdentityOp,
        linear_q_proj=ColumnParallelLinear, linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
        linear_qkv_down_proj=ColumnParallelLinear,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = attach(config, PluginSettings(backends={"mla_rope": backend}))
    return layer_class(down)(config, submodules, 1, AttnMaskType.causal, pg_collection=groups)


def call(name, layer, hidden):
    documents = packed(CASES[name][1])
    return layer(hidden, attention_mask=None, packed_seq_params=documents)[0]


def part(key, whole, layer, rank):
    if "duplicate" in key:
        return whole
    axis = 1 if key == "linear_proj.weight" else 0
    parts = [whole]
    if "qkv_down" in key:
        parts = whole.split([RANKS[0], whole.shape[0] - RANKS[0]])
    return torch.cat([part.chunk(2, dim=axis)[rank] for part in parts], dim=axis)


def duplicates(name, layer):
    """Gradients of the test's own stand-ins."""
    found = {f"duplicate {i}": w.grad for i, w in enumerate(getattr(layer, "duplicates", []))}
    if layer.config.sequence_parallel:  # Megatron sums replicated weights' over the ranks
        for gradient in found.values():
            dist.all_reduce(gradient)
    return found


def check(rank, folder):
    cases = {name: case[2] for name, case in CASES.items()}
    TwoRanks(cases, build, call, part, 8, lambda n: CASES[n][0], duplicates).check(rank, folder)
    TwoRanks({}, build, call, part, 8).built(2, seed=2)
    for name in ("plain", "sp"):  # upstream's own path, whose gradients would be wrong
        with pytest.raises(MegacppError, match="tensor_model_parallel_size 2: Megatron"):
            build(name, 2, CASES[name][2], backend="megatron")


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    run_both(check, tmp_path)
