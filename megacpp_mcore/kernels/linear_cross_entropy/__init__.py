"""The output layer and the loss of every token. The math is in `reference.py`."""

from megacpp_mcore.kernels.linear_cross_entropy.reference import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
