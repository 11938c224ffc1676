"""The fused experts behind each of Megatron's routers, compared with Megatron's own MoE layer."""

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from test_moe import CopyingStream, layer, process, run  # noqa: F401

from megacpp_mcore.layers.experts import FusedExperts, GroupedMMExperts
from megacpp_mcore.layers.moe import MegacppMoELayer
from megacpp_mcore.layers.parts import sequential_experts

TOKENS = 11
# TransformerConfig's fields; 6 experts, 3 of them a token.
ROUTERS = {
    "softmax": {"moe_router_score_function": "softmax"},
    "softmax-first": {
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid-bias": {"moe_router_enable_expert_bias": True},
    "groups": {
        "moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_topk": 2,
        "moe_router_enable_expert_bias": True,
    },
    "losses": {
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    },
    "sequence-loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"},
    "padded-capacity": {
        "moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True,
    },
    "top-1": {"moe_router_topk": 1},
    "every-expert": {"moe_router_topk": 6},
}  # fmt: skip
# What Megatron's dispatcher without permutation cannot do.
_DROPPED = ("capacity", "padded-capacity")


@pytest.mark.parametrize("name", ROUTERS)
def test_behind_every_router_it_is_megatrons_layer(process, monkeypatch, name):  # noqa: F811
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x, *args, **kwargs: x)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", CopyingStream())
    monkeypatch.setattr(torch.cuda, "current_stream", CopyingStream)
    more = {"moe_shared_expert_intermediate_size": 24} | ROUTERS[name]
    built = [
        layer(MegacppMoELayer, "alltoall", FusedExperts, **more),
        layer(MoELayer, "alltoall" if name in _DROPPED else "allgather", GroupedMMExperts, **more),
    ]
    for one in built:
        if one.router.expert_bias is not None:
            one.router.expert_bias.copy_(torch.linspace(-0.4, 0.4, 6))
    assert built[0].routed_inside == (name not in _DROPPED)
    (y, dx, grads), (expected_y, expected_dx, expected) = (run(one, TOKENS, False) for one in built)
    # As of test_moe: float32, sums of at most ffn 24 x top-6 products, or of 2 t of a weight.
    bound = 4 * torch.finfo(torch.float32).eps * 24 * 6
    for actual, truth in [
        (y, expected_y),
        (dx, expected_dx),
        *((grads[n], expected[n]) for n in grads),
    ]:
        assert truth.abs().max() > 0
        assert (actual - truth).abs().max() <= bound * truth.abs().max()


def test_a_router_that_pads_gives_a_token_more_experts_than_topk(process, monkeypatch):  # noqa: F811
    """Every expert gets all of the 22 tokens, each of which chose 3 of 6. Our kernels have room for
    what was chosen: they wrote beyond it."""
    padding = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x, *args, **kwargs: x)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", CopyingStream())
    monkeypatch.setattr(torch.cuda, "current_stream", CopyingStream)
    ours = layer(MegacppMoELayer, "allgather", FusedExperts, named="allgather", **padding)
    assert not ours.delivered_whole
    theirs = layer(MoELayer, "alltoall", GroupedMMExperts, **padding)
    (y, dx, _), (expected_y, expected_dx, _) = (run(one, TOKENS, False) for one in (ours, theirs))
    bound = 4 * torch.finfo(torch.float32).eps * 24 * 6
    for actual, truth in ((y, expected_y), (dx, expected_dx)):
        assert (actual - truth).abs().max() <= bound * truth.abs().max() > 0


def test_squared_relu_is_megatrons(process):  # noqa: F811
    more = {"gated_linear_unit": False, "activation_func": squared_relu}
    ours = layer(MegacppMoELayer, "alltoall", FusedExperts, **more)
    theirs = layer(MoELayer, "allgather", sequential_experts, **more)
    theirs.router.load_state_dict(ours.router.state_dict())
    names = "linear_fc1", "linear_fc2"
    with torch.no_grad():
        for name in names:
            for expert, weight in enumerate(getattr(ours.experts, name).weight):
                getattr(theirs.experts.local_experts[expert], name).weight.copy_(weight)
    (y, dx, grads), (expected_y, expected_dx, expected) = (
        run(one, TOKENS, False) for one in (ours, theirs)
    )
    pairs = [(y, expected_y), (dx, expected_dx)]
    pairs.append((grads["router.weight"], expected["router.weight"]))
    for name in names:
        each = [expected[f"experts.local_experts.{i}.{name}.weight"] for i in range(6)]
        pairs.append((grads[f"experts.{name}.weight"], torch.stack(each)))
    bound = 4 * torch.finfo(torch.float32).eps * 24 * 3
    for actual, truth in pairs:
        assert truth.abs().max() > 0
        assert (actual - truth).abs().max() <= bound * truth.abs().max()
