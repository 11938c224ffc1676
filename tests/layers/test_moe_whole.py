"""The whole E layer, from the router to the output, against float64: every gradient, whatever the
router is, with the losses that it adds to the objective.

The layer is the one that a recipe gets: its own config, by Megatron's parser, and its spec. Of a
GPU it has the experts and the dispatcher; the kernels run in Triton's interpreter.
"""

import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megacpp_mcore.specs.nam56r import nam56r_stack_spec
from megatron.training.argument_utils import core_transformer_config_from_args
from moe_definition import whole_layer
from test_moe import process, with_our_router  # noqa: F401

from megacpp_mcore.kernels.moe_experts import fused, readers, torch_products
from megacpp_mcore.kernels.moe_experts.routing import Gathered
from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.layers import dispatched
from megacpp_mcore.layers.experts import FusedExperts
from megacpp_mcore.layers.moe import MegacppMoELayer
from megacpp_mcore.layers.moe_dispatchers import UnmovedTokenDispatcher
from megacpp_mcore.layers.settings import attach, settings_of
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.schema import MoE
from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet

EPS = torch.finfo(torch.float32).eps
BASE = [
    "model.pattern=E", "model.depth=1", "mtp.mtp_num_layers=0", "mtp.pattern=",
    "backends.moe_experts=fused_moe",
]  # fmt: skip
MOE = {
    "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 12, "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0],
}  # fmt: skip
BALANCED = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.5]}
ROUTERS = {
    "softmax": {"moe_router_score_function": "softmax"},
    "softmax-first": {
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid-bias": {"moe_router_enable_expert_bias": True, **BALANCED},
    "root-of-softplus": {"moe_router_score_function": "sqrtsoftplus", **BALANCED},
    "groups": {
        "num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True,
    },
    "softmax-groups": {
        "moe_router_score_function": "softmax", "moe_router_num_groups": 3,
        "moe_router_group_topk": 1, "moe_router_topk": 2,
    },
    "sinkhorn": {"moe_router_load_balancing_type": ["sinkhorn"]},
    "sinkhorn-top-1": {"moe_router_load_balancing_type": ["sinkhorn"], "moe_router_topk": 1},
    # which asks that every expert can get the same number of tokens
    "quantiles": {"moe_router_load_balancing_type": ["quantile_balancing"], "length": 8},
    "balanced-softmax": {"moe_router_score_function": "softmax", **BALANCED},
    "every-loss": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.5, 0.7], "moe_z_loss_coeff": 0.05,
    },
    "z-loss": {"moe_router_score_function": "softmax", "moe_z_loss_coeff": 0.05},
    "router-in-fp64": {"moe_router_dtype": "fp64", **BALANCED},
    "gated-shared-expert": {"moe_shared_expert_gate": True},
    "no-shared-expert": {"moe_shared_expert_intermediate_size": None},
}  # fmt: skip
SHAPES = {
    **{f"top-{k}": {"num_experts": 9, "moe_router_topk": k} for k in range(1, 9)},
    "every-expert": {"num_experts": 8, "moe_router_topk": 8},
    "one-expert": {"num_experts": 1, "moe_router_topk": 1},
    "one-token": {"length": 1, "rows": 1},
    "odd-width": {"hidden_size": 36, "moe_ffn_hidden_size": 132, "length": 5},
    "several-blocks": {"length": 67, "num_experts": 5, "moe_router_topk": 2},
    "squared-relu": {"activation": "squared_relu"},
    "skewed": {"skew": 0.9, "length": 25},
    "skewed-top-1": {"skew": 0.9, "length": 25, "moe_router_topk": 1, **BALANCED},
    "all-on-one": {"skew": 1.0, "moe_router_topk": 1},
    "idle": {"idle": 2},
    "skewed-and-idle": {"skew": 0.9, "idle": 2, "length": 25, **BALANCED},
}  # fmt: skip
CASES = ROUTERS | SHAPES
# With our gating product and our choice, which a GPU's recipes have.
OURS = {
    name: CASES[name]
    for name in (
        "sigmoid",
        "sigmoid-bias",
        "no-shared-expert",
        "top-1",
        "top-8",
        "every-expert",
        "one-expert",
        "one-token",
        "odd-width",
        "several-blocks",
        "skewed-top-1",
        "skewed-and-idle",
    )
} | {"every-loss": {"moe_z_loss_coeff": 0.05, "moe_router_enable_expert_bias": True, **BALANCED}}


class Case:
    """A layer of a recipe's, its inputs and what is expected of them."""

    def __init__(
        self, monkeypatch, length=7, rows=3, hidden_size=16, skew=0.0, idle=0, activation="swiglu",
        **moe,
    ) -> None:  # fmt: skip
        self.recipe = _recipe(hidden_size, activation, MOE | moe)
        self.layer = _built(monkeypatch, self.recipe)
        self.x = torch.randn(length, rows, hidden_size)
        self.direction = torch.randn(length, rows, hidden_size)
        for name, weight in self.layer.named_parameters():
            # Logits of some 0.6: where a sigmoid is saturated, nothing can be told from float32.
            scale = 0.6 if "router" in name else 1.0
            torch.nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
        self._lean(skew, idle)
        self._bias()

    def _lean(self, skew: float, idle: int) -> None:
        """One token feature takes `skew` of the tokens to expert 0, another all from the last."""
        router, experts = self.layer.router.weight.data, self.recipe.moe.num_experts
        if skew:
            there = torch.arange(self.x[..., 0].numel()) < skew * self.x[..., 0].numel()
            self.x[..., 0] = torch.where(there.view(self.x.shape[:2]), 2.0, -2.0)
            router[:, 0], router[0, 0] = 0.0, 2.0
        if idle:
            self.x[..., 1], router[experts - idle :, 1] = 2.0, -2.0

    def _bias(self) -> None:
        router, kind = self.layer.router, self.recipe.moe.moe_router_load_balancing_type[0]
        self.bias = router.qb_beta if kind == "quantile_balancing" else router.expert_bias
        if self.bias is not None:
            self.bias.copy_(torch.linspace(0.4, -0.4, len(self.bias)))

    def truth(self):
        """(by name, the values that `run` finds; the experts' tokens)."""
        named = dict(self.layer.named_parameters())
        wide = {n: p.detach().double().requires_grad_() for n, p in named.items()}
        x = self.x.double().requires_grad_()
        bias = None if self.bias is None else self.bias.double()
        found = whole_layer(self.recipe, wide, x, bias)
        # Wider than what float32 scores, of sums of h products, can turn over.
        assert found.margin > self.x.shape[-1] * EPS, "too close a choice: draw other inputs"
        ((found.y * self.direction.double()).sum() + found.losses).backward()
        grads = {n: w.grad for n, w in wide.items()}
        return _by_expert({"y": found.y.detach(), "x": x.grad, **grads}), found.chosen.sum(0)

    def run(self):
        x = self.x.clone().requires_grad_()
        y, _ = self.layer(x)
        (y * self.direction).sum().backward()
        grads = {n: p.grad for n, p in self.layer.named_parameters()}
        return _by_expert({"y": y.detach(), "x": x.grad, **grads})

    def terms(self) -> int:
        """Of all sums on the way from a value to any other: the products, forward and back, the
        router's, the sum over a token's experts, and of a weight's gradient over the tokens."""
        moe, (length, rows, hidden) = self.recipe.moe, self.x.shape
        shared = moe.moe_shared_expert_intermediate_size or 0
        inner = hidden + moe.moe_ffn_hidden_size + shared
        return 2 * (inner + moe.num_experts + moe.moe_router_topk) + length * rows


def _recipe(hidden_size: int, activation: str, moe: dict):
    sets = [f"model.hidden_size={hidden_size}", f"model.{activation}=true"]
    if activation != "swiglu":
        sets.append("model.swiglu=false")
    for name, value in moe.items():
        if value is not None:
            sets.append(f"moe.{name}={str(value).lower() if isinstance(value, bool) else value}")
    recipe = load_recipe("nam56r-tiny", [*BASE, *sets])
    absent = {name: None for name, value in moe.items() if value is None}
    return replace(recipe, moe=replace(recipe.moe, **absent)) if absent else recipe


def _built(monkeypatch, recipe) -> MegacppMoELayer:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1"}.get(name, "0"))
    args = megatron_args(lower(recipe).argv)
    with quiet():
        config = attach(core_transformer_config_from_args(args), settings_of(recipe))
    spec = nam56r_stack_spec.of({}).submodules.moe_layer.submodules.mlp
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(dispatched, "current_device", lambda: "cuda")
        layer = spec(config=config, layer_number=1)
    assert type(layer) is MegacppMoELayer and type(layer.experts) is FusedExperts
    assert type(layer.token_dispatcher) is UnmovedTokenDispatcher
    return layer


def _by_expert(values: dict) -> dict:
    """An expert's gradients are as large as its tokens are many: each is judged by its own size."""
    found = {}
    for name, value in values.items():
        if name.startswith("experts."):
            found |= {f"{name}[{i}]": part for i, part in enumerate(value)}
        else:
            found[name] = value
    return found


def worst(found: dict, expected: dict, terms: int, roundings: int = 20) -> tuple[float, str]:
    """The largest error in units of what is allowed, and where.

    Float32 all the way: sums of `terms` terms, and a dozen and a half pointwise operations each
    rounded once, of values no larger than the result's largest.
    """
    assert found.keys() == expected.keys()
    bound = (terms + roundings / 2) * EPS
    errors = []
    for name, truth in expected.items():
        assert found[name] is not None and found[name].shape == truth.shape, name
        difference = (found[name].double() - truth).abs().max().item()
        largest = truth.abs().max().item()
        errors.append((difference / (bound * largest) if largest else difference / EPS, name))
    return max(errors)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(process, monkeypatch, name):  # noqa: F811
    case = Case(monkeypatch, **CASES[name])
    expected, tokens = case.truth()
    error, where = worst(case.run(), expected, case.terms())
    assert error <= 1, where
    idle, skew = CASES[name].get("idle", 0), CASES[name].get("skew", 0)
    assert not tokens[len(tokens) - idle :].any()
    assert tokens[0] >= skew * case.x[..., 0].numel()
    if case.layer.router.local_tokens_per_expert is not None:
        assert torch.equal(case.layer.router.local_tokens_per_expert, tokens.float())


@pytest.mark.parametrize("name", OURS)
def test_with_our_router_it_is_the_definition(process, monkeypatch, name):  # noqa: F811
    case = Case(monkeypatch, **OURS[name])
    with_our_router(monkeypatch, case.layer)
    expected, tokens = case.truth()
    error, where = worst(case.run(), expected, case.terms())
    assert error <= 1, where
    if case.layer.router.local_tokens_per_expert is not None:
        assert torch.equal(case.layer.router.local_tokens_per_expert, tokens.float())


def test_every_router_that_a_recipe_can_choose_is_among_them():
    hints = typing.get_type_hints(MoE)
    used = [load_recipe("nam56r-tiny").moe.moe_router_score_function]
    used += [case.get("moe_router_score_function") for case in CASES.values()]
    assert set(typing.get_args(hints["moe_router_score_function"])) <= set(used)
    kinds = typing.get_args(typing.get_args(hints["moe_router_load_balancing_type"])[0])
    used = [case.get("moe_router_load_balancing_type", ["none"]) for case in CASES.values()]
    assert set(kinds) <= {kind for some in used for kind in some}


def _products(layer, **others) -> None:
    """The experts' products, with some functions replaced."""
    layer.experts.products = SimpleNamespace(**{**vars(torch_products), **others})


def _of_expert(change, expert: int = 1, only=lambda w: True):
    """A product whose rows of one expert are changed, for the weights that `only` says."""

    def of(product):
        def changed(x, w, ends, *more):
            y = product(x, w, ends, *more)
            if only(w):
                rows = slice(ends[expert - 1], ends[expert])
                y[rows] = change(y[rows])
            return y

        return changed

    return of


def _is_fc2(w) -> bool:
    return w.shape[1] == 16


def _weights_of_expert(change, expert: int = 1):
    def changed(dy, x, ends, *more):
        grads = torch_products.weight_gradient(dy, x, ends, *more)
        grads[expert] = change(grads[expert])
        return grads

    return changed


def _around(name: str, function, module=fused):
    """A mutation: `name`, which the experts call, is `function` of the true one."""

    def mutate(monkeypatch, layer) -> None:
        monkeypatch.setattr(module, name, function(getattr(module, name)))

    return mutate


def _in_products(**others):
    return lambda monkeypatch, layer: _products(layer, **others)


def _in_config(**fields):
    def mutate(monkeypatch, layer) -> None:
        for name, value in fields.items():
            setattr(layer.config, name, value)

    return mutate


def _swapped(h):
    return torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1)


def _one_row_zero(route):
    def routed(*args):
        routing = route(*args)
        routing.row_probs[5] = 0.0
        return routing

    return routed


def _later(gathered):
    """The tokens that a product reads, each in the place of the next."""
    return Gathered(gathered.tokens.roll(1, 0), gathered.routing)


def _negative(x):
    return -x


def _larger(x):
    return 1.05 * x


FORWARD, BACKWARD = torch_products.forward, torch_products.input_gradient
MUTATIONS = {
    "sign of an expert": _in_products(forward=_of_expert(_negative, only=_is_fc2)(FORWARD)),
    "sign of its tokens' gradient": _in_products(input_gradient=_of_expert(_negative)(BACKWARD)),
    "sign of its weights' gradient": _in_products(weight_gradient=_weights_of_expert(_negative)),
    "sign of the router's gradient": _around("probs_gradient", lambda f: lambda *a: -f(*a)),
    "sign of the z loss": _in_config(moe_z_loss_coeff=-0.05),
    "no load balancing loss": _in_config(moe_aux_loss_coeff=[1e-9, 0.5, 0.7]),
    "an expert times 1.05": _in_products(forward=_of_expert(_larger, only=_is_fc2)(FORWARD)),
    "its inner values times 1.05": _in_products(
        forward=_of_expert(_larger, only=lambda w: not _is_fc2(w))(FORWARD)
    ),
    "its tokens' gradient times 1.05": _in_products(input_gradient=_of_expert(_larger)(BACKWARD)),
    "its weights' gradient times 1.05": _in_products(weight_gradient=_weights_of_expert(_larger)),
    "gate and up swapped": _around(
        "activate", lambda f: lambda h, *more: f(_swapped(h), *more)
    ),
    "gate and up swapped on the way back": _around(
        "activate_backward", lambda f: lambda *a: (_swapped(f(*a)[0]), *f(*a)[1:])
    ),
    "no probabilities": _around(
        "activate", lambda f: lambda h, probs, *more: f(h, torch.ones_like(probs), *more)
    ),
    "a pair's probability dropped": _around("route", _one_row_zero),
    "a token shifted": _around("to_tokens", lambda f: lambda *a: f(*a).roll(1, 0)),
    "a token shifted on the way back": _around(
        "to_tokens", lambda f: lambda y, r, *more: f(y, r, *more).roll(1, 0), readers
    ),
    "the wrong tokens' weight gradient": _in_products(
        weight_gradient=lambda dy, x, *more: torch_products.weight_gradient(
            dy, _later(x) if isinstance(x, Gathered) else x, *more
        )
    ),
    "no shared expert": lambda monkeypatch, layer: monkeypatch.setattr(
        layer, "shared_experts_compute",
        lambda x: 0 * MegacppMoELayer.shared_experts_compute(layer, x),
    ),
    "no gradient by the shared expert": _around(
        "to_tokens", lambda f: lambda y, r, *more: f(y, r, *more[:1]), readers
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_refused(process, monkeypatch, name):  # noqa: F811
    """By far: five times what is allowed at the least, where a right layer has a tenth of it."""
    case = Case(monkeypatch, **ROUTERS["every-loss"])
    expected, _ = case.truth()
    MUTATIONS[name](monkeypatch, case.layer)
    error, _ = worst(case.run(), expected, case.terms())
    assert error > 5


def _choice(field: str, change):
    """A mutation of one thing that our choice returns."""

    def mutate(monkeypatch, layer) -> None:
        choose = layer.router.choose

        def wrong(*args):
            found = choose(*args)
            return found._replace(**{field: change(getattr(found, field))})

        layer.router.choose = wrong

    return mutate


OF_OUR_ROUTER = {
    "sign of its part of the tokens' gradient": _around(
        "sum_gradients", lambda f: lambda y, r, one, d, gate: f(y, r, one, -d, gate), readers
    ),
    "no part of the tokens' gradient": _around(
        "sum_gradients", lambda f: lambda y, r, one, d, gate: f(y, r, one, 0 * d, gate), readers
    ),
    "another expert's weight": _around(
        "sum_gradients", lambda f: lambda y, r, one, d, gate: f(y, r, one, d, gate.roll(1, 0)),
        readers,
    ),
    "no gradient by the shared expert": _around(
        "sum_gradients", lambda f: lambda y, r, one, d, gate: f(y, r, 0 * one, d, gate), readers
    ),
    "a bf16 gradient of the logits": _around(
        "_bf16_parts", lambda f: lambda x: f(x.bfloat16().float()), fp32_output
    ),
    "sign of the balance": _choice("balance", _negative),
    "weights times 1.05": _choice("probs", _larger),
    "a token's weights dropped": _choice(
        "probs", lambda probs: probs * (torch.arange(len(probs)) != 3)[:, None]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OUR_ROUTER)
def test_what_is_wrong_with_our_router_is_refused(process, monkeypatch, name):  # noqa: F811
    case = Case(monkeypatch, **OURS["every-loss"])
    with_our_router(monkeypatch, case.layer)
    expected, _ = case.truth()
    OF_OUR_ROUTER[name](monkeypatch, case.layer)
    error, _ = worst(case.run(), expected, case.terms())
    assert error > 5
