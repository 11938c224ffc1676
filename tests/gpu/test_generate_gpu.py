"""Generation on a GPU: states against a whole forward pass, at full width and in bfloat16."""

import contextlib

import pytest
import torch

from megacpp_mcore.inference.context import GenerationContext
from megacpp_mcore.inference.generate import Generation, fill
from megacpp_mcore.inference.loading import built
from megacpp_mcore.inference.recipe import on_one_device
from megacpp_mcore.inference.sampling import Sampling
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@contextlib.contextmanager
def wide(dtype):
    """A layer of every letter, as wide as NAM56R."""
    overrides = ["model.pattern=AEMR", "model.depth=4", "mtp.mtp_num_layers=0", "mtp.pattern=",
                 "model.vocab_size=512"]  # fmt: skip
    content = load_recipe("nam56r-quarter", overrides).to_dict()
    with built(on_one_device("wide", content, device="cuda"), dtype) as model:
        yield model.eval()


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request):
    with wide(request.param) as model:
        yield model


def by_steps(model, tokens, until):
    """Logits with states: two pieces, then token by token. until: what the first piece is
    continued with."""
    context, found = GenerationContext(len(tokens), 256, "cuda"), []
    for start, end in ((0, 64), (64, 101), *((t, t + 1) for t in range(101, 150))):
        piece = (until if start else tokens)[:, start:end]
        found.append(model.next_token_logits(piece, context).float())
        context.advance(end - start)
    return torch.cat(found, 1)


def has_reference(surface):
    """moe_experts apart, whose backends name their weights differently."""
    backends = [backend.name for backend in REGISTRY[surface].backends]
    return "reference" in backends and surface != "moe_experts"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_token_is_as_near_the_truth_as_in_a_whole_forward_pass(dtype, monkeypatch):
    """The truth: the same weights in float32, every part the reference. Errors are root mean
    squares over a token's logits, compared in median and at the 95th percentile: in bfloat16 a
    token whose best experts are as good as equal may get others in either pass. Both round alike;
    twice is for other sums in other orders. A float32 pass may have no error at all, therefore 32
    roundings of the largest logit (four layers, sums of up to 3,584 terms)."""
    tokens, others = torch.randint(0, 512, (2, 2, 150), device="cuda")
    with wide(dtype) as model, torch.no_grad():
        whole = model.next_token_logits(tokens).float()
        found, stale = by_steps(model, tokens, tokens), by_steps(model, others, tokens)
        weights = {name: value.float() for name, value in model.named_parameters()}
    forced = ",".join(f"{name}=reference" for name in REGISTRY if has_reference(name))
    monkeypatch.setenv("MEGACPP_BACKENDS", forced)
    with wide("fp32") as model, torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(weights[name])
        truth = model.next_token_logits(tokens)

    def errors(logits):
        at = torch.tensor([0.5, 0.95], device="cuda")
        return (logits - truth)[:, 64:].pow(2).mean(-1).sqrt().flatten().quantile(at)

    floor = 32 * torch.finfo(torch.float32).eps * truth.abs().max()
    bound = 2 * errors(whole) + floor
    print(f"{dtype}: found {errors(found)} whole {errors(whole)} stale {errors(stale)} {bound}")
    assert (errors(found) <= bound).all(), (errors(found), errors(whole))
    assert (errors(stale) > 4 * bound).all(), "the bound would not notice another prompt's states"
    assert truth.std() > 10 * bound[0]


def test_prompts_of_different_lengths_together(model):
    prompts = [[1, 2, 3], list(range(70))]
    options = {"max_tokens": 8, "eod": 511, "vocab_size": 512, "sampling": Sampling(0.0)}
    first = [
        next(iter(Generation(model, [prompt], seed=0, **options).tokens())).logprob
        for prompt in prompts
    ]
    together = list(Generation(model, prompts, seed=0, **options).tokens())
    bound = 32 * torch.finfo(next(model.parameters()).dtype).eps
    for row, expected in enumerate(first):
        found = next(token for token in together if token.row == row)
        assert found.logprob == pytest.approx(expected, abs=bound)


def test_a_context_of_64k_tokens(model):
    """M and R keep what they keep of one token, and MLA 128 values a token."""
    prompt = torch.randint(0, 512, (65535,)).tolist()
    small, _ = fill(model, [prompt[:5]], 65536)
    context, logits = fill(model, [prompt], 65536)
    assert context.state_bytes() == small.state_bytes()
    size = next(model.parameters()).element_size()
    assert context.state_bytes()["cache_per_token"] == 128 * size
    assert logits.isfinite().all()
    with torch.no_grad():
        after = model.next_token_logits(torch.tensor([[7]], device="cuda"), context)
    assert after.isfinite().all()
