"""The router's choice: admission of every backend, and what a map must be."""

import admission
import pytest
import torch

from megacpp_mcore.kernels.router_topk.fused import router_topk

test_admission = admission.suite("router_topk", beyond_dispatch=("triton",))


@pytest.mark.parametrize("bias", [None, torch.tensor([0.0, 0.0, 0.0, -1.0, 0.0])])
def test_of_equal_scores_the_first_experts_are_chosen(bias):
    found = router_topk(torch.zeros(3, 5), bias, 2)
    assert found.routing_map.tolist() == [[True, True, False, False, False]] * 3
    assert found.counts.tolist() == [3, 3, 0, 0, 0]
    torch.testing.assert_close(found.probs, found.routing_map * 0.5)


def test_a_logit_that_is_no_number_shows_in_its_tokens_weights():
    """It is chosen, as torch.topk chooses it, and cannot hide behind the others."""
    logits = torch.randn(4, 6)
    logits[2, 5] = float("nan")
    found = router_topk(logits, torch.randn(6), 2)
    assert found.routing_map.sum(1).tolist() == [2] * 4
    assert found.probs.isnan().any(1).tolist() == [False, False, True, False]
    assert found.balance.isnan()
