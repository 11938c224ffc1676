"""The embedding with a gradient that is added straight into main_grad, in Triton.

Forward it is one gather by torch, which writes [s, b, h] at once. Backward the tokens are sorted by
their ids, so that those of one id are a run of neighbours. A program adds up the runs in a block of
sorted tokens, one after another. A run that lies wholly inside the block is added to the gradient
there; what a block has of a run that crosses its border goes to a workspace, and a second kernel
adds such a run's parts up. Each row of the gradient is written by one program, sums are float32 and
always in one order: the same bits every time, without atomics, and without the host waiting.

Only rows of ids that occur are touched. Without a main_grad they are those of a gradient of zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.main_grad import handed_on, takes_gradients

DTYPES = (torch.bfloat16, torch.float32)
# Sorted tokens of a program, its columns and warps: a lane has 16 bytes of a bf16 row.
_TOKENS, _COLUMNS, _WARPS = 32, 512, 2
# The same of the kernel for crossing runs: few programs have work, so they are narrow.
_PARTS, _PART_COLUMNS, _PART_WARPS = 16, 128, 4


class EmbeddingInputError(MegacppError):
    """A weight or ids that the kernels do not support."""


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """As `megacpp_mcore.kernels.embedding.embedding`: weight (V, h) in bf16 or float32, ids (b, s)
    int64 -> (s, b, h).

    Where the weight has a main_grad, its gradient is added to that in the backward pass, by the
    contract of `kernels.main_grad`; else it is a tensor like the weight.

    Raises EmbeddingInputError for another dtype or number of dimensions, or two devices; IndexError
    for an id out of range, which on a GPU stops the process by a device assertion instead.
    """
    if weight.dtype not in DTYPES or ids.dtype != torch.int64:
        raise EmbeddingInputError(
            f"the weight is {weight.dtype} and the ids are {ids.dtype}; the weight must be one of "
            f"{', '.join(map(str, DTYPES))} and the ids torch.int64: convert them, or use the "
            "backend 'reference'"
        )
    if weight.dim() != 2 or ids.dim() != 2 or weight.device != ids.device:
        raise EmbeddingInputError(
            f"the weight is {tuple(weight.shape)} on {weight.device} and the ids are "
            f"{tuple(ids.shape)} on {ids.device}; they must be (V, h) and (b, s) on one device"
        )
    return _gather(weight, ids)


@torch.library.custom_op("megacpp::embedding", mutates_args=())
def _gather(weight: Tensor, ids: Tensor) -> Tensor:
    return torch.embedding(weight, ids.t())


@_gather.register_fake
def _(weight, ids):
    return weight.new_empty(ids.shape[1], ids.shape[0], weight.shape[1])


@torch.library.custom_op("megacpp::embedding_backward", mutates_args=())
def _gradient(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The gradient of a weight of so many rows, in dy's dtype, rounded once."""
    found = dy.new_zeros(rows, dy.shape[-1])
    _add(found, dy, ids)
    return found


@_gradient.register_fake
def _(dy, ids, rows):
    return dy.new_empty(rows, dy.shape[-1])


@torch.library.custom_op("megacpp::embedding_add_gradient_", mutates_args=("total",))
def _add_gradient(total: Tensor, dy: Tensor, ids: Tensor) -> None:
    """total (V, h) += the gradient."""
    _add(total, dy, ids)


@_add_gradient.register_fake
def _(total, dy, ids):
    pass


def _save(ctx, inputs, output) -> None:
    weight, ids = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.weight = weight.shape[0], weight if takes_gradients(weight) else None


def _gradients(ctx, dy):
    (ids,) = ctx.saved_tensors
    if ctx.weight is None:
        return _gradient(dy, ids, ctx.rows), None
    _add_gradient(ctx.weight.main_grad, dy, ids)
    return handed_on(ctx.weight), None


_gather.register_autograd(_gradients, setup_context=_save)


def _add(total: Tensor, dy: Tensor, ids: Tensor) -> None:
    """total (V, h), contiguous and of any floating dtype, += sums of dy (s, b, h) by ids (b, s)."""
    tokens, hidden = ids.numel(), dy.shape[-1]
    if not tokens or not hidden:
        return
    dy = dy.contiguous()
    # As int32, which is sorted in half the time, and in the order of dy's rows.
    flat = torch.empty(ids.shape[::-1], dtype=torch.int32, device=ids.device).copy_(ids.t())
    runs, order = flat.view(-1).sort(stable=True)
    blocks = triton.cdiv(tokens, _TOKENS)
    parts = torch.empty(blocks, 2, hidden, dtype=torch.float32, device=dy.device)
    with device_of(dy):
        _embedding_add_runs[(blocks, triton.cdiv(hidden, _COLUMNS))](
            runs, order, dy, total, parts, tokens, hidden,
            TOKENS=_TOKENS, COLUMNS=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
        if blocks > 1:
            _embedding_add_crossing_runs[(blocks - 1, triton.cdiv(hidden, _PART_COLUMNS))](
                runs, total, parts, tokens, hidden,
                TOKENS=_TOKENS, PARTS=_PARTS, COLUMNS=_PART_COLUMNS, num_warps=_PART_WARPS,
            )  # fmt: skip


@triton.jit
def _embedding_add_runs(
    runs, order, dy, total, parts, tokens, hidden, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    """runs: the sorted ids. order: where each token lies in dy. parts: (blocks, 2, hidden), of a
    block's run that began before it, and of its run that goes on behind it; only those that are.
    """
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    start = block * TOKENS
    stop = tl.minimum(start + TOKENS, tokens)
    before = tl.load(runs + start - 1, mask=start > 0, other=-1)
    after = tl.load(runs + stop, mask=stop < tokens, other=-1)
    first = tl.load(runs + start)
    parts += block.to(tl.int64) * 2 * hidden + columns
    run = first
    row = dy + tl.load(order + start) * hidden + columns
    value = tl.load(row, mask=inside, other=0.0)
    found = tl.zeros([COLUMNS], tl.float32)
    for token in range(start, stop):
        # The next token's row is on its way while this one's run ends and waits for its total.
        more = token + 1 < stop
        next_run = tl.load(runs + token + 1, mask=more, other=-1)
        row = dy + tl.load(order + token + 1, mask=more, other=0) * hidden + columns
        next_value = tl.load(row, mask=inside & more, other=0.0)
        found += value.to(tl.float32)
        if next_run != run:
            if (run == first) & (run == before):
                tl.store(parts, found, mask=inside)
            elif (token + 1 == stop) & (run == after):
                tl.store(parts + hidden, found, mask=inside)
            else:
                _add_to_row(total, run, found, columns, inside, hidden)
        found = tl.where(next_run != run, 0.0, found)
        run, value = next_run, next_value


@triton.jit
def _add_to_row(total, row, found, columns, inside, hidden):
    at = total + row.to(tl.int64) * hidden + columns
    found += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, found.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _embedding_add_crossing_runs(
    runs, total, parts, tokens, hidden,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has the run that begins in its block and goes on behind it, where there is one."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    start, behind = block * TOKENS, (block + 1) * TOKENS  # every block but the last is full
    before = tl.load(runs + start - 1, mask=start > 0, other=-1)
    first = tl.load(runs + start)
    run = tl.load(runs + behind - 1)
    after = tl.load(runs + behind)
    if (run == after) & ((run != first) | (run != before)):
        found = tl.load(parts + (block.to(tl.int64) * 2 + 1) * hidden + columns, mask=inside)
        others = block + 1 + tl.arange(0, PARTS)
        goes_on = run == after
        while goes_on:
            own = tl.load(runs + others * TOKENS, mask=others * TOKENS < tokens, other=-1) == run
            at = parts + others.to(tl.int64)[:, None] * 2 * hidden + columns[None, :]
            tile = tl.load(at, mask=own[:, None] & inside[None, :], other=0.0)
            found += tl.sum(tile, 0)
            others += PARTS
            goes_on = tl.sum(own.to(tl.int32), 0) == PARTS
        _add_to_row(total, run, found, columns, inside, hidden)
