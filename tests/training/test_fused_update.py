"""The optimizer's step in one pass: the clipping factor, and configurations that keep Megatron's.

`test_distributed_training.py` has the steps themselves.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megacpp_mcore import dispatch
from megacpp_mcore.training.gpu import fused_update


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 7.0])
@pytest.mark.parametrize("most", [1.0, 0.25])
def test_the_clipping_factor_is_megatrons(norm, most):
    expected = min(1.0, most / (norm + 1e-6))
    for given in (norm, torch.tensor([norm])):
        found = fused_update._clipping_factor(given, most, torch.device("cpu"))
        assert found.item() == pytest.approx(expected, rel=1e-6)


def test_without_clipping_gradients_stay():
    assert fused_update._clipping_factor(torch.tensor(9.0), 0.0, torch.device("cpu")) == 1


def chain():
    """A chain of one DistributedOptimizer, as far as `refusal` looks at it."""
    ddp = SimpleNamespace(use_megatron_fsdp=False, fp8_param_gather=False, fp4_param_gather=False)
    one = DistributedOptimizer.__new__(DistributedOptimizer)
    one.config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True)
    one.ddp_config, one.grad_scaler, one.is_stub_optimizer = ddp, None, False
    one.model_chunks = [SimpleNamespace(config=SimpleNamespace(mtp_detach_heads=False))]
    one.optimizer = SimpleNamespace(param_groups=[{"params": [torch.nn.Parameter(torch.ones(1))]}])
    return ChainedOptimizer([one])


def test_it_serves_what_nam56r_asks_for():
    assert fused_update.refusal(chain()) is None


def test_only_a_chain_of_distributed_optimizers_is_served():
    optimizer = chain()
    (inner,) = optimizer.chained_optimizers
    assert fused_update.refusal(inner) == "DistributedOptimizer is no chain of optimizers"
    other = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    vars(other).update(vars(inner))
    optimizer.chained_optimizers = [inner, other]
    assert fused_update.refusal(optimizer) == "parallel.use_distributed_optimizer = false"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer = 'sgd'"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay = False"),
        ({"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload"),
        ({"fp8_param_gather": True}, "FP8 or FP4"),
        ({"grad_scaler": object()}, "a loss scale"),
        ({"log_num_zeros_in_grad": True}, "log_num_zeros_in_grad"),
        ({"grad_norm_skip_threshold": 9.0}, "grad_norm_skip_threshold"),
        # also on a rank whose shard has nothing of MTP: all ranks decide alike
        ({"mtp_detach_heads": True}, "mtp_detach_heads"),
    ],
)
def test_what_it_cannot_do_stays_megatrons_and_is_said(changes, message):
    optimizer = chain()
    inner = optimizer.chained_optimizers[0]
    for name, value in changes.items():
        places = inner.config, inner.ddp_config, inner, inner.model_chunks[0].config
        at = next(x for x in places if name in vars(x))
        setattr(at, name, value)
    dispatch.begin(say_each=False)
    fused_update.install(optimizer, wanted=True)
    [decision] = [d for d in dispatch.decisions() if d.surface == "optimizer"]
    assert decision.observed == "unfused" and message in decision.reason
    assert "step" not in vars(optimizer)


def test_the_recipe_may_ask_for_megatrons():
    optimizer = chain()
    dispatch.begin(say_each=False)
    fused_update.install(optimizer, wanted=False)
    [decision] = [d for d in dispatch.decisions() if d.surface == "optimizer"]
    assert decision.requested == decision.observed == "unfused"
    assert "step" not in vars(optimizer)
