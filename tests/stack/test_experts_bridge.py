"""The experts' activation where a rank has no token or one, compiled as Megatron compiles it."""

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu as swiglu

from megacpp_mcore.stack import bridges


@pytest.fixture
def compiling():
    # Not monkeypatch, which pytest 9.2 undoes by deleting the name: torch hides it from then on.
    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def test_a_rank_without_tokens_compiles_nothing(monkeypatch, compiling):
    """Forward and backward, at any number of rows."""
    made = []

    def backend(graph, inputs):
        made.append(tuple(inputs[-1].shape) if inputs else ())
        return graph

    for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back"):
        written = getattr(swiglu, name)
        written = getattr(written, "compiled", written)
        written = getattr(written, "_torchdynamo_orig_callable", written)
        monkeypatch.setattr(swiglu, name, torch._dynamo.optimize(backend)(written))

    def run(rows):
        x = torch.randn(rows, 8, requires_grad=True)
        weights = torch.rand(rows, 1, requires_grad=True)
        y = swiglu.weighted_bias_swiglu_impl(x, None, weights)
        return y, torch.autograd.grad(y, (x, weights), torch.ones_like(y)), x, weights

    for rows in (5, 7):  # for this number, then for any
        run(rows)
    for_any = len(made)
    run(0), run(1)
    assert len(made) > for_any, "torch.compile takes 0 and 1 for any number: the bridge is needless"
    torch._dynamo.reset()
    bridges.uncompiled_swiglu_for_few_rows()
    bridges.uncompiled_swiglu_for_few_rows()
    for rows in (1, 0, 5, 7):
        run(rows)
    for_any = len(made)
    for rows in (0, 1, 6, 0, 1):
        y, gradients, x, weights = run(rows)
        first, second = x.chunk(2, -1)
        expected = torch.nn.functional.silu(first) * second * weights
        torch.testing.assert_close(y, expected)
        wanted = torch.autograd.grad(expected, (x, weights), torch.ones_like(y))
        torch.testing.assert_close(gradients, wanted)
    assert len(made) == for_any
