"""Generation on a GPU: states against a whole forward pass, at full width and in bfloat16."""

import pytest
import torch

from megacpp_mcore.inference.context import GenerationContext
from megacpp_mcore.inference.generate import Generation, fill
from megacpp_mcore.inference.loading import built
from megacpp_mcore.inference.recipe import on_one_device
from megacpp_mcore.inference.sampling import Sampling
from megacpp_mcore.recipe import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request):
    """A layer of every letter, as wide as NAM56R."""
    overrides = ["model.pattern=AEMR", "model.depth=4", "mtp.mtp_num_layers=0", "mtp.pattern=",
                 "model.vocab_size=512"]  # fmt: skip
    content = load_recipe("nam56r-quarter", overrides).to_dict()
    with built(on_one_device("wide", content, device="cuda"), request.param) as model:
        yield model.eval()


def test_every_token_has_the_logits_of_a_whole_forward_pass(model):
    """To 32 roundings of the largest logit: four layers, sums of up to 3,584 terms, and kernels of
    another order in the whole pass. In bfloat16 a token whose best experts are as good as equal may
    get others, so that one token in 50 may differ by more."""
    dtype = next(model.parameters()).dtype
    tokens = torch.randint(0, 512, (2, 150), device="cuda")
    with torch.no_grad():
        whole = model.next_token_logits(tokens).float()
        context, found = GenerationContext(2, 256, "cuda"), []
        for start, end in ((0, 64), (64, 101), *((t, t + 1) for t in range(101, 150))):
            found.append(model.next_token_logits(tokens[:, start:end], context).float())
            context.advance(end - start)
    far = (torch.cat(found, 1) - whole).abs().amax(-1)
    bound = 32 * torch.finfo(dtype).eps * whole.abs().max()
    allowed = 0 if dtype == torch.float32 else far.numel() // 50
    assert (far > bound).sum() <= allowed, (far.max() / bound, (far > bound).sum())
    assert whole.std() > 4 * bound


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
