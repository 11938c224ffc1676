"""Before and after an R block's recurrence: convolution, decay, gated norm. Math: `reference.py`.

A backend is an M2RNNPrep, whose two functions have the signatures of the reference's.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megacpp_mcore.kernels.m2rnn_prep import reference


class M2RNNPrep(NamedTuple):
    """One backend: `reference.conv_and_decay` and `reference.gated_norm`."""

    conv_and_decay: Callable[..., tuple[Tensor, Tensor]]
    gated_norm: Callable[..., Tensor]


REFERENCE = M2RNNPrep(reference.conv_and_decay, reference.gated_norm)
