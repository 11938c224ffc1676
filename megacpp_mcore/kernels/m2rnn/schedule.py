"""How the CUDA kernels of M2RNN spread a call over the GPU's multiprocessors."""

import functools

import torch
from torch import Tensor

V_HEAD_DIM = 16
ROWS = 32  # rows of a state in a block; K is a multiple of it
BUNDLE = 3  # heads that a block of the forward kernel may have, if they share q and k
SEGMENTS = 8  # parts into which the backward kernel cuts a chain

# Cycles of a step on an H200, by (blocks on a multiprocessor, heads of a block).
_STEP_CYCLES = {(1, 1): 135, (2, 1): 166, (1, BUNDLE): 203}


class Sizes:
    """The sizes of a call, from its tensors' shapes, and its schedule (slots, bundle, segments)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, chunk_size: int,
        grad_clamp: float | None = None, exact_tanh: bool = False,
    ) -> None:  # fmt: skip
        self.batch, self.tokens, self.heads, _ = v.shape
        self.q_heads, self.k_heads, self.k_dim = q.shape[2], k.shape[2], q.shape[3]
        self.chunk = chunk_size
        self.row_blocks = self.k_dim // ROWS  # blocks that share a head's rows
        self.clamp = 0.0 if grad_clamp is None else grad_clamp
        self.exact_tanh = exact_tanh
        if bounds is None:
            self.chains = self.batch
            self.chunks = self.batch * -(-self.tokens // chunk_size)
        else:
            self.chains = bounds.numel() - 1
            # A bound that needs no synchronisation: a document has at most one partial chunk.
            self.chunks = self.tokens // chunk_size + self.chains
        self.slots, self.bundle = self.bundles(1), 1
        self.segments = 1

    def bundles(self, heads: int) -> int:
        """How many bundles of `heads` neighbouring heads; a document's last may be smaller."""
        return self.chains * -(-self.heads // heads)

    def state(self, count: int) -> tuple[int, int, int, int]:
        """The shape of `count` states of all heads."""
        return count, self.heads, self.k_dim, V_HEAD_DIM

    def parts(self, like: Tensor, *width: int, rows: int = ROWS) -> Tensor:
        """An empty tensor for the partial results of every `rows` rows of a state."""
        shape = self.k_dim // rows, self.batch, self.tokens, self.heads, *width
        return like.new_empty(shape)

    def key_parts(self, gradient: Tensor) -> Tensor:
        """Room for each head's part of dq or dk: the gradient itself where heads share nothing."""
        if gradient.shape[2] == self.heads:
            return gradient
        return gradient.new_empty(self.batch, self.tokens, self.heads, self.k_dim)


def forward_schedule(sizes: Sizes, multiprocessors: int) -> tuple[int, int]:
    """(bundles computed at a time, heads of a bundle) of the forward kernel; a bundle takes
    `row_blocks` blocks.

    More blocks on a multiprocessor make a step slower; fewer need more rounds.
    """
    shared = sizes.q_heads == sizes.k_heads == 1

    def cycles(config: tuple[int, int]) -> float:
        blocks, heads = config
        rounds = sizes.bundles(heads) * sizes.row_blocks / (blocks * multiprocessors)
        return max(1, rounds) * _STEP_CYCLES[config]

    configs = [config for config in _STEP_CYCLES if shared or config[1] == 1]
    blocks, heads = min(configs, key=cycles)
    return max(1, min(sizes.bundles(heads), blocks * multiprocessors // sizes.row_blocks)), heads


def backward_segments(sizes: Sizes, multiprocessors: int) -> int:
    """Parts into which the backward kernel cuts a chain.

    A chain continues on whichever multiprocessor is free, so that all are equally busy. Where every
    block has a multiprocessor of its own there is nothing to gain.
    """
    blocks = sizes.chains * sizes.heads * sizes.row_blocks
    return 1 if blocks <= multiprocessors else SEGMENTS


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
