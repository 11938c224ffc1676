"""How far results may be from float64's."""

import torch


def near(found, expected, dtype=torch.bfloat16, terms=4096):
    """One rounding to the dtype, and float32 sums; of the norm, as values may cancel."""
    bound = torch.finfo(dtype).eps / 2 + terms**0.5 * torch.finfo(torch.float32).eps
    off = distance(found, expected)
    assert off <= bound, f"{off:.2e} > {bound:.2e}"


def distance(found, expected) -> float:
    """Of two tensors, relative to the second's norm."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
