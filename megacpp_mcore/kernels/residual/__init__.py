"""Adds a block's output to the residual stream. The math is in `reference.py`."""

from megacpp_mcore.kernels.residual.reference import bias_dropout_add

__all__ = ["bias_dropout_add"]
