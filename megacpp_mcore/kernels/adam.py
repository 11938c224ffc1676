"""Adam over many tensors in one launch: clipping, update, and the rounding of 16-bit weights.

Megatron's step passes three times over a rank's shard: clipping reads and writes every gradient (8
bytes a parameter), Adam reads gradient, parameter and moments and writes the last three (28), and
the 16-bit weight is copied from the float32 parameter (6). Here it is one pass of 30.

Math: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, in Transformer
Engine's order, all of it in float32; g is the gradient times the clipping factor:

    m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g^2
    p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.device_guard import device_of

WEIGHT_DTYPES = (torch.bfloat16, torch.float16)
GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
_KINDS = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None,
}  # fmt: skip
_CHUNK, _BLOCK, _WARPS = 16384, 2048, 4
_ALIGNMENT = 16  # bytes, of a vector load


class AdamInputError(MegacppError):
    """Tensors that the kernel cannot update."""


class Shard(NamedTuple):
    """What belongs to one parameter: contiguous, of one size, on one device. gradient: float32 or
    bf16. weight: the 16-bit copy that the model multiplies with, or None. The others are float32.
    """

    gradient: Tensor
    parameter: Tensor
    moment: Tensor
    square: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class Table:
    """The addresses of every chunk of some shards, (chunks, 6) int64: those of a `Shard`'s tensors
    and the elements of the chunk. They hold as long as `addresses` are those of the shards."""

    chunks: Tensor
    addresses: tuple[int, ...]
    gradient_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    aligned: bool


def addresses(shards: Sequence[Shard]) -> tuple[int, ...]:
    """The addresses by which a `Table` is known to hold still."""
    return tuple(0 if x is None else x.data_ptr() for shard in shards for x in shard)


def table_of(shards: Sequence[Shard]) -> Table:
    """The table of shards whose gradients have one dtype, and their weights one, or none.

    Raises AdamInputError for other dtypes than a `Shard` takes, for sizes that differ and for
    tensors that are not contiguous. Copies the table to the device, and waits for it.
    """
    weights = _one_dtype("weight", [shard.weight for shard in shards], (None, *WEIGHT_DTYPES))
    gradients = _one_dtype("gradient", [shard.gradient for shard in shards], GRADIENT_DTYPES)
    rows = []
    for shard in shards:
        _check(shard)
        sizes = [0 if x is None else x.element_size() for x in shard]
        starts = [0 if x is None else x.data_ptr() for x in shard]
        for first in range(0, shard.parameter.numel(), _CHUNK):
            here = [at + first * size for at, size in zip(starts, sizes, strict=True)]
            rows.append([*here, min(_CHUNK, shard.parameter.numel() - first)])
    chunks = torch.tensor(rows, dtype=torch.int64).reshape(-1, len(Shard._fields) + 1)
    aligned = not bool((chunks[:, :-1] % _ALIGNMENT).any())
    device = shards[0].parameter.device
    return Table(chunks.to(device), addresses(shards), gradients, weights, aligned)


def _one_dtype(name: str, tensors: Sequence[Tensor | None], allowed: tuple) -> torch.dtype | None:
    found = {None if x is None else x.dtype for x in tensors}
    if len(found) != 1 or not found <= set(allowed):
        raise AdamInputError(
            f"{name}s are {', '.join(sorted(map(str, found)))}; those of one launch must have one "
            f"dtype of {', '.join(map(str, allowed))}"
        )
    return found.pop()


def _check(shard: Shard) -> None:
    for name, x in shard._asdict().items():
        if x is None:
            continue
        if x.numel() != shard.parameter.numel() or not x.is_contiguous():
            raise AdamInputError(
                f"{name} is {tuple(x.shape)} with strides {x.stride()}; it must be contiguous, of "
                f"the parameter's {shard.parameter.numel()} elements"
            )
        if name not in ("weight", "gradient") and x.dtype != torch.float32:
            raise AdamInputError(f"{name} is {x.dtype}; it must be torch.float32")


def adam_(
    table: Table, factor: Tensor, *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, step: int,
) -> None:  # fmt: skip
    """Update the parameters, moments and weights of the table in place; the gradients stay.

    factor: one float32 number on the device, by which gradients are multiplied: the clipping
    factor. step: the number of this update, from 1 on. Weight decay is decoupled (AdamW).
    """
    if not len(table.chunks):
        return
    with device_of(table.chunks):
        _adam[(len(table.chunks),)](
            table.chunks, factor, lr, betas[0], betas[1], 1 - betas[0], 1 - betas[1],
            1 - betas[0] ** step, 1 - betas[1] ** step, eps, weight_decay,
            GRADIENT=_KINDS[table.gradient_dtype], WEIGHT=_KINDS[table.weight_dtype],
            ALIGNED=table.aligned, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _at(chunk, place: tl.constexpr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of the chunk's row."""
    pointer = tl.load(chunk + place).to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adam(
    chunks, factor, lr, beta1, beta2, rest1, rest2, correction1, correction2, eps, weight_decay,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk a program. GRADIENT, WEIGHT: dtypes; no WEIGHT is None."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 6
    gradient = _at(chunk, 0, GRADIENT, ALIGNED)
    parameter = _at(chunk, 1, tl.float32, ALIGNED)
    moment = _at(chunk, 2, tl.float32, ALIGNED)
    square = _at(chunk, 3, tl.float32, ALIGNED)
    weight = parameter if WEIGHT is None else _at(chunk, 4, WEIGHT, ALIGNED)
    size, by = tl.load(chunk + 5), tl.load(factor)
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        if size == CHUNK:  # a mask of unknown length would make vector loads single ones
            _update(
                gradient, parameter, moment, square, weight, at, at < CHUNK, by, lr, beta1, beta2,
                rest1, rest2, correction1, correction2, eps, weight_decay, WEIGHT,
            )  # fmt: skip
        else:
            _update(
                gradient, parameter, moment, square, weight, at, at < size, by, lr, beta1, beta2,
                rest1, rest2, correction1, correction2, eps, weight_decay, WEIGHT,
            )  # fmt: skip


@triton.jit
def _update(
    gradient, parameter, moment, square, weight, at, inside, by, lr, beta1, beta2, rest1, rest2,
    correction1, correction2, eps, weight_decay, WEIGHT: tl.constexpr,
):  # fmt: skip
    """The elements `at` of one chunk."""
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * by
    m = beta1 * tl.load(moment + at, mask=inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(square + at, mask=inside, other=0.0) + rest2 * g * g
    p = tl.load(parameter + at, mask=inside, other=0.0)
    update = (m / correction1) / (tl.sqrt(v / correction2) + eps) + weight_decay * p
    p -= lr * update
    tl.store(moment + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(parameter + at, p, mask=inside)
    if WEIGHT is not None:
        tl.store(weight + at, p.to(WEIGHT), mask=inside)
