"""What every backend of linear_cross_entropy must hold to, beside the admission suite.

A contract is a function of a Head, a device and a dtype; `CONTRACTS` has them all. The truth is the
reference in float64, from the values that the tensors of the dtype hold.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy import (
    REFERENCE,
    Head,
    LinearCrossEntropyInputError,
)

SEQ, BATCH, HIDDEN, VOCAB = 5, 3, 24, 41
IGNORED = -100


def draw(device: str, dtype: torch.dtype, vocab: int = VOCAB) -> dict[str, Tensor]:
    """The first token does not count: Liger's old gradients were all multiplied by its."""
    generator = torch.Generator(device).manual_seed(torch.initial_seed() % 2**31)
    how = {"generator": generator, "device": device}
    labels = torch.randint(vocab, (SEQ, BATCH), **how)
    labels[0, 0] = labels[4, 1] = IGNORED
    return {
        "hidden": torch.randn(SEQ, BATCH, HIDDEN, **how).to(dtype),
        "weight": (torch.randn(vocab, HIDDEN, **how) * HIDDEN**-0.5).to(dtype),
        "labels": labels,
    }


def directions(labels: Tensor) -> Tensor:
    """A random gradient for every loss, 0 for the first."""
    given = torch.randn(labels.shape, device=labels.device)
    given[0, 0] = 0
    return given


def weights(labels: Tensor) -> Tensor:
    """Of every token; some are 0, the first among them."""
    given = (torch.rand(labels.shape, device=labels.device) - 0.25).clamp(min=0)
    given[0, 0] = 0
    return given


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype, wants: str = "hidden weight") -> dict:
    """hidden and weight in dtype, those in `wants` with a gradient; and the labels."""
    made = {n: tensors[n].detach().to(dtype).clone() for n in ("hidden", "weight")}
    return {n: x.requires_grad_(n in wants.split()) for n, x in made.items()} | {
        "labels": tensors["labels"]
    }


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, largest_logit: float = 6) -> None:
    """As `LinearCrossEntropyCase.tolerance`: a few roundings to the dtype of logits up to that
    size and of their gradients, and sums of VOCAB + HIDDEN + tokens terms in float32."""
    terms = VOCAB + HIDDEN + SEQ * BATCH
    bound = (largest_logit + 3) * torch.finfo(dtype).eps / 2
    bound += largest_logit * terms * torch.finfo(torch.float32).eps
    size = expected.abs().max().item() or 1.0
    error = (actual.to(torch.float64) - expected).abs().max().item() / size
    assert actual.shape == expected.shape and error <= bound, f"{error:.2e} > {bound:.2e}"


def per_token(head: Head, tensors: dict, dtype: torch.dtype, given: Tensor, **options) -> list:
    """Losses and the gradients of sum(given * losses)."""
    inputs = leaves(tensors, dtype)
    losses = head.per_token(**inputs, **options)
    found = torch.autograd.grad(
        losses, (inputs["hidden"], inputs["weight"]), given.to(losses.dtype)
    )
    return [losses.detach(), *found]


def weighted(head: Head, tensors: dict, dtype: torch.dtype, given: Tensor, by: float, **options):
    """Total, losses, and the gradients of by * total."""
    inputs = leaves(tensors, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total, losses = head.weighted(**inputs, loss_weights=given.to(wide), **options)
    found = torch.autograd.grad(by * total, (inputs["hidden"], inputs["weight"]))
    return [total.detach(), losses, *found]


def any_gradient_for_every_token(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    given = directions(tensors["labels"])
    truth = per_token(REFERENCE, tensors, torch.float64, given)
    found = per_token(head, tensors, dtype, given)
    for actual, expected in zip(found, truth, strict=True):
        close(actual, expected, dtype)
    # Each alone, so that an error in a small one is not lost beside a large one.
    for token, expected in zip(found[1].flatten(0, 1), truth[1].flatten(0, 1), strict=True):
        close(token, expected, dtype)
    assert found[0].dtype == torch.float32 and not found[0][0, 0] and not found[1][0, 0].any()


def a_weight_for_every_token(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    given = weights(tensors["labels"])
    truth = weighted(REFERENCE, tensors, torch.float64, given, by=-3.3)
    found = weighted(head, tensors, dtype, given, by=-3.3)
    for actual, expected in zip(found, truth, strict=True):
        close(actual, expected, dtype)
    assert not found[1].requires_grad and found[0].dtype == found[1].dtype == torch.float32


def the_two_are_one_loss(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    given = weights(tensors["labels"])
    total, losses, *gradients = weighted(head, tensors, dtype, given, by=1.0)
    other, *others = per_token(head, tensors, dtype, given)
    assert torch.equal(losses, other)
    close(total, (given.double() * losses.double()).sum(), torch.float32)
    for actual, expected in zip(gradients, others, strict=True):
        close(actual, expected.double(), dtype)


def a_second_backward_pass_gives_the_same(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    inputs = leaves(tensors, dtype)
    given = weights(tensors["labels"])
    total, _ = head.weighted(**inputs, loss_weights=given)
    losses = head.per_token(**inputs)
    along = directions(tensors["labels"])
    sources = inputs["hidden"], inputs["weight"]
    for output, gradient in ((total, torch.tensor(2.5, device=device)), (losses, along)):
        first = torch.autograd.grad(output, sources, gradient, retain_graph=True)
        kept = [x.clone() for x in first]
        second = torch.autograd.grad(output, sources, -2 * gradient, retain_graph=True)
        last = torch.autograd.grad(output, sources, gradient)
        for one, copy, two, three in zip(first, kept, second, last, strict=True):
            assert torch.equal(one, copy), "a gradient that was handed out has changed"
            close(two, -2 * copy.double(), dtype)
            close(three, copy.double(), dtype)


def gradients_where_they_are_wanted(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    given = weights(tensors["labels"])
    for name, index in (("hidden", 1), ("weight", 2)):
        truth = per_token(REFERENCE, tensors, torch.float64, given)[index]
        for of in (
            lambda inputs: (head.per_token(**inputs) * given).sum(),
            lambda inputs: head.weighted(**inputs, loss_weights=given)[0],
        ):
            inputs = leaves(tensors, dtype, wants=name)
            of(inputs).backward()
            close(inputs[name].grad, truth, dtype)
            assert all(x.grad is None for n, x in inputs.items() if n != name)
    for inputs in (leaves(tensors, dtype, wants=""), leaves(tensors, dtype)):
        with torch.set_grad_enabled(not inputs["hidden"].requires_grad):
            total, losses = head.weighted(**inputs, loss_weights=given)
            single = head.per_token(**inputs)
        assert not (total.requires_grad or losses.requires_grad or single.requires_grad)
        assert torch.equal(losses, single)


def options_are_served_or_refused(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    tensors["labels"][tensors["labels"] == IGNORED] = 7
    given = weights(tensors["labels"])
    for options in (
        {"ignore_index": 7},
        {"label_smoothing": 0.3},
        {"z_loss": 0.02},
        {"softcap": 1.5},
        {"logit_scale": -0.7},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 2.0, "logit_scale": 1.7,
         "ignore_index": 7},
    ):  # fmt: skip
        try:
            found = weighted(head, tensors, dtype, given, by=2.0, **options)
        except LinearCrossEntropyInputError as refusal:
            assert any(name in str(refusal) for name in options), refusal
            with pytest.raises(LinearCrossEntropyInputError):
                head.per_token(**tensors, **options)
            continue
        found += per_token(head, tensors, dtype, given, **options)
        truth = weighted(REFERENCE, tensors, torch.float64, given, by=2.0, **options)
        truth += per_token(REFERENCE, tensors, torch.float64, given, **options)
        for actual, expected in zip(found, truth, strict=True):
            close(actual, expected, dtype)


def nothing_counts(head: Head, device: str, dtype: torch.dtype) -> None:
    tensors = draw(device, dtype)
    tensors["labels"].fill_(IGNORED)
    ones = torch.ones(SEQ, BATCH, device=device)
    for found in (
        per_token(head, tensors, dtype, ones),
        weighted(head, tensors, dtype, ones, by=1.0),
    ):
        assert not any(x.count_nonzero() for x in found)


def a_sure_right_answer(head: Head, device: str, dtype: torch.dtype) -> None:
    """The gradient of a label's logit is its probability less 1: little, and a difference."""
    hidden = torch.full((1, 1, 1), 8.0, device=device, dtype=dtype)
    weight = torch.tensor([[1.0], [0.0], [0.0]], device=device, dtype=dtype)
    tensors = {
        "hidden": hidden,
        "weight": weight,
        "labels": torch.zeros_like(hidden[..., 0]).long(),
    }
    one = torch.ones(1, 1, device=device)
    *_, found = per_token(head, tensors, dtype, one)
    *_, expected = per_token(REFERENCE, tensors, torch.float64, one)
    # The difference is taken in float32; the result and the gradient of the logit are rounded.
    difference = expected.abs().max().item() / 8  # hidden is 8
    bound = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps / difference
    assert ((found.double() - expected).abs().max() / expected.abs().max()).item() <= bound


def labels_of_no_class_are_refused(head: Head, device: str, dtype: torch.dtype) -> None:
    if device != "cpu":
        return  # the device would stop the process
    for label in (-1, VOCAB):
        tensors = draw(device, dtype)
        tensors["labels"][2, 2] = label
        with pytest.raises(LinearCrossEntropyInputError, match=rf"labels \[{label}\] are out"):
            head.per_token(**tensors)
        with pytest.raises(LinearCrossEntropyInputError, match=rf"labels \[{label}\] are out"):
            head.weighted(**tensors, loss_weights=torch.ones(SEQ, BATCH))


CONTRACTS: dict[str, Callable[[Head, str, torch.dtype], None]] = {
    function.__name__: function
    for function in (
        any_gradient_for_every_token,
        a_weight_for_every_token,
        the_two_are_one_loss,
        a_second_backward_pass_gives_the_same,
        gradients_where_they_are_wanted,
        options_are_served_or_refused,
        nothing_counts,
        a_sure_right_answer,
        labels_of_no_class_are_refused,
    )
}
