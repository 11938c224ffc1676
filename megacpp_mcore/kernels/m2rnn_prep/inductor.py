"""`megacpp_mcore.kernels.m2rnn_prep` under torch.compile."""

from collections.abc import Callable

from torch import Tensor

from megacpp_mcore.kernels.inductor import compiled
from megacpp_mcore.kernels.m2rnn_prep import M2RNNPrep, reference

_whole = compiled(reference.gated_norm)
_gated = compiled(reference.gated)
_normed = compiled(reference.normed)


def _gated_norm(
    y: Tensor, v: Tensor, gate: Tensor, D: Tensor, weight: Tensor, *, channels: int, eps: float,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """With a collective, which no graph contains, in between: two graphs."""
    if over_ranks is None:
        return _whole(y, v, gate, D, weight, channels=channels, eps=eps)
    x, squares = _gated(y, v, gate, D)
    return _normed(x, over_ranks(squares), weight, gate.dtype, channels=channels, eps=eps)


INDUCTOR = M2RNNPrep(compiled(reference.conv_and_decay), _gated_norm)
