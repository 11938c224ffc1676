"""The loop over chunks of tokens: logits, softmax, and the products that give the gradients."""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megacpp_mcore.kernels.linear_cross_entropy.cublaslt import TILE_176X128, product
from megacpp_mcore.kernels.linear_cross_entropy.inputs import Options, check_labels, rank_of
from megacpp_mcore.kernels.linear_cross_entropy.reference import smoothing_of
from megacpp_mcore.kernels.linear_cross_entropy.triton import (
    ELSEWHERE,
    NOT_COUNTED,
    STATISTICS,
    softmax_rows,
    transposed,
)
from megacpp_mcore.kernels.linear_cross_entropy.weight_gradient import WeightGradient

# Logits of a chunk: the target, and the limit. A chunk reads and writes the weight's gradient in
# float32 once, so chunks of fewer than TOKENS tokens are slow; 2^27 logits in bf16 are 256 MiB.
LOGITS, MAX_LOGITS = 2**27, 2**28
TOKENS, ALIGNMENT = 2048, 128


def chunk_length(tokens: int, classes: int) -> int:
    """Tokens of a chunk; the chunks of a call have nearly the same length."""
    most = min(max(TOKENS, LOGITS // classes), max(ALIGNMENT, MAX_LOGITS // classes))
    tokens = max(1, tokens)
    chunks = -(-tokens // most)
    length = -(-tokens // chunks)
    return min(most, -(-length // ALIGNMENT) * ALIGNMENT)


class ChunkLoop:
    """The chunks of one call.

    hidden: (T, h). weight: (V_local, h). labels: (T,). group_name: the process group over which the
    vocabulary is split, empty for none. statistics: (4, T) float32, those of `softmax_rows` over
    the whole vocabulary, after `make_statistics` or `gradients` without lse.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, group_name: str
    ) -> None:
        self.hidden, self.weight, self.options = hidden.contiguous(), weight.contiguous(), options
        self.group = _resolve_process_group(group_name) if group_name else None
        self.rank, ranks = rank_of(self.group)
        self.vocab_size = weight.shape[0] * ranks
        self.given_labels = labels
        self.statistics = hidden.new_empty(STATISTICS, hidden.shape[0], dtype=torch.float32)
        self.length = chunk_length(hidden.shape[0], weight.shape[0])
        self._side = SideStream(hidden.device)
        self._side.follow()
        self._losses: tuple[Tensor, Tensor] | None = None

    def losses(self) -> tuple[Tensor, Tensor]:
        """The losses and lse, (T,) each, from the statistics."""
        if not self.hidden.shape[0]:
            return self.statistics[0], self.statistics[0].clone()
        return self._losses or self._losses_of_statistics()

    def _losses_of_statistics(self) -> tuple[Tensor, Tensor]:
        largest, exponentials, picked, total = self.statistics
        logarithm = exponentials.log()
        lse = largest + logarithm
        smoothing = smoothing_of(self.options, self.vocab_size)
        losses = logarithm + (1 - smoothing) * (largest - picked)
        if smoothing:
            losses = losses + smoothing * (largest - total / self.vocab_size)
        if self.options.z_loss:
            losses = losses + self.options.z_loss * lse**2
        return losses.masked_fill(self.labels == NOT_COUNTED, 0.0), lse

    def make_statistics(self) -> None:
        """Fill `statistics`, without any gradient."""
        for chunk, buffer in self._chunks():
            logits = self._logits(chunk, buffer)
            self._side.join()
            self._softmax(logits, chunk, statistics=self.statistics[:, chunk])
        self.statistics = self._over_ranks(self.statistics)

    def gradients(
        self, loss_gradients: Tensor, lse: Tensor | None, wants_hidden: bool, wants_weight: bool,
        wide: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of sum(loss_gradients * losses) in hidden and weight; empty if not wanted.

        lse: (T,) of an earlier loop; without it this one fills the statistics. wide: the weight's
        is the float32 sum, not rounded to the weight's dtype.
        """
        hidden, weight, side = self.hidden, self.weight, self._side
        tokens = hidden.shape[0]
        d_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
        total = WeightGradient(weight, -(-tokens // self.length), wide) if wants_weight else None
        d_weight = weight.new_empty(0)
        if wants_weight and not tokens:
            d_weight = total.result()
        for chunk, buffer in self._chunks():
            is_last = chunk.stop == tokens
            logits = self._logits(chunk, buffer)
            with side:
                hidden_t = self._transposed(chunk, d_hidden, is_last) if wants_weight else None
            side.join()
            self._differentiate(logits, chunk, loss_gradients[chunk], lse)
            if wants_weight and is_last:
                total.add(logits, hidden_t)
            side.follow()
            # The tiles of this product rarely fill the GPU evenly. The multiprocessors it leaves
            # idle run the other product, or after the last chunk the rounding of its sum.
            if wants_hidden:
                torch.mm(logits, weight, out=d_hidden[chunk])
            with side:
                if wants_weight and is_last:
                    d_weight = total.result()
                elif wants_weight:
                    total.add(logits, hidden_t)
                if lse is None and is_last:
                    self._losses = self._losses_of_statistics()
            side.join()
        return d_hidden, d_weight

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The slice of tokens of every chunk, and the buffer for its logits, shared by all."""
        tokens = self.hidden.shape[0]
        buffer = self.hidden.new_empty(min(self.length, tokens), self.weight.shape[0])
        for start in range(0, tokens, self.length):
            stop = min(start + self.length, tokens)
            yield slice(start, stop), buffer[: stop - start]

    def _logits(self, chunk: slice, buffer: Tensor) -> Tensor:
        """The chunk's logits. While the first ones are computed, the labels are checked; that is
        queued after them, as all streams share a queue with CUDA_DEVICE_MAX_CONNECTIONS=1."""
        rows, columns = self.hidden[chunk], self.weight.t()
        if not product(buffer, rows, columns, TILE_176X128):
            torch.mm(rows, columns, out=buffer)
        if chunk.start == 0:
            with self._side:
                self.labels = self._labels()
        return buffer

    def _labels(self) -> Tensor:
        """The labels of all tokens as `softmax_rows` takes them."""
        own, ignored = self.weight.shape[0], self.options.ignore_index
        check_labels(self.given_labels, self.vocab_size, ignored)
        labels = self.given_labels - self.rank * own
        labels = labels.masked_fill((labels < 0) | (labels >= own), ELSEWHERE)
        return labels.masked_fill(self.given_labels == ignored, NOT_COUNTED)

    def _differentiate(
        self, logits: Tensor, chunk: slice, loss_gradients: Tensor, lse: Tensor | None
    ) -> None:
        """Replace a chunk's logits by their gradient; without lse, fill its statistics, too."""
        if lse is not None:
            lse = lse[chunk]
        else:
            statistics = self.statistics[:, chunk]
            if self.group is None:
                self._softmax(logits, chunk, statistics=statistics, loss_gradients=loss_gradients)
                return
            self._softmax(logits, chunk, statistics=statistics)
            largest, exponentials, *_ = statistics.copy_(self._over_ranks(statistics))
            lse = largest + exponentials.log()
        self._softmax(logits, chunk, loss_gradients=loss_gradients, lse=lse)

    def _softmax(self, logits: Tensor, chunk: slice, **wanted: Tensor) -> None:
        softmax_rows(logits, self.labels[chunk], self.options, self.vocab_size, **wanted)

    def _over_ranks(self, own: Tensor) -> Tensor:
        """The statistics of the whole vocabulary from those of each rank; the same bits on all."""
        if self.group is None:
            return own
        everyones = own.new_empty(self.group.size(), *own.shape)
        dist.all_gather_into_tensor(everyones.flatten(0, 1), own.contiguous(), group=self.group)
        largest, exponentials, picked, total = everyones.unbind(1)
        whole = largest.amax(0)
        exponentials = (exponentials * (largest - whole).exp()).sum(0)
        return torch.stack([whole, exponentials, picked.sum(0), total.sum(0)])

    def _transposed(self, chunk: slice, d_hidden: Tensor, is_last: bool) -> Tensor:
        """The chunk of hidden as (h, tokens): a contiguous copy if d_hidden has room, else a view.

        The room is rows of d_hidden that are written later: those of the next chunks, or for the
        last chunk its own. cuBLAS's product is a twelfth faster on the copy.
        """
        rows = self.hidden[chunk]
        room = d_hidden[chunk if is_last else slice(chunk.stop, None)].view(-1)[: rows.numel()]
        if room.numel() < rows.numel():
            return rows.t()
        return transposed(rows, room.view(rows.shape[1], rows.shape[0]))


class SideStream:
    """A second CUDA stream next to the current one; on a CPU it does nothing.

    As a context manager: work queued inside runs on it. Call `follow` before queueing anything, so
    that memory allocated on it for an earlier call is no longer in use when it is reused.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._stream = _stream(self._main) if device.type == "cuda" else None
        self._entered = torch.cuda.stream(self._stream)  # a no-op for None

    def __enter__(self) -> None:
        self._entered.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._entered.__exit__(*exception)

    def follow(self) -> None:
        """Let later work on this stream wait for what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(self._main)

    def join(self) -> None:
        """Let later work on the current stream wait for what is queued on this stream."""
        if self._stream is not None:
            self._main.wait_stream(self._stream)


@functools.cache
def _stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(main.device)
