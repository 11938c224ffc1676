"""M2RNN: a recurrent network whose state is a matrix.

`m2rnn` runs over whole sequences and is differentiable in every tensor; `m2rnn_step` takes one
token. The math is in `reference.py`.
"""

from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.m2rnn.chunked import m2rnn_chunked
from megacpp_mcore.kernels.m2rnn.reference import m2rnn_step

__all__ = ["M2RNNInputError", "check_inputs", "m2rnn", "m2rnn_step"]

TANH = ("approximate", "exact")


class M2RNNInputError(MegacppError):
    """Arguments of an M2RNN that do not fit together."""


def m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 32,
    grad_clamp: float | None = None,
    tanh: str = "approximate",
) -> tuple[Tensor, Tensor]:
    """M2RNN over sequences; differentiable in every tensor, the states included.

    B batch, S tokens, H heads, K rows and V columns of a head's state.

    q: (B, S, Hq, K) and k: (B, S, Hk, K), Hq and Hk each 1 (one head shared by all) or H.
    v: (B, S, H, V). W: (H, V, V). f: (B, S, H), the forget gate, in [0, 1].
    initial_state: (B, H, K, V), the state before the first token; None is zeros.
    cu_seqlens: (D + 1,) non-decreasing integers from 0 to S, the bounds of D documents packed into
    one row (B = 1), each with a state of its own: initial and final state are (D, H, K, V).
    chunk_size: steps between the states saved for the backward pass. It changes memory and time,
    and which backends serve: the CUDA kernels take 16 and 32, with float32 also 48 and 64.
    grad_clamp: limit on every element of the state's gradient at every step of the backward pass,
    as in XMA (where it is 1 by default); None, the default here, is the true gradient.
    tanh: "approximate" allows a backend to use the GPU's tanh instruction in the forward pass for
    16-bit q, k and v. Its error on Hopper is 2^-16 (tested; PTX promises 2^-11). "exact" does not
    allow it. This function's tanh is always exact.

    Returns y (B, S, H, V) in v's dtype and the final state (B, H, K, V). The computation and the
    states are in float32, or float64 when v is float64; gradients have the dtypes of their tensors.
    Raises M2RNNInputError (a MegacppError) for arguments that do not fit together.
    """
    check_inputs(q, k, v, W, f, initial_state, cu_seqlens, chunk_size, grad_clamp, tanh)
    return m2rnn_chunked(
        q, k, v, W, f,
        initial_state=initial_state, cu_seqlens=cu_seqlens,
        chunk_size=chunk_size, grad_clamp=grad_clamp,
    )  # fmt: skip


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, chunk_size: int, grad_clamp: float | None, tanh: str,
) -> None:  # fmt: skip
    """Raise M2RNNInputError unless the arguments of `m2rnn` fit together."""
    if v.dim() != 4 or q.dim() != 4 or 0 in v.shape:
        raise M2RNNInputError(
            f"q is {_shape(q)} and v is {_shape(v)}; they must be (B, S, Hq, K) and (B, S, H, V), "
            "with at least one of each"
        )
    batch, seq, heads, v_dim = v.shape
    k_dim = q.shape[-1]
    for name, x in (("q", q), ("k", k)):
        allowed = [(batch, seq, h, k_dim) for h in (1, heads)]
        if tuple(x.shape) not in allowed:
            raise M2RNNInputError(
                f"{name} is {_shape(x)}; with v {_shape(v)} and K = {k_dim} it must be "
                f"{allowed[0]} or {allowed[1]}"
            )
    documents = batch if cu_seqlens is None else _check_documents(cu_seqlens, batch, seq)
    expected = {"W": (W, (heads, v_dim, v_dim)), "f": (f, (batch, seq, heads))}
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (documents, heads, k_dim, v_dim))
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise M2RNNInputError(f"{name} is {_shape(x)}; with v {_shape(v)} it must be {shape}")
    if chunk_size < 1:
        raise M2RNNInputError(f"chunk_size is {chunk_size}; it must be at least 1")
    if grad_clamp is not None and not grad_clamp > 0:
        raise M2RNNInputError(f"grad_clamp is {grad_clamp}; it must be positive, or None for none")
    if tanh not in TANH:
        raise M2RNNInputError(f"tanh is {tanh!r}; it must be {' or '.join(map(repr, TANH))}")


def _check_documents(cu_seqlens: Tensor, batch: int, seq: int) -> int:
    """The number of documents, or M2RNNInputError."""
    if batch != 1:
        raise M2RNNInputError(
            f"cu_seqlens is given with batch {batch}; packed documents lie in one row, batch 1"
        )
    integers = not (cu_seqlens.is_floating_point() or cu_seqlens.is_complex())
    fits = cu_seqlens.dim() == 1 and integers and len(cu_seqlens) > 1
    # On a GPU the values are not checked, as reading them would stall its queue.
    if fits and cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        fits = bounds[0] == 0 and bounds[-1] == seq and sorted(bounds) == bounds
    if not fits:
        raise M2RNNInputError(
            f"cu_seqlens is {cu_seqlens.tolist()}; it must be one row of integers that starts at "
            f"0, never falls and ends at the number of tokens, {seq}"
        )
    return len(cu_seqlens) - 1


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
