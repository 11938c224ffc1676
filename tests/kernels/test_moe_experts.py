"""Routed experts: admission, and the grouped ones in Megatron's slot and checkpoints."""

from types import SimpleNamespace

import admission
import pytest
import torch
from expert_checkpoints import load_from
from megatron.core.activations import squared_relu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.kernels.moe_experts import experts, experts_grouped_mm, weighted_swiglu
from megacpp_mcore.layers.experts import ExpertsError, FusedExperts, GroupedMMExperts
from megacpp_mcore.layers.parts import sequential_experts
from megacpp_mcore.surfaces import moe_experts, support
from megacpp_mcore.surfaces.support import Unbuildable
from megacpp_mcore.training.cpu.megatron_setup import single_process

# torch has the grouped product for a CPU too, so that what surrounds it is tested here.
test_admission = admission.suite("moe_experts", beyond_dispatch=("grouped_mm", "fused_moe"))

HIDDEN, FFN, EXPERTS = 8, 12, 4
RECOMPUTED_ACTIVATION = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}


SQUARED_RELU = {"gated_linear_unit": False, "activation_func": squared_relu}


def config(**changes):
    fields = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": FFN,
        "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "gated_linear_unit": True,
        "activation_func": functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": False, "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**(fields | changes))


def group(size, rank):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def grouped(cfg=None, ep=(1, 0), etp=(1, 0)):
    groups = SimpleNamespace(ep=group(*ep), expt_tp=group(*etp), expt_dp=group(1, 0))
    return GroupedMMExperts(EXPERTS // ep[0], cfg or config(), pg_collection=groups)


def shards(sharded_state_dict):
    """(key, offset) -> shard, of a sharded state dict with its factories built."""
    found = {}
    for entry in sharded_state_dict.values():
        for shard in entry.build() if hasattr(entry, "build") else [entry]:
            found[shard.key, shard.global_offset] = shard
    return found


def test_the_definition_is_the_formula():
    """One token at a time, each with the expert whose turn it is."""
    x, probs = torch.randn(5, 4).double(), torch.rand(5).double()
    w1, w2 = torch.randn(3, 6, 4).double(), torch.randn(3, 4, 3).double()
    y = experts(x, torch.tensor([2, 0, 3]), w1, w2, probs)
    for token, expert in enumerate([0, 0, 2, 2, 2]):
        a, b = w1[expert, :3] @ x[token], w1[expert, 3:] @ x[token]
        expected = w2[expert] @ (probs[token] * a / (1 + torch.exp(-a)) * b)
        torch.testing.assert_close(y[token], expected, rtol=0, atol=1e-14)  # 8 terms below 40


def test_the_routers_weight_may_be_wider_than_the_tokens():
    h, probs = torch.randn(3, 8).bfloat16(), torch.rand(3)
    y = weighted_swiglu(h, probs)
    assert y.dtype == torch.bfloat16 and y.shape == (3, 4)


def test_counts_of_any_integer_type_serve():
    x, probs = torch.randn(6, 8), torch.rand(6)
    w1, w2 = torch.randn(3, 16, 8), torch.randn(3, 8, 8)
    expected = experts(x, torch.tensor([1, 2, 3]), w1, w2, probs)
    for dtype in (torch.int32, torch.int64):
        counts = torch.tensor([1, 2, 3], dtype=dtype)
        y = experts_grouped_mm(x, counts, w1, w2, probs)
        # Sums of 8 terms whose partial sums stay below 2000.
        torch.testing.assert_close(y, expected, rtol=0, atol=8 * 2000 * 2**-24)


def test_megatrons_fused_activation_gives_the_same():
    cfg = config(bias_activation_fusion=True)
    plain, fused = grouped(), grouped(cfg)
    fused.load_state_dict(plain.state_dict())
    x, probs = torch.randn(7, HIDDEN), torch.rand(7)
    counts = torch.tensor([3, 0, 4, 0])
    outputs = [module(x, counts, probs) for module in (plain, fused)]
    assert outputs[0][1] is None
    # Sums of 12 terms, each below 1: weights of standard deviation 0.02.
    torch.testing.assert_close(outputs[0][0], outputs[1][0], rtol=0, atol=16 * 2**-24)


class TestCheckpoint:
    def test_keys_offsets_and_shapes_are_sequential_mlps(self):
        with single_process(1):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            build = {"config": config(), "pg_collection": groups}
            sequential = sequential_experts(num_local_experts=EXPERTS, **build)
            ours = GroupedMMExperts(EXPERTS, **build)
            expected = shards(sequential.sharded_state_dict("mlp.experts."))
            found = shards(ours.sharded_state_dict("mlp.experts."))
        assert found.keys() == expected.keys()
        assert {key for key, _ in found} == {
            f"mlp.experts.experts.linear_fc{n}.{part}"
            for n in (1, 2)
            for part in ("weight", "_extra_state")
        }
        fields = ("global_shape", "local_shape", "dtype", "axis_fragmentations", "replica_id",
                  "prepend_axis_num")  # fmt: skip
        for place, shard in found.items():
            for field in fields:
                other = getattr(expected[place], field, None)
                assert getattr(shard, field, None) == other, (place, field)

    @pytest.mark.parametrize("gated", [True, False])
    def test_megatrons_experts_load_ours_and_ours_theirs(self, gated):
        """tests/gpu/test_moe_experts_gpu.py does the same with Transformer Engine's."""
        more = {} if gated else SQUARED_RELU
        with single_process(1):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            kinds = FusedExperts, sequential_experts, FusedExperts
            ours, theirs, again = (
                kind(num_local_experts=EXPERTS, config=config(**more), pg_collection=groups)
                for kind in kinds
            )
            for parameter in ours.parameters():
                torch.nn.init.normal_(parameter)
            load_from(ours, theirs)
            load_from(theirs, again)
        for expert, mlp in enumerate(theirs.local_experts):
            assert torch.equal(mlp.linear_fc1.weight, ours.linear_fc1.weight[expert])
            assert torch.equal(mlp.linear_fc2.weight, ours.linear_fc2.weight[expert])
        for name, value in ours.named_parameters():
            assert torch.equal(again.get_parameter(name), value)

    def test_the_extra_state_of_other_experts_is_no_key_too_many(self):
        ours, sequential = grouped(), grouped()
        state = sequential.state_dict() | {"linear_fc1._extra_state": None}
        ours.load_state_dict(state | {"linear_fc2._extra_state3": None})
        with pytest.raises(RuntimeError, match=r"linear_fc1\.bias"):
            ours.load_state_dict(state | {"linear_fc1.bias": torch.zeros(1)})

    def test_what_is_built_is_merged_again(self):
        module = grouped()
        for entry in module.sharded_state_dict("x.").values():
            if not hasattr(entry, "build"):
                continue
            merged = entry.merge_fn([shard.data.clone() for shard in entry.build()])
            assert torch.equal(merged, entry.data)

    def test_the_factorys_tensor_is_the_parameter(self):
        """How the distributed optimizer finds the shards of a parameter's state."""
        module = grouped()
        entries = module.sharded_state_dict("x.")
        assert entries["x.linear_fc1.weight"].data is module.linear_fc1.weight
        assert entries["x.linear_fc2.weight"].data is module.linear_fc2.weight

    def test_ranks_tile_the_global_weights(self):
        """Two expert-parallel times two expert-tensor-parallel ranks, each shard once."""
        covered = {}
        for ep in range(2):
            for etp in range(2):
                module = grouped(ep=(2, ep), etp=(2, etp))
                assert module.linear_fc1.weight.shape == (2, FFN, HIDDEN)
                assert module.linear_fc2.weight.shape == (2, HIDDEN, FFN // 2)
                for (key, offset), shard in shards(module.sharded_state_dict()).items():
                    if key.endswith("_extra_state"):
                        continue
                    whole = covered.setdefault(key, torch.zeros(shard.global_shape))
                    sizes = (1,) * shard.prepend_axis_num + shard.local_shape
                    where = tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
                    whole[where] += 1
        assert {key: tuple(whole.shape) for key, whole in covered.items()} == {
            "experts.linear_fc1.weight": (EXPERTS, 2 * FFN, HIDDEN),
            "experts.linear_fc2.weight": (EXPERTS, HIDDEN, FFN),
        }
        assert all((whole == 1).all() for whole in covered.values())

    def test_offsets_of_stacked_layers_come_first(self):
        sharded = grouped().sharded_state_dict("", ((0, 3, 5),))
        places = shards(sharded)
        assert {offset[0] for _, offset in places} == {3}
        assert {shard.global_shape[:2] for shard in places.values()} == {(5, EXPERTS)}

    def test_one_key_an_expert_is_refused(self):
        with pytest.raises(ExpertsError, match="singleton_local_shards"):
            grouped().sharded_state_dict(metadata={"singleton_local_shards": True})


def test_a_tensor_parallel_rank_holds_its_part_of_the_initial_weights():
    """Rows of fc1 and columns of fc2, as Megatron's parallel linears take them."""

    def count(weight):
        weight.copy_(torch.arange(weight.numel()).view_as(weight))

    cfg = config(init_method=count, output_layer_init_method=count)
    parts = [grouped(cfg, etp=(2, rank)) for rank in range(2)]
    whole = grouped(cfg)
    for expert in range(EXPERTS):
        rows = torch.cat([part.linear_fc1.weight[expert] for part in parts])
        columns = torch.cat([part.linear_fc2.weight[expert] for part in parts], dim=1)
        assert torch.equal(rows, whole.linear_fc1.weight[expert])
        assert torch.equal(columns, whole.linear_fc2.weight[expert])


def test_parameters_are_marked_for_megatrons_optimizer():
    one = grouped()
    assert [p.allreduce for p in one.parameters()] == [True, True]
    assert [p.partition_dim for p in one.parameters()] == [1, 2]
    parallel = config(expert_model_parallel_size=2)
    assert [p.allreduce for p in grouped(parallel, ep=(2, 1)).parameters()] == [False, False]
    assert all(p.tensor_model_parallel for p in one.parameters())


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("grouped_mm", {"add_bias_linear": True}, "bias: it has none"),
        ("grouped_mm", {"activation_func": functional.gelu}, "the activation is not SwiGLU"),
        ("grouped_mm", {"gated_linear_unit": False}, "the activation is not SwiGLU"),
        ("grouped_mm", SQUARED_RELU, "the activation is not SwiGLU"),
        ("fused_moe", {"activation_func": functional.gelu}, "neither SwiGLU nor squared ReLU"),
        ("fused_moe", {"activation_func": squared_relu}, "neither SwiGLU nor squared ReLU"),
        ("grouped_mm", {"fp8": "hybrid"}, "fp8 hybrid: it multiplies in the model's dtype"),
        ("reference", {"fp8": "hybrid"}, "fp8 hybrid: it multiplies in the model's dtype"),
        ("grouped_mm", {"moe_apply_probs_on_input": True}, "probs_on_input: it has none"),
        ("grouped_mm", {"hidden_size": 36}, "hidden_size 36: a grouped product takes multiples"),
        (
            "grouped_mm",
            {"moe_ffn_hidden_size": 24, "expert_tensor_parallel_size": 2},
            "ffn 12: a grouped product takes multiples of 8",
        ),
        ("grouped_mm", RECOMPUTED_ACTIVATION, "only Transformer Engine's experts compute it again"),
        ("reference", RECOMPUTED_ACTIVATION, "only Transformer Engine's experts compute it again"),
    ],
)
def test_experts_that_the_config_rules_out_are_not_chosen(backend, changes, message):
    wrong = config()
    wrong.params_dtype = torch.bfloat16
    for name, value in changes.items():
        setattr(wrong, name, value)
    with pytest.raises(DispatchError, match=message):
        choose(backend, wrong)


def test_a_matrix_optimizer_does_not_get_experts_that_are_no_matrices():
    assert choose("grouped_mm", config()).observed == "grouped_mm"
    for optimizer in ("muon", "adaptive_muon", "soap"):
        with pytest.raises(DispatchError, match=f"optimizer {optimizer}: .* Adam"):
            choose("grouped_mm", config(), optimizer)


def test_squared_relu_is_fused_moes():
    cfg = config(**SQUARED_RELU)
    decision = choose("fused_moe", cfg)
    assert decision.observed == "fused_moe"


def test_beside_fp8_linears_fused_moe_serves_where_it_is_named(monkeypatch):
    monkeypatch.setattr(moe_experts, "triton", lambda workload: None)
    monkeypatch.setattr(moe_experts, "_without_nvcc", lambda workload: Unbuildable("no nvcc"))
    monkeypatch.setattr(support, "import_reason", lambda module: None)
    dispatch.forget()
    cfg = config(moe_ffn_hidden_size=16)
    cfg.params_dtype, cfg.fp8 = torch.bfloat16, "hybrid"
    left = choose("auto", cfg)  # and asks for no compiler
    assert left.observed == "te"
    assert left.reason.startswith("fused_moe: fp8 hybrid: it multiplies in the model's dtype")
    with pytest.raises(DispatchError, match="cannot serve: no nvcc"):
        choose("fused_moe", cfg)
    monkeypatch.setattr(moe_experts, "_without_nvcc", lambda workload: None)
    dispatch.forget()
    named = choose("fused_moe", cfg)
    assert (named.requested, named.observed) == ("fused_moe", "fused_moe")
    assert "named in" in named.reason and "Transformer Engine in FP8" in named.reason
    dispatch.forget()


def choose(backend, cfg, optimizer="adam"):
    workload = moe_experts.workload("cuda", cfg, optimizer)
    return dispatch.choose("moe_experts", workload, {"moe_experts": backend})


def test_a_config_that_no_recipe_has_is_refused_by_the_experts_themselves():
    with pytest.raises(ExpertsError, match=r"glu_linear_offset is 1\.0, supported: 0\.0"):
        grouped(config(glu_linear_offset=1.0))


@pytest.mark.parametrize("field", [
    "activation_func_fp8_input_store", "moe_paged_stash",
    "overlap_dispatch_backward_with_experts_wgrad",
])  # fmt: skip
def test_what_the_fused_experts_would_not_do_they_refuse_in_their_own_name(field):
    cfg = config()
    setattr(cfg, field, True)
    groups = SimpleNamespace(ep=group(1, 0), expt_tp=group(1, 0), expt_dp=group(1, 0))
    with pytest.raises(ExpertsError, match=f"backend 'fused_moe' does not support: {field} is"):
        FusedExperts(EXPERTS, cfg, pg_collection=groups)
