"""The routed experts of a mixture: a gated MLP for every group of tokens.

Both functions take tokens already sorted by expert:

    x       (t, h)      expert 0's tokens first
    counts  (E,)        integers, tokens of each expert; their sum is t, and some may be 0
    w1      (E, 2f, h)  gate and up projection, stacked
    w2      (E, h, f)   down projection
    probs   (t,)        the router's weight of each token

and return (t, h) in x's dtype. The math is in `reference.py`.
"""

from megacpp_mcore.kernels.moe_experts.grouped_mm import experts_grouped_mm
from megacpp_mcore.kernels.moe_experts.reference import experts, weighted_swiglu

__all__ = ["experts", "experts_grouped_mm", "weighted_swiglu"]
