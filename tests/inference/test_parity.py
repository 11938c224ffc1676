"""M and R as they train, in chunks, against the loader's recurrences, step by step: logits and the
gradient of every parameter in float64, at odd lengths."""

import pytest
import torch

from megacpp_mcore.inference import loading, standalone
from megacpp_mcore.inference.export import _config
from megacpp_mcore.inference.loading import Loaded, built
from megacpp_mcore.inference.names import Names
from megacpp_mcore.inference.recipe import on_one_device
from megacpp_mcore.inference.trained import Trained
from megacpp_mcore.recipe import load_recipe

VARIANTS = {
    "siso": [],
    "mimo": ["mamba3.variant=mimo", "mamba3.mimo_rank=2"],
    "rational": ["mamba3.decay=rational", "mamba3.mamba_num_groups=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("seq", [1, 37, 65, 131])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gradient_is_that_of_the_recurrence(
    small_recipe, tmp_path, monkeypatch, variant, seq
):
    overrides = ["model.pattern=MR", "model.depth=2", "mtp.mtp_num_layers=0", "mtp.pattern=",
                 "m2rnn.grad_clamp=null", *VARIANTS[variant]]  # fmt: skip
    content = load_recipe(str(small_recipe), overrides).to_dict()
    recipe = on_one_device("parity", content, device="cpu")
    tokens = torch.randint(0, 257, (2, seq))
    monkeypatch.setitem(loading.DTYPES, "fp64", torch.float64)
    with built(recipe, "fp64") as model:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        names = Names(model)
        config = _config(
            Trained("parity", content, tmp_path, 1), Loaded(model, recipe, None, 256), "fp32"
        )
        wide = standalone.NAM56R(config).double()
        wide.load_state_dict({name: x.double() for name, x in names.exported().items()})
        logits = model.next_token_logits(tokens)
        direction = torch.randn_like(logits)
        logits.backward(direction)
        with torch.no_grad():  # the gradients get the exported names
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        found = Names(model).exported()
    expected, _ = wide(tokens)
    expected.backward(direction)
    wanted = {name: parameter.grad for name, parameter in wide.named_parameters()}
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in {**wanted, "logits": expected}.items():
        actual = found.get(name, logits)
        # A sum of both signs is held to its terms, which are no larger than the largest gradient.
        size = max(gradient.abs().max(), 1e-3 * largest)
        assert (actual - gradient).abs().max() < 1e-9 * size, name
