"""An R block between its projections, as one function: from in_proj's output to out_proj's input.

The math is in `reference.py`.
"""

from megacpp_mcore.kernels.m2rnn_core.reference import m2rnn_core

__all__ = ["m2rnn_core"]
