"""How Hopper's products are called: on a CPU, by a C program with the interface of grouped.cu."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_moe_routed as routed
import torch

from megacpp_mcore.kernels import main_grad, nvcc
from megacpp_mcore.kernels.moe_experts import hopper_products, torch_products
from megacpp_mcore.kernels.moe_experts.activation import ACTIVATIONS
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed
from megacpp_mcore.kernels.moe_experts.routing import Gathered, route

_SOURCE = Path(__file__).with_name("grouped_product.c")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("grouped") / "grouped.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", path, _SOURCE, "-lm"], check=True)
    return path


@pytest.fixture(autouse=True)
def on_cpu(compiled, monkeypatch):
    monkeypatch.setattr(nvcc.Library, "load", lambda *args: ctypes.CDLL(str(compiled)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    hopper_products._kernels.cache_clear()
    yield
    hopper_products._kernels.cache_clear()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", ["plain", "dropped", "one-expert", "skewed", "empty"])
def test_the_operator_is_the_definition(case, activation):
    sizes = routed.CASES[case] | {"activation": activation}
    leaves, chosen, direction = routed.draw(**sizes, dtype=torch.bfloat16)
    expected = routed.definition(leaves, chosen, direction, activation)
    with routed.poisoned_memory("cpu"):
        found = routed.run(leaves, chosen, direction, sizes["topk"], hopper_products, activation)
    routed.assert_near(found, expected, torch.bfloat16, 300)


@pytest.mark.parametrize("wide", [True, False])
def test_weight_gradients_are_added_in_float32(wide):
    """In another dtype after the product."""
    leaves, chosen, direction = routed.draw(37, 5, 2, dtype=torch.bfloat16)
    expected = routed.definition(leaves, chosen, direction)
    before = {}
    for name in ("w1", "w2"):
        weight = leaves[name]
        weight.main_grad = torch.randn(weight.shape).to(torch.float32 if wide else torch.bfloat16)
        before[name] = weight.main_grad.double()
    experts = Experts(leaves["w1"], leaves["w2"], True, hopper_products)
    experts_routed(leaves["x"], chosen, leaves["probs"], experts, 2).backward(direction)
    for name, start in before.items():
        total = {name: leaves[name].main_grad}
        routed.assert_near(total, {name: start + expected[name]}, torch.bfloat16, 300)


@pytest.mark.parametrize("wide", [True, False])
def test_a_first_weight_gradient_is_written_and_the_next_one_added(wide):
    leaves, chosen, direction = routed.draw(37, 5, 2, dtype=torch.bfloat16)
    expected = routed.definition(leaves, chosen, direction)
    weights = {name: leaves[name] for name in ("w1", "w2")}
    for weight in weights.values():
        dtype = torch.float32 if wide else torch.bfloat16
        weight.main_grad = torch.full(weight.shape, float("nan"), dtype=dtype)
        main_grad.expect_first(weight)
    experts = Experts(*weights.values(), True, hopper_products)
    for times in (1, 2):
        experts_routed(leaves["x"], chosen, leaves["probs"], experts, 2).backward(direction)
        for name, weight in weights.items():
            found, sums = {name: weight.main_grad}, {name: times * expected[name]}
            routed.assert_near(found, sums, torch.bfloat16, 300)


@pytest.mark.parametrize(
    "parts", [[(0, 1)], [(0, 1), (1, 2)], [(0, 3), (3, 5)]], ids=["one-expert", "two", "five"]
)
@pytest.mark.parametrize("into_main_grad", [True, False])
def test_an_exchange_during_fc1s_weight_gradient_has_multiprocessors(
    parts, into_main_grad, monkeypatch
):
    """The first part of the experts leaves it some. The values are those of one launch."""
    leaves, chosen, direction = routed.draw(37, parts[-1][1], 1, dtype=torch.bfloat16)
    launches, launch = [], hopper_products._launch

    def spy(kind, a, b, c, ends, **sizes):
        launches.append((kind, (sizes.get("first"), sizes.get("end")), sizes.get("idle", 0)))
        return launch(kind, a, b, c, ends, **sizes)

    monkeypatch.setattr(hopper_products, "_launch", spy)

    def gradients(on_gradient):
        launches.clear()
        for name in ("w1", "w2"):
            leaves[name].grad = None
            leaves[name].main_grad = torch.ones(leaves[name].shape)
        held = Experts(leaves["w1"], leaves["w2"], into_main_grad, hopper_products)
        out = experts_routed(leaves["x"], chosen, leaves["probs"], held, 1, on_gradient=on_gradient)
        out.backward(direction)
        kind = "main_grad" if into_main_grad else "grad"
        return [getattr(leaves[name], kind).clone() for name in ("w1", "w2")]

    alone = gradients(None)
    of_weights = [at for at in launches if at[0] >= hopper_products._WEIGHT_GRADIENT]
    assert len(of_weights) == 2 and all(idle == 0 for *_, idle in of_weights)
    travels = []
    found = gradients(lambda dx: travels.append(len(launches)))
    (sent,) = travels
    idle = [idle for *_, idle in launches]
    assert idle[sent:] == [hopper_products._EXCHANGE_BLOCKS, 0][: len(parts)]
    assert not any(idle[:sent])
    assert [span for _, span, _ in launches[sent:]] == parts
    assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_product_copies_the_tokens(activation, monkeypatch):
    leaves, chosen, direction = routed.draw(37, 5, 2, dtype=torch.bfloat16, activation=activation)
    monkeypatch.setattr(Gathered, "rows", property(lambda tokens: pytest.fail("copied")))
    routed.run(leaves, chosen, direction, 2, hopper_products, activation)


@pytest.mark.parametrize("into", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", ["dy", "x"])
def test_a_weight_gradient_gathers_either_operand(gathered, into):
    """As of sorted copies, added to what is there or alone."""
    leaves, chosen, _ = routed.draw(37, 5, 2, dtype=torch.bfloat16)
    routing = route(chosen, leaves["probs"].detach(), 2, hopper_products.ALIGN)
    ends, used = routing.ends, int(routing.ends[-1])
    tokens = Gathered(leaves["x"].detach(), routing)
    rows = torch.randn(routing.size, 24).bfloat16()
    pair = (tokens, rows) if gathered == "dy" else (rows, tokens)
    copies = [(tokens.rows if y is tokens else y)[:used] for y in pair]
    expected = torch_products.weight_gradient(*copies, ends)
    # A result is rounded to bf16 once, and so is the sum with what is there.
    eps, wide = torch.finfo(torch.bfloat16).eps, expected.double()
    if into is None:
        found = hopper_products.weight_gradient(*pair, ends)
        assert ((found.double() - wide).abs() <= eps * wide.abs()).all()
        return
    total = torch.randn(expected.shape).to(into)
    for overwrite in (True, False):
        sums = wide if overwrite else total.double() + wide
        hopper_products.add_weight_gradient(total, *pair, ends, overwrite)
        assert ((total.double() - sums).abs() <= eps * (wide.abs() + sums.abs())).all()


@pytest.mark.parametrize(
    ("columns", "tile"), [(896, 224), (1792, 256), (3584, 256), (200, 224), (512, 256), (1, 224)]
)
def test_a_tile_has_the_fewest_columns_beyond_the_matrix(columns, tile, monkeypatch):
    calls = watch_calls(monkeypatch, multiprocessors=1)
    w, ends = torch.zeros(1, columns, 8).bfloat16(), torch.tensor([0], dtype=torch.int32)
    hopper_products.forward(torch.zeros(0, 8).bfloat16(), w, ends)
    ((_, _, found, *_),) = calls
    assert found == tile


def watch_calls(monkeypatch, multiprocessors: int) -> list[tuple]:
    """The calls of grouped.cu's functions, on a GPU of so many multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    calls, call = [], hopper_products._call
    monkeypatch.setattr(hopper_products, "_call", lambda *args: calls.append(args) or call(*args))
    return calls


# What of the call differs -> whether one kernel computes it.
TOKENS = {
    "plain": ({}, True),
    "not-shared": ({"shared": False}, True),
    "one-token": ({"tokens": 1}, True),
    "top-8-of-16": ({"experts": 16, "topk": 8}, True),
    "widest": ({"width": 3840, "tokens": 3}, True),
    "wider": ({"width": 3848, "tokens": 3}, False),
    "odd-width": ({"width": 20}, False),
    "more-experts": ({"experts": 17}, False),
    "two-tokens-fit": ({"width": 3840, "tokens": 3, "experts": 16, "topk": 12}, True),
    "two-tokens-do-not-fit": ({"width": 3840, "tokens": 3, "experts": 16, "topk": 13}, False),
    "float32": ({"dtype": torch.float32}, False),
    "not-aligned": ({"shift": 1}, False),
    "no-token": ({"tokens": 0}, False),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_tokens_gradient_is_one_kernel_or_two(case, monkeypatch):
    """The same gradients, but for the roundings of what is not rounded in between."""
    sizes, in_one = TOKENS[case]
    usual = {"tokens": 21, "width": 40, "experts": 5, "topk": 2, "shift": 0, "shared": True}
    tokens, width, experts, topk, shift, shared, dtype = (
        usual | {"dtype": torch.bfloat16} | sizes
    ).values()
    calls = watch_calls(monkeypatch, multiprocessors=4)

    def draw(*shape):
        return torch.randn(shape).to(dtype)

    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, torch.rand(tokens, experts).topk(topk, 1).indices, True)
    chosen &= torch.rand(tokens, experts) < 0.8
    routing = route(chosen, chosen.float(), topk, hopper_products.ALIGN)
    x = draw(tokens * width + shift)[shift:].view(tokens, width)
    given = (
        draw(routing.size, width), routing, draw(tokens, width) if shared else None,
        torch.randn(tokens, experts), draw(experts, width), x, draw(tokens, width), draw(width),
        torch.rand(tokens),
    )  # fmt: skip
    with routed.poisoned_memory("cpu"):
        found = hopper_products.tokens_gradient(*given)
    assert [name for name, *_ in calls] == ["tokens_gradient"] * in_one
    expected = torch_products.tokens_gradient(*given)
    # Of the largest value: dy rounded, which is as much a term of dx, and both results.
    bound = 3 * torch.finfo(torch.bfloat16).eps
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        scale = theirs.float().abs().amax() if theirs.numel() else 0
        assert ((ours.float() - theirs.float()).abs() <= bound * scale).all()


# What of the call differs -> whether one kernel computes it.
NORMS = {
    "plain": ({}, True),
    "one-token": ({"tokens": (1,)}, True),
    "sixteen-experts": ({"experts": 16}, True),
    "widest": ({"width": 3840}, True),
    "wider": ({"width": 3848}, False),
    "odd-width": ({"width": 20}, False),
    "more-experts": ({"experts": 17}, False),
    "float32": ({"dtype": torch.float32}, False),
    "not-aligned": ({"shift": 1}, False),
    "not-contiguous": ({"apart": True}, True),
    "no-token": ({"tokens": (0, 2)}, False),
}


@pytest.mark.parametrize("case", NORMS)
def test_norm_and_logits_are_one_kernel_or_two(case, monkeypatch):
    sizes, in_one = NORMS[case]
    usual = {"tokens": (7, 3), "width": 40, "experts": 5, "shift": 0, "apart": False}
    tokens, width, experts, shift, apart, dtype = (
        usual | {"dtype": torch.bfloat16} | sizes
    ).values()
    calls = watch_calls(monkeypatch, multiprocessors=2)
    weight, gate = torch.randn(width).to(dtype), torch.randn(experts, width).to(dtype)
    shape = *tokens, width
    x = torch.randn(torch.Size(shape).numel() + shift).to(dtype)[shift:].view(shape)
    x = x.transpose(0, 1) if apart else x
    with routed.poisoned_memory("cpu"):
        found = hopper_products.norm_and_logits(x, weight, 1e-5, gate)
    assert [name for name, *_ in calls] == ["norm_and_logits"] * in_one
    expected = torch_products.norm_and_logits(x, weight, 1e-5, gate)
    # Rounded once: a last bit of each value, and of a logit what those of its terms come to.
    eps = torch.finfo(dtype).eps
    terms = expected[0].reshape(-1, width).abs().double() @ gate.abs().double().t()
    for ours, theirs, scale in zip(found, expected, (expected[0], expected[1], terms), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous()
        assert ((ours.double() - theirs.double()).abs() <= eps * scale.double().abs()).all()


def test_what_cuda_refuses_is_passed_on():
    x, w = torch.zeros(128, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16()
    unaligned = torch.tensor([100, 128], dtype=torch.int32)
    with pytest.raises(hopper_products.HopperProductError, match=r"\(128, 8\).*refused"):
        hopper_products.forward(x, w, unaligned)
    with pytest.raises(hopper_products.HopperProductError, match="refused"):  # neither is gathered
        hopper_products.weight_gradient(x, x, torch.tensor([128], dtype=torch.int32))


@pytest.mark.slow
def test_the_sources_compile(monkeypatch, tmp_path):
    if nvcc.find_nvcc() is None:
        pytest.skip("no nvcc here")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hopper_products._kernels.cache_clear()
    assert hopper_products._kernels().grouped_error(0) == b"no error"
