"""The digests that two runs are compared by see any bit, anywhere."""

import digests
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_changes_a_digest(dtype, monkeypatch):
    monkeypatch.setattr(digests, "_AT_ONCE", 16)  # several parts
    x = torch.randn(5, 7).to(dtype)
    before = digests.digest(x)
    assert digests.digest(x.clone()) == before
    kind = digests._BITS[x.element_size()]
    bits = 8 * x.element_size()
    for place in range(x.numel()):
        for bit in (0, bits - 1):
            wrong = x.clone()
            flipped = -(2 ** (bits - 1)) if bit else 1
            wrong.view(-1).view(kind)[place] ^= flipped
            assert digests.digest(wrong) != before
    assert digests.digest(x.roll(1)) != before


def test_the_first_difference_is_named():
    steps = [
        {"step": n, "gradients": {"a": 1, "b": 2, "c": 3}, "weights": {"a": 4, "b": 5, "c": 6}}
        for n in (1, 2, 3)
    ]
    other = [{**step, "gradients": dict(step["gradients"])} for step in steps]
    assert digests.first_difference(steps, other) is None
    other[2]["weights"] = {"a": 0, "b": 5, "c": 6}
    assert digests.first_difference(steps, other) == "step 3: weights (1 of 3) a"
    other[1]["gradients"] |= {"b": 9, "c": 9}
    assert digests.first_difference(steps, other) == "step 2: gradients (2 of 3) c, b"
