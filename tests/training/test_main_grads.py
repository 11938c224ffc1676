"""What a model's backward passes leave in main_grad, and what its embedding is, with our embedding
and head against those of plain torch, in Megatron's own data-parallel wrapper."""

import main_grad_ranks
import pytest
import torch
from loss_models import FLOAT32, assert_close

STAGES = [(name, stage) for name, m in main_grad_ranks.MODELS.items() for stage in range(m.stages)]
TIED_HEAD = ("stages-tied", 1)  # of a pipeline's weights Megatron marks none
pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("model", "stage"), STAGES)]
WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of what all models' backward passes left."""
    path = tmp_path_factory.mktemp("main_grads")
    main_grad_ranks.run(path)
    return path


def both(folder, model, stage):
    """Of ours and of plain torch."""
    return (main_grad_ranks.found(folder, model, kind, stage) for kind in ("ours", "plain"))


def test_main_grads_are_those_of_plain_torch(folder, model, stage):
    ours, plain = both(folder, model, stage)
    # Gradients in bf16 of micro batches, rounded before they are added: some 32 roundings.
    bf16 = 32**0.5 * torch.finfo(torch.bfloat16).eps
    tolerance = bf16 if main_grad_ranks.MODELS[model].bf16 else FLOAT32
    assert ours["main_grad"].keys() == plain["main_grad"].keys()
    for name, gradient in plain["main_grad"].items():
        assert gradient.any() or (name, model) == (HEAD, "stages-tied")
        assert gradient.dtype == torch.float32
        assert_close(ours["main_grad"][name], gradient, name, tolerance)


def test_one_gradient_is_handed_on_in_a_backward_pass(folder, model, stage):
    ours = main_grad_ranks.found(folder, model, "ours", stage)
    passes = main_grad_ranks.MICRO_BATCHES
    names = {WORDS} | ({HEAD} if stage == main_grad_ranks.MODELS[model].stages - 1 else set())
    for name in names - ({HEAD} if "tied" in model else set()):
        uses = [given for found, given in ours["handed"] if found == name]
        assert len(uses) >= passes and len(uses) % passes == 0, name
        assert sum(uses) == passes, name  # the others are None, and nothing is added up
    assert ours["left"] == []  # data parallelism has taken every one


def test_nothing_but_a_tied_weight_is_added_up_once_more(folder, model, stage):
    ours, plain = both(folder, model, stage)
    tied = model == "tied" or (model, stage) == TIED_HEAD
    assert ours["zeroed"] == ([WORDS] if tied else [])
    assert plain["zeroed"] == ([WORDS] if tied or not ("stages" in model or "one" in model) else [])


def test_names_and_initial_values_are_megatrons(folder, model, stage):
    ours, plain = both(folder, model, stage)
    assert ours["names"] == plain["names"] and WORDS in ours["names"]
    for name, value in plain["weights"].items():
        assert torch.equal(ours["weights"][name], value), name
