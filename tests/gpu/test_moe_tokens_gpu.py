"""The kernels in front of the experts on Hopper: the norm with the router's logits, and the sum of
the tokens' gradients with the norm's backward pass."""

import pytest
import torch
from rounded import near

from megacpp_mcore.kernels.moe_experts import hopper_products
from megacpp_mcore.kernels.moe_experts.routing import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

# tokens, hidden size, experts, top-k, whether tokens have fewer experts, a shared expert
TOKENS = {
    "full-size": (4099, 3584, 16, 4, False, True),
    "one-token": (1, 64, 5, 2, False, True),
    "fewer-experts": (777, 328, 7, 3, True, True),
    "widest": (1000, 3840, 16, 8, True, True),
    "not-shared": (500, 8, 3, 1, True, False),
    "by-two-kernels": (130, 4096, 16, 4, True, True),
    "odd-width": (70, 36, 6, 2, True, True),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_tokens_gradient_before_their_norm(case):
    """In one pass where the shapes are taken, of rows that hold NaN where nobody may read."""
    if why := hopper_products.reason(torch.bfloat16, 16):
        pytest.skip(why)
    tokens, h, experts, topk, fewer, shared = TOKENS[case]
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    chosen.scatter_(1, torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices, True)
    if fewer:
        chosen &= torch.rand(tokens, experts, device="cuda") < 0.6
    routing = route(chosen, chosen.float(), topk, hopper_products.ALIGN)
    rows, there = routing.rows.long(), routing.rows >= 0

    def normal(*shape):
        return torch.randn(shape, device="cuda").bfloat16()

    d_rows = torch.full((routing.size, h), float("nan"), device="cuda").bfloat16()
    d_rows[rows[there]] = normal(int(there.sum()), h)
    d_shared = normal(tokens, h) if shared else None
    x, d_residual, gate, weight = (normal(*s) for s in ((tokens, h),) * 2 + ((experts, h), (h,)))
    d_logits, rstd = torch.randn(tokens, experts, device="cuda"), torch.rand(tokens, device="cuda")
    given = [d_rows, routing, d_shared, d_logits, gate, x, d_residual, weight, rstd]
    dx, d_weight = hopper_products.tokens_gradient(*given)

    dy = (d_rows[rows.clamp(min=0)].double().nan_to_num() * there[..., None]).sum(1)
    dy += d_logits.double() @ gate.double() + (d_shared.double() if shared else 0)
    normed, scaled = x.double() * rstd.double()[:, None], dy * weight.double()
    mean = (scaled * normed).mean(1, keepdim=True)
    wide = rstd.double()[:, None] * (scaled - normed * mean) + d_residual.double()
    # Two kernels round dy, too: of errors that know nothing of each other the norm is below twice.
    near(dx, wide)
    near(d_weight, (dy * normed).sum(0))
    again = hopper_products.tokens_gradient(*given)
    assert torch.equal(dx, again[0]) and torch.equal(d_weight, again[1])
    for place in (3, 5, 6, 7):  # the test notices what is wrong with each
        other = [*given[:place], given[place].flip(-1), *given[place + 1 :]]
        with pytest.raises(AssertionError):
            near(hopper_products.tokens_gradient(*other)[0], wide)


# tokens, hidden size, experts
NORMS = {
    "full-size": (4099, 3584, 16),
    "one-token": (1, 64, 5),
    "fewer-experts": (777, 328, 7),
    "widest": (1000, 3840, 16),
    "one-chunk": (9, 8, 3),
    "by-two-kernels": (130, 4096, 16),
    "odd-width": (70, 36, 6),
}


@pytest.mark.parametrize("case", NORMS)
def test_the_norm_and_the_logits_of_its_output(case):
    """In one pass where the shapes are taken; a token of NaN is its own alone."""
    if why := hopper_products.reason(torch.bfloat16, 16):
        pytest.skip(why)
    tokens, h, experts = NORMS[case]
    x, weight, gate = (torch.randn(s, device="cuda") for s in ((tokens, h), (h,), (experts, h)))
    x, weight, gate = x.bfloat16() * 3, weight.bfloat16(), gate.bfloat16()
    x[tokens // 2] *= 1e-3  # eps counts there
    y, rstd, logits = hopper_products.norm_and_logits(x, weight, 1e-5, gate)

    wide = (x.double().square().mean(1) + 1e-5).rsqrt()
    normed = x.double() * wide[:, None] * weight.double()
    near(y, normed)
    # Sums of h terms in float32, of the rounded values: an error of a term is one of theirs.
    terms = y.abs().double() @ gate.abs().double().t()
    expected, bound = y.double() @ gate.double().t(), torch.finfo(torch.float32).eps * h**0.5
    assert (((logits - expected) / terms).abs() <= bound).all()
    assert ((rstd / wide - 1).abs() <= bound).all()
    again = hopper_products.norm_and_logits(x, weight, 1e-5, gate)
    assert all(torch.equal(a, b) for a, b in zip((y, rstd, logits), again, strict=True))
    x[0, -1] = float("nan")
    with_nan = hopper_products.norm_and_logits(x, weight, 1e-5, gate)
    for found, before in zip(with_nan, (y, rstd, logits), strict=True):
        assert found[0].isnan().all() and torch.equal(found[1:], before[1:])
    for wrong in (gate.flip(0), gate.flip(1), torch.cat([gate[:, h // 2 :], gate[:, : h // 2]], 1)):
        found = hopper_products.norm_and_logits(x[1:], weight, 1e-5, wrong)[2]
        assert not (((found - expected[1:]) / terms[1:]).abs() <= bound).all() or tokens == 1
