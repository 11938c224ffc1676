"""What the kernels need of a tensor's strides, and how they are told them."""

from math import gcd

from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """x itself when its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def align(*rows: Tensor) -> int:
    """The largest power of two up to 16 that divides every stride but the last of each."""
    return gcd(16, *(stride for x in rows for stride in x.stride()[:-1]))


def strides(align: int, *rows: Tensor) -> tuple[int, ...]:
    """Strides of s and b of each (s, b, columns), divided by `align`."""
    return tuple(stride // align for x in rows for stride in x.stride()[:2])
