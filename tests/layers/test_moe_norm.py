"""The E layer whose norm and tokens have one backward pass, in Megatron's HybridModel.

It is as its definition in float64, and to the bit as the layer that calls its norm.
"""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from gather_hooks import of_data_parallelism
from test_moe import with_exact_gradients, with_our_router
from test_moe_residual import (
    CASES,
    ONE_LAYER,
    as_megatrons,
    assert_near,
    assert_same,
    definition,
    machine,  # noqa: F401
    model,
    run,
)
from torch import Tensor

from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.readers import readers_of_norm
from megacpp_mcore.kernels.moe_experts.weights import Experts
from megacpp_mcore.kernels.norm.triton import rms_norm
from megacpp_mcore.layers.param_gather import HookError
from megacpp_mcore.layers.router import DispatchedTopKRouter


@contextlib.contextmanager
def with_one_backward(machine, *overrides, **more):  # noqa: F811
    """The layer with our router, whose norm and readers have one backward pass; and its calls."""
    with model(machine, *ONE_LAYER, *overrides, **more) as built:
        (layer,) = built.decoder.layers
        with_our_router(machine, layer.mlp)
        calls = []

        def tokens_gradient(*args):
            calls.append(args)
            return torch_products.tokens_gradient(*args)

        watched = {**vars(torch_products), "tokens_gradient": tokens_gradient}
        layer.mlp.experts.products = SimpleNamespace(**watched)
        yield layer, calls


@pytest.mark.parametrize("case", CASES)
def test_one_backward_pass_of_norm_and_readers(machine, case):  # noqa: F811
    """As the definition, and to the bit as two."""
    rows, sizes = CASES[case]
    with with_one_backward(machine, *sizes) as (layer, calls):
        shape = (*rows, layer.config.hidden_size)
        found = run(layer, layer._forward_mlp, shape)
        assert len(calls) == 1
        terms = 2 * (layer.config.hidden_size + 28 + rows[0] * rows[1])
        assert_near(found, definition(layer, shape), torch.float32, terms)
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), shape))
        assert len(calls) == 1


@pytest.mark.parametrize("own_norm", [True, False])
def test_fc1s_weight_gradient_finds_the_rows_of_dx_freed(machine, own_norm):  # noqa: F811
    """Whoever sums them: one function with the norm, or one of the readers alone."""
    with model(machine, *ONE_LAYER) as built:
        (layer,) = built.decoder.layers
        with_our_router(machine, layer.mlp)
        order, rows = [], []

        def input_gradient(dy, w, ends):
            found = torch_products.input_gradient(dy, w, ends)
            rows.append(weakref.ref(found))
            return found

        def weight_gradient(dy, x, ends, during_exchange=False):
            order.append((x.shape[1] if isinstance(x, Tensor) else None, rows[-1]() is None))
            return torch_products.weight_gradient(dy, x, ends, during_exchange)

        watched = {"input_gradient": input_gradient, "weight_gradient": weight_gradient}
        layer.mlp.experts.products = SimpleNamespace(**vars(torch_products) | watched)
        forward = layer._forward_mlp if own_norm else lambda x: as_megatrons(layer, x)
        run(layer, forward, (7, 3, layer.config.hidden_size))
        ffn = layer.config.moe_ffn_hidden_size
        assert order == [(ffn, False), (None, True)] and len(rows) == 2


def _changed(place: int, change):
    """A gradient that takes another value of one argument."""
    return lambda *args: torch_products.tokens_gradient(
        *args[:place], change(args[place]), *args[place + 1 :]
    )


WRONG_GRADIENTS = {
    "sign of the experts' part": _changed(0, lambda rows: -rows),
    "no shared expert": _changed(2, lambda shared: None),
    "sign of the router's part": _changed(3, lambda logits: -logits),
    "another expert's weight": _changed(4, lambda gate: gate.roll(1, 0)),
    "another token's input": _changed(5, lambda x: x.roll(1, 0)),
    "no residual": _changed(6, torch.zeros_like),
    "halves of the norm's weight swapped": _changed(7, lambda w: w.roll(len(w) // 2)),
    "another token's scale": _changed(8, lambda rstd: rstd.roll(1)),
    "no gradient of the norm's weight": lambda *args: (
        torch_products.tokens_gradient(*args)[0], torch.zeros_like(args[7])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_a_wrong_backward_pass_is_refused(machine, name):  # noqa: F811
    with with_one_backward(machine) as (layer, _):
        layer.mlp.experts.products.tokens_gradient = WRONG_GRADIENTS[name]
        found = run(layer, layer._forward_mlp, (7, 3, 40))
        with pytest.raises(AssertionError):
            assert_near(found, definition(layer, (7, 3, 40)), torch.float32, 2 * (40 + 28 + 21))


@pytest.mark.parametrize("frozen", ["pre_mlp_layernorm", "mlp.router", "mlp.experts", "x"])
def test_one_backward_pass_where_something_is_frozen(machine, frozen):  # noqa: F811
    with with_one_backward(machine) as (layer, _):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

        def call(forward):
            return run(layer, lambda x: forward(x.detach() if frozen == "x" else x), (7, 2, 40))

        found, expected = call(layer._forward_mlp), call(lambda x: as_megatrons(layer, x))
        assert (found.pop("x") is None) == (expected.pop("x") is None) == (frozen == "x")
        assert_same(found, expected)


WRONG_VALUES = {
    "sign of the logits": lambda y, rstd, logits: (y, rstd, -logits),
    "another token's logits": lambda y, rstd, logits: (y, rstd, logits.roll(1, 0)),
    "another expert's logits": lambda y, rstd, logits: (y, rstd, logits.roll(1, 1)),
    "another token's scale": lambda y, rstd, logits: (y, rstd.roll(1), logits),
    "halves of a token swapped": lambda y, rstd, logits: (y.roll(20, -1), rstd, logits),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_norm_or_logit_is_refused(machine, name):  # noqa: F811
    with with_one_backward(machine) as (layer, _):
        layer.mlp.experts.products.norm_and_logits = lambda *args: WRONG_VALUES[name](
            *torch_products.norm_and_logits(*args)
        )
        found = run(layer, layer._forward_mlp, (7, 3, 40))
        with pytest.raises(AssertionError):
            assert_near(found, definition(layer, (7, 3, 40)), torch.float32, 2 * (40 + 28 + 21))


def test_weights_that_are_still_gathered_are_waited_for(machine):  # noqa: F811
    """Of the norm and of the router, both of which are read before their modules are called."""
    with with_one_backward(machine) as (layer, calls):
        modules, order = (layer.pre_mlp_layernorm, layer.mlp.router), []
        expected = run(layer, layer._forward_mlp, (5, 2, 40))
        for module in modules:
            weight = module.weight.detach().clone()
            module.weight.data.fill_(float("nan"))

            def gather(module, _, weight=weight):
                module.weight.data = weight
                order.append(module)

            module.register_forward_pre_hook(of_data_parallelism(gather))
        assert_same(run(layer, layer._forward_mlp, (5, 2, 40)), expected)
        assert len(calls) == 2
        assert tuple(order[:2]) == modules  # as Megatron gathers them


@pytest.mark.parametrize("of", ["pre_mlp_layernorm", "mlp.router", "mlp"])
def test_what_a_hook_replaces_is_read(machine, of):  # noqa: F811
    """The input of norm, router or experts, which the layer would otherwise read itself."""
    with_exact_gradients(machine)
    with with_one_backward(machine) as (layer, calls):
        layer.get_submodule(of).register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1,))
        found = run(layer, layer._forward_mlp, (5, 2, 40))
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), (5, 2, 40)))
        assert not calls


def _routes_by_its_input(router):
    """A forward hook whose result depends on the input: of that too there is a gradient."""
    router.register_forward_hook(
        lambda _, args, found: (found[0] * (1 + args[0].mean()), *found[1:])
    )


def _with_another_forward(router):
    before = router.forward

    def forward(x, *more):
        probs, routing_map = before(x, *more)
        return probs * (1 + x.mean()), routing_map

    router.forward = forward


class _OfSomebodyElsesSpec(DispatchedTopKRouter):
    def gating(self, x):
        return super().gating(x) * (1 + x.mean())


def _of_another_class(router):
    router.__class__ = _OfSomebodyElsesSpec


@pytest.mark.parametrize("change", [_routes_by_its_input, _with_another_forward, _of_another_class])
def test_a_routers_input_has_all_its_gradients(machine, change):  # noqa: F811
    with_exact_gradients(machine)
    with with_one_backward(machine) as (layer, calls):
        change(layer.mlp.router)
        found = run(layer, layer._forward_mlp, (5, 2, 40))
        layer.mlp.router.gate = lambda tokens: None  # the router itself reads its input
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), (5, 2, 40)))
        assert not calls


def test_a_hook_of_the_experts_sees_their_output_without_the_residual(machine):  # noqa: F811
    with with_one_backward(machine) as (layer, calls):
        layer.mlp.register_forward_hook(lambda _, args, found: (found[0] * 2, *found[1:]))
        found = run(layer, layer._forward_mlp, (5, 2, 40))
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), (5, 2, 40)))
        assert not calls


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_a_hook_of_experts_that_are_not_called_is_refused(machine, register):  # noqa: F811
    with with_one_backward(machine) as (layer, _):
        getattr(layer.mlp.experts, register)(lambda *given: None)
        with pytest.raises(HookError, match="hook of a FusedExperts, or"):
            layer._forward_mlp(torch.randn(5, 2, 40))


def test_one_backward_pass_leaves_nothing_and_heeds_hooks(machine):  # noqa: F811
    with with_one_backward(machine) as (layer, calls):
        x = torch.randn(5, 2, 40)
        with torch.no_grad():
            expected = as_megatrons(layer, x.clone())
            y = layer._forward_mlp(x.clone())
        assert torch.equal(y, expected) and not y.requires_grad
        assert layer.mlp._residual is None and layer.mlp._readers is None
        gathered, seen = [], []
        hook = of_data_parallelism(lambda *args: gathered.append(args))
        layer.pre_mlp_layernorm.register_forward_pre_hook(hook)
        run(layer, layer._forward_mlp, (5, 2, 40))
        assert len(gathered) == len(calls) == 1
        norm, note = layer.pre_mlp_layernorm, lambda *args: seen.append(args)
        for register in (
            norm.register_forward_hook,
            norm.register_full_backward_hook,
            norm.register_full_backward_pre_hook,
        ):
            hook = register(note)
            run(layer, layer._forward_mlp, (5, 2, 40))
            hook.remove()
            assert len(calls) == 1 and seen.pop() and not seen


class _OfSomebodyElse(torch.nn.RMSNorm):
    """With the same attribute, and other values."""

    has_residual = True

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_norm_of_somebody_else_is_called(machine):  # noqa: F811
    with with_one_backward(machine) as (layer, calls):
        layer.pre_mlp_layernorm = _OfSomebodyElse(40, eps=layer.config.layernorm_epsilon)
        found = run(layer, layer._forward_mlp, (5, 2, 40))
        assert_same(found, run(layer, lambda x: as_megatrons(layer, x), (5, 2, 40)))
        assert not calls


@pytest.mark.parametrize("used", ["shared", "residual", "both"])
def test_some_of_the_readers_alone(used):
    """As where a caller leaves the others out: there is nothing of the experts to sum."""
    x, weight, direction = torch.randn(3, 2, 8), torch.randn(8), torch.randn(3, 2, 8)

    def gradients(call) -> list[Tensor | None]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        normed, residual = call(*leaves)
        parts = {"shared": normed, "residual": 3 * residual, "both": normed + 3 * residual}
        parts[used].backward(direction)
        return [leaf.grad for leaf in leaves]

    experts = Experts(torch.randn(5, 6, 8), torch.randn(5, 8, 3))

    def joined(x, weight):
        found, residual = readers_of_norm(x, weight, 1e-5, 12, experts, torch.randn(5, 8))
        return found.shared, residual

    expected = gradients(lambda x, weight: (rms_norm(x, weight, 1e-5), x))
    for ours, theirs in zip(gradients(joined), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)
