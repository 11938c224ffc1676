"""The experts' operator and the layer around it: memory, checkpoints, CUDA graphs, full size."""

import pytest
import torch
from expert_checkpoints import load_from
from megatron.core.activations import squared_relu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from rounded import distance

from megacpp_mcore.bench import load_for_bench
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.bench.variants import Variant, build
from megacpp_mcore.kernels.moe_experts import hopper_products, torch_products
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed
from megacpp_mcore.kernels.moe_experts.routing import route
from megacpp_mcore.layers.experts import FusedExperts
from megacpp_mcore.layers.parts import te_experts
from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process
from megacpp_mcore.training.one_process import in_half_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def test_each_pass_has_one_matrix_of_rows():
    """Forward H, A and the rows of the output; backward dH, in H's place, and those of dx. Neither
    the rows of x nor those of dy."""
    tokens, experts, topk, h, f = 4096, 8, 4, 1024, 256
    if why := hopper_products.reason(torch.bfloat16, experts):
        pytest.skip(why)
    scores = torch.rand(tokens, experts, device="cuda")
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
    x, w1, w2 = (
        torch.randn(shape, device="cuda").bfloat16().requires_grad_()
        for shape in ((tokens, h), (experts, 2 * f, h), (experts, h, f))
    )
    for weight in (w1, w2):
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weights, direction = Experts(w1, w2, True, hopper_products), torch.randn_like(x)
    rows = route(chosen, scores, topk, hopper_products.ALIGN).size
    of_row, small = 2 * rows, 64 * rows  # bytes of a column of the rows; the routing

    def beyond(call, *arguments):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return call(*arguments), torch.cuda.max_memory_allocated() - before

    for _ in range(2):  # with the first, torch and Triton allocate what is theirs
        y, forward = beyond(experts_routed, x, chosen, scores, weights, topk)
        _, backward = beyond(y.backward, direction)
        x.grad = None
    assert forward <= of_row * (2 * f + f + h) + small
    # and what autograd gets for w2
    assert backward <= of_row * h + 2 * x.numel() + 2 * w2.numel() + small


@pytest.mark.parametrize("gated", [True, False])
def test_transformer_engines_experts_load_ours_and_ours_theirs(gated):
    """The same outputs from the same checkpoint, up to bf16's roundings, in both directions."""
    pytest.importorskip("transformer_engine")
    activation = {"activation_func": torch.nn.functional.silu if gated else squared_relu}
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_moe_experts=4, ffn_hidden_size=96,
        moe_ffn_hidden_size=96, gated_linear_unit=gated, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, bias_activation_fusion=False, **activation,
    )  # fmt: skip
    x, probs = torch.randn(50, 64, device="cuda").bfloat16(), torch.rand(50, device="cuda")
    counts = torch.tensor([20, 0, 13, 17])
    with single_process(1, "cuda"):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ours, theirs, again = (
            kind(num_local_experts=4, config=config, pg_collection=groups)
            for kind in (FusedExperts, te_experts, FusedExperts)
        )
        load_from(ours, theirs)
        load_from(theirs, again)
        for name, value in ours.named_parameters():
            assert torch.equal(again.get_parameter(name), value)
        outputs = [built(x, counts, probs)[0].double() for built in (ours, theirs)]
    distance = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert distance <= 5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("products", [torch_products, hopper_products], ids=lambda p: p.NAME)
def test_a_graph_routes_anew_at_every_replay(products):
    """What the host knows of a captured step is its sizes alone."""
    if products is hopper_products and (why := hopper_products.reason(torch.bfloat16, 8)):
        pytest.skip(why)
    tokens, experts, topk, h, f = 1000, 8, 2, 256, 64

    def draw():
        scores = torch.rand(tokens, experts, device="cuda")
        chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
        chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
        return torch.randn(tokens, h, device="cuda").bfloat16(), chosen, scores * chosen

    w1 = (torch.randn(experts, 2 * f, h, device="cuda") * h**-0.5).bfloat16().requires_grad_()
    w2 = (torch.randn(experts, h, f, device="cuda") * f**-0.5).bfloat16().requires_grad_()
    for weight in (w1, w2):
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).float(), False
    static = draw()
    x, probs = static[0].requires_grad_(), static[2].requires_grad_()
    direction = torch.randn(tokens, h, device="cuda").bfloat16()

    def step():
        y = experts_routed(x, static[1], probs, Experts(w1, w2, True, products), topk)
        return y, *torch.autograd.grad(y, (x, probs, w1, w2), direction)[:2]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for buffer, value in zip((x, static[1], probs), draw(), strict=True):
                buffer.copy_(value)
        sums = []
        for run in (graph.replay, step):
            for weight in (w1, w2):
                weight.main_grad.zero_()
            values = run() or captured
            sums.append([*(v.clone() for v in values), w1.main_grad.clone(), w2.main_grad.clone()])
        for replayed, eager in zip(*sums, strict=True):
            assert torch.equal(replayed, eager)


FULL_SIZE = [*layer_overrides("E"), "backends.moe_experts=fused_moe"]


def test_the_residual_in_the_experts_sum_at_full_size():
    """NAM56R's E layer: Megatron's output but for the experts' rounding, and its gradients; and the
    same where norm and logits are one kernel, which sums in another order."""
    recipe = load_for_bench("nam56r", FULL_SIZE)
    with quiet(), single_process(1, "cuda"):
        model, args = build(Variant(recipe))
        in_half_precision(model, args)
        (layer,) = model.decoder.layers
        residuals, routed = [], layer.mlp.experts.routed

        def watched(tokens, routing_map, probs, addend, residual, *more):
            residuals.append(residual is not None)
            return routed(tokens, routing_map, probs, addend, residual, *more)

        layer.mlp.experts.routed = watched
        shape = args.seq_length, args.micro_batch_size, args.hidden_size
        x, direction = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))

        def step(call):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.backward(direction)
            named = [("x", leaf), *layer.named_parameters()]
            gradients = {name: value.grad for name, value in named}
            for _, value in named:
                value.grad = None
            return y.detach(), gradients

        joined, joined_gradients = step(layer._forward_mlp)
        layer.mlp.normed = lambda norm, hidden_states: (*norm(hidden_states), None)
        y, found = step(layer._forward_mlp)
        megatrons, expected = step(lambda leaf: MoETransformerLayer._forward_mlp(layer, leaf))
        with torch.no_grad():
            normed, _ = layer.pre_mlp_layernorm(x)
            experts, _ = layer.mlp(normed)
    assert residuals == [True, True, False, False]
    assert (y != megatrons).any()  # they are not the same sum
    # Half an epsilon each for the two roundings of Megatron's and the one of ours, and of the next
    # order as much again as any of them is off.
    half = torch.finfo(torch.bfloat16).eps / 2
    bound = half * (1 + 4 * half) * sum(value.double().abs() for value in (experts, y, megatrons))
    assert ((y.double() - megatrons.double()).abs() <= bound).all()
    # The same kernels from the same inputs; where one adds with atomics, and where norm and logits
    # are one kernel, roundings to bf16 of sums in different orders.
    assert distance(joined, y) <= 2 * half
    for name, gradient in expected.items():
        assert distance(found[name], gradient) <= 2 * half, name
        assert distance(joined_gradients[name], gradient) <= 2 * half, name
        assert gradient.any(), name
