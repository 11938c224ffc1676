"""Weights that are read without calling their module, under overlap_param_gather."""

import functools

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from megacpp_mcore.layers.param_gather import (
    HookError,
    HookWarning,
    needs_no_call,
    wait_for_param_gather,
)
from megacpp_mcore.training.gpu.gather_check import GatherCheck, GatherError


class Model(torch.nn.Module):
    """Calls its first layer; reads the second's weight. As if in Megatron's wrapper, with a bucket
    a layer."""

    def __init__(self, waits: bool, buckets: int = 2) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.waits = waits
        self.first.bias.requires_grad_(False)
        made = [object() for _ in range(buckets)]
        self.param_to_bucket_group = {
            parameter: made[min(index, buckets - 1)]
            for index, layer in enumerate((self.first, self.second))
            for parameter in layer.parameters()
            if parameter.requires_grad
        }

    def forward(self, x):
        second = wait_for_param_gather(self.second) if self.waits else self.second
        return self.first(x) @ second.weight.t() + second.bias


def step(model):
    check = GatherCheck([model])
    model(torch.ones(1, 2))
    check.finish()


@pytest.mark.parametrize("buckets", [1, 2])
def test_a_weight_that_nobody_waits_for_is_refused_whoever_is_in_its_bucket(buckets):
    """The others of its bucket may be called after it is read."""
    with pytest.raises(
        GatherError, match=r"read second\.weight, second\.bias without calling the module"
    ):
        step(Model(waits=False, buckets=buckets))


def test_a_weight_taken_through_gathered_is_fine():
    step(Model(waits=True))


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)  # fmt: skip
def test_a_hook_that_only_a_call_would_run_is_not_forgotten_silently(register):
    """A pre-hook's result, too: of a module that is not called nobody would read it."""
    model, seen = Model(waits=True), []
    getattr(model.second, register)(lambda *given: seen.append(given))
    with pytest.raises(HookError, match="hook of a Linear, or"):
        step(model)
    assert wait_for_param_gather(model.second, is_called=True) is model.second and not seen


class Adapted(torch.nn.Linear):
    """As an adapter's or a quantizer's: a linear that computes more than its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


def _dressed(linear):
    """As a library that keeps the forward pass and its name, and calls it in one of its own."""
    before = linear.forward
    after = functools.partial(lambda module, x: 2 * before(x), linear)
    linear.forward = functools.update_wrapper(after, before)


@pytest.mark.parametrize("change", [lambda linear: setattr(linear, "__class__", Adapted), _dressed])
def test_a_forward_pass_of_somebody_else_is_not_skipped_silently(change):
    model = Model(waits=True)
    change(model.second)
    with pytest.raises(
        HookError, match=r"of a (Adapted|Linear), or the forward pass that somebody"
    ):
        step(model)
    assert wait_for_param_gather(model.second, is_called=True) is model.second


@pytest.mark.parametrize("of", ["megatron.core.distributed.fsdp", "torch.distributed.fsdp"])
def test_hooks_that_wait_for_parameters_run_and_nothing_stays(of):
    model, seen = Model(waits=True), []

    def wait(module, args):
        seen.append((module, args))
        return args

    def wait_with_kwargs(module, args, kwargs):
        seen.append(kwargs)

    wait.__module__ = wait_with_kwargs.__module__ = of
    model.second.register_forward_pre_hook(wait)
    model.second.register_forward_pre_hook(wait_with_kwargs, with_kwargs=True)
    step(model)
    assert seen == [(model.second, ()), {}]
    assert len(model.second._forward_pre_hooks) == 2


def test_hooks_of_all_modules_are_told_that_one_is_not_called():
    """They are torch's own tools', as its FLOP counter's: to refuse them would take those away."""
    model, seen = Model(waits=True), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        assert not needs_no_call(model.first)
        with pytest.warns(HookWarning, match="for all modules do not run on a Linear"):
            step(model)
    finally:
        handle.remove()
    assert needs_no_call(model.first) and seen == [model.first, model]
