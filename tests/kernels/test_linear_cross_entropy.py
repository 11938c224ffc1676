"""Linear and cross entropy: admission, torch's own loss, extreme logits, labels that are none."""

import admission
import pytest
import torch
from torch.nn import functional

from megacpp_mcore.kernels.linear_cross_entropy import (
    LinearCrossEntropyInputError,
    linear_cross_entropy,
)

test_admission = admission.suite("linear_cross_entropy", beyond_dispatch=("megatron",))


def test_it_is_torchs_cross_entropy_of_the_logits():
    hidden, weight = torch.randn(7, 3, 8).double(), torch.randn(11, 8).double()
    labels = torch.randint(11, (7, 3))
    losses = linear_cross_entropy(hidden, weight, labels)
    logits = hidden @ weight.t()
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    # Two sums of 11 exponentials of at most e^30, in another order.
    torch.testing.assert_close(losses.flatten(), expected, rtol=0, atol=30 * 11 * 2**-52)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    hidden = torch.tensor([[[1e4, -1e4]]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    losses = [linear_cross_entropy(hidden, weight, torch.tensor([[i]])).item() for i in range(3)]
    assert losses == pytest.approx([0.6931472, 2e4 + 0.6931472, 0.6931472])


@pytest.mark.parametrize("label", [-1, 5, -100])
def test_a_label_outside_the_vocabulary_is_refused(label):
    labels = torch.tensor([[label, 0]])
    with pytest.raises(LinearCrossEntropyInputError, match=rf"labels \[{label}\] are out of range"):
        linear_cross_entropy(torch.ones(1, 2, 2), torch.ones(5, 2), labels, ignore_index=-7)
