"""The output layer and the cross entropy of every token, in one operator.

`linear_cross_entropy` returns the loss of every token; `weighted_linear_cross_entropy` their
weighted sum, at less cost. Both are plain torch here. The backends of the surface
`linear_cross_entropy` load as a `Head`, which has the same two functions; `head.py` describes them.
The math is in `reference.py`.
"""

from megacpp_mcore.kernels.linear_cross_entropy import reference
from megacpp_mcore.kernels.linear_cross_entropy.head import Head, head_of
from megacpp_mcore.kernels.linear_cross_entropy.inputs import LinearCrossEntropyInputError

__all__ = [
    "REFERENCE",
    "Head",
    "LinearCrossEntropyInputError",
    "linear_cross_entropy",
    "weighted_linear_cross_entropy",
]

REFERENCE = head_of(reference.per_token)
linear_cross_entropy, weighted_linear_cross_entropy = REFERENCE.per_token, REFERENCE.weighted
