"""An M block between its projections, as one function: from in_proj's output to out_proj's input.

The math is in `reference.py`.
"""

from megacpp_mcore.kernels.mamba3_core.reference import mamba3_core

__all__ = ["mamba3_core"]
