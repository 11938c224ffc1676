"""Wrong results as kernels give them: what every gate must refuse."""

from collections.abc import Iterator

import torch
from torch import Tensor


def halves_swapped(x, other, axis):
    first, second = x.tensor_split(2, axis)
    return torch.cat([second, first], axis)


def tile_zeroed(x, other, axis):
    """A quarter of an axis, of half of the next."""
    x = x.clone()
    tile = x.narrow(axis, x.shape[axis] // 4, -(-x.shape[axis] // 4))
    if x.dim() > 1:
        next_axis = (axis + 1) % x.dim()
        tile = tile.narrow(next_axis, 0, -(-x.shape[next_axis] // 2))
    tile.zero_()
    return x


def one_is_anothers(x, other, axis):
    """One head, an eighth into the axis, has the values of the one after it; of an axis longer than
    any of heads (tokens, vocabulary rows) a 128th of it, which a tile of a kernel covers. Of a
    tensor of few values, two of which may be nearly equal, the one that differs most from the next.
    """
    x, size = x.clone(), x.shape[axis]
    width = -(-size // 128)
    head = min(size // 8, size - 2 * width)
    if x.numel() < 64:
        others = [other for other in range(x.dim()) if other != axis]
        steps = x.double().diff(dim=axis).square()
        head = int((steps.sum(others) if others else steps).argmax())
    x.narrow(axis, head, width).copy_(x.narrow(axis, head + width, width).clone())
    return x


MUTATIONS = {
    "sign": lambda x, other, axis: -x,
    "scale": lambda x, other, axis: x * 1.05,
    "zeroed tile": tile_zeroed,
    "swapped halves": halves_swapped,
    "stale buffer": lambda x, other, axis: other,
    "one wrong head": one_is_anothers,
    "shifted token": lambda x, other, axis: x.roll(1, axis),
}
WHOLE = ("sign", "scale", "stale buffer")


def mutated(value: Tensor, other: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What was done to `value` and along which axis, and the result; where it changed anything.

    other: the same of other inputs.
    """
    for kind, mutate in MUTATIONS.items():
        for axis in range(1 if kind in WHOLE else value.dim()):
            if kind in WHOLE or value.shape[axis] > 1:
                wrong = mutate(value, other, axis)
                if not torch.equal(wrong, value):
                    yield f"{kind}, axis {axis}", wrong
