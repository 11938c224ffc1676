"""Weights that are read without calling their module, under overlap_param_gather."""

import functools

import pytest
import torch

from megacpp_mcore.layers.param_gather import HookError, wait_for_param_gather
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
    ("hook", "with_kwargs"),
    [
        (lambda module, args: torch.zeros(3, 2), False),
        (lambda module, args: (torch.zeros(3, 2),), False),
        (lambda module, args, kwargs: ((torch.zeros(3, 2),), kwargs), True),
        (lambda module, args, kwargs: (args, {"input": torch.zeros(3, 2)}), True),
    ],
)
def test_an_input_that_a_hook_replaces_is_not_dropped_silently(hook, with_kwargs):
    """Of a module that is not called nobody would read it."""
    model = Model(waits=True)
    model.second.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    with pytest.raises(HookError, match="forward pre-hook of a Linear returns an input"):
        step(model)


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"],
)
def test_a_hook_that_only_a_call_would_run_is_not_forgotten_silently(register):
    model = Model(waits=True)
    getattr(model.second, register)(lambda *given: None)
    with pytest.raises(HookError, match="hook of a Linear would not run"):
        step(model)
    assert wait_for_param_gather(model.second, is_called=True) is model.second


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
    with pytest.raises(HookError, match=r"forward pass of a (Adapted|Linear), which is somebody"):
        step(model)
    assert wait_for_param_gather(model.second, is_called=True) is model.second


def test_a_hook_that_returns_what_it_was_given_replaces_nothing():
    """As one of Megatron's FSDP."""
    model = Model(waits=True)
    model.second.register_forward_pre_hook(lambda module, args: args)
    model.second.register_forward_pre_hook(lambda *given: given[1:], with_kwargs=True)
    step(model)


def test_gathered_runs_the_hooks_of_a_call_and_nothing_stays():
    model, seen = Model(waits=True), []
    model.second.register_forward_pre_hook(lambda module, args: seen.append((module, args)))
    model.second.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    step(model)
    assert seen == [(model.second, ()), {}]
    assert len(model.second._forward_pre_hooks) == 2
