"""M2RNN in plain torch, in chunks: the values of `reference.py`, from one operator each way.

Inside, a state is stored as (H, V, B, K). One step is then a product of W^T with all rows of the
batch at once, (H, V, V) @ (H, V, B * K), and elementwise operations run over long contiguous rows.
Tensors of a chunk of C steps broadcast against (C, H, V, B, K).
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megacpp_mcore.kernels.m2rnn.reference import over_documents


def m2rnn_chunked(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, *, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, chunk_size: int = 64, grad_clamp: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same values as `m2rnn_sequential`, from one opaque operator each way.

    Saved for the backward pass: the inputs, and the state before every chunk_size-th step. The
    backward pass recomputes one chunk at a time, from the last to the first.
    """

    def recurrence(q, k, v, W, f, h):
        y, final_state, _ = _forward(q, k, v, W, f, h, chunk_size, grad_clamp)
        return y, final_state

    return over_documents(recurrence, q, k, v, W, f, initial_state, cu_seqlens)


@torch.library.custom_op("megacpp::m2rnn_chunked", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, h: Tensor, chunk_size: int,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the final state, and the state before each chunk (chunks, H, V, B, K)."""
    starts = range(0, v.shape[1], chunk_size)
    y = v.new_empty(v.shape)
    state = h.permute(_STATE_IN)
    checkpoints = state.new_empty(len(starts), *state.shape)
    weight = W.to(h.dtype).transpose(-1, -2)
    for checkpoint, start in zip(checkpoints, starts, strict=True):
        checkpoint.copy_(state)
        steps = slice(start, start + chunk_size)
        q_c, k_c, v_c, f_c = _chunk(q, k, v, f, steps, h.dtype)
        states, _ = _run_chunk(k_c, v_c, weight, f_c, checkpoint)
        state = states[-1]
        y[:, steps] = (states[1:] * q_c).sum(-1).permute(_VALUES_OUT)
    return y, _contiguous(state.permute(_STATE_OUT)), checkpoints


@_forward.register_fake
def _(q, k, v, W, f, h, chunk_size, grad_clamp):
    chunks = -(-v.shape[1] // chunk_size)
    checkpoints = h.new_empty(chunks, *h.permute(_STATE_IN).shape)
    return v.new_empty(v.shape), h.new_empty(h.shape), checkpoints


@torch.library.custom_op("megacpp::m2rnn_chunked_backward", mutates_args=())
def _backward(
    dy: Tensor | None, dh: Tensor | None, q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor,
    checkpoints: Tensor, chunk_size: int, grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dW, df, dh0 from the gradients of y and of the final state; None is zeros."""
    dtype = checkpoints.dtype
    dy = torch.zeros_like(v) if dy is None else dy
    d_state = torch.zeros_like(checkpoints[0]) if dh is None else dh.permute(_STATE_IN)
    weight = W.to(dtype).transpose(-1, -2)
    dq, dk, dv, df = (x.new_empty(x.shape) for x in (q, k, v, f))
    dW = checkpoints.new_zeros(W.shape)
    for index in reversed(range(checkpoints.shape[0])):
        steps = slice(index * chunk_size, (index + 1) * chunk_size)
        chunk = _chunk(q, k, v, f, steps, dtype)
        dy_c = _values_in(dy, steps, dtype)
        dq_c, dk_c, dv_c, df_c, dW_c, d_state = _chunk_backward(
            *chunk, dy_c, weight, checkpoints[index], d_state, grad_clamp
        )
        dq[:, steps] = dq_c.permute(_KEYS_OUT)
        dk[:, steps] = dk_c.permute(_KEYS_OUT)
        dv[:, steps] = dv_c.permute(_VALUES_OUT)
        df[:, steps] = df_c.permute(_DECAY_OUT)
        dW += dW_c
    return dq, dk, dv, dW.to(W.dtype), df, _contiguous(d_state.permute(_STATE_OUT))


@_backward.register_fake
def _(dy, dh, q, k, v, W, f, checkpoints, chunk_size, grad_clamp):
    state = checkpoints[0].permute(_STATE_OUT).shape
    return (*(x.new_empty(x.shape) for x in (q, k, v, W, f)), checkpoints.new_empty(state))


def _save(ctx, inputs, output) -> None:
    q, k, v, W, f, _, chunk_size, grad_clamp = inputs
    checkpoints = output[2]
    ctx.mark_non_differentiable(checkpoints)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, W, f, checkpoints)
    ctx.options = (chunk_size, grad_clamp)


def _gradients(ctx, dy, dh, _):
    return (*_backward(dy, dh, *ctx.saved_tensors, *ctx.options), None, None)


_forward.register_autograd(_gradients, setup_context=_save)

_THREADED_STATE = 2**15  # elements; below, torch's elementwise loops use one thread, too

_STATE_IN = (1, 3, 0, 2)  # (B, H, K, V) -> (H, V, B, K)
_STATE_OUT = (2, 0, 3, 1)  # (H, V, B, K) -> (B, H, K, V)
_KEYS_OUT = (2, 0, 1, 3)  # (C, heads, B, K) -> (B, C, heads, K)
_VALUES_OUT = (3, 0, 1, 2)  # (C, H, V, B) -> (B, C, H, V)
_DECAY_OUT = (2, 0, 1)  # (C, H, B) -> (B, C, H)


def _contiguous(x: Tensor) -> Tensor:
    """A contiguous copy: an operator must not return a view of its input."""
    return x.clone(memory_format=torch.contiguous_format)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, steps: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k (C, heads, 1, B, K), v (C, H, V, B, 1), f (C, H, 1, B, 1)."""
    q, k = (x[:, steps].permute(1, 2, 0, 3).to(dtype).unsqueeze(2) for x in (q, k))
    f = f[:, steps].permute(1, 2, 0).to(dtype)[:, :, None, :, None]
    return q, k, _values_in(v, steps, dtype), f


def _values_in(v: Tensor, steps: slice, dtype: torch.dtype) -> Tensor:
    """(B, S, H, V) -> (C, H, V, B, 1)"""
    return v[:, steps].permute(1, 2, 3, 0).to(dtype).unsqueeze(-1)


def _run_chunk(
    k: Tensor, v: Tensor, weight: Tensor, f: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """States (C + 1, H, V, B, K), of which the first is `state`, and z (C, H, V, B, K).

    weight: W^T, (H, V, V).
    """
    states = state.new_empty(v.shape[0] + 1, *state.shape)
    states[0] = state
    z = torch.mul(v, k, out=torch.empty_like(states[1:]))
    rows = _flat(states).unbind()
    steps = zip(_flat(z).unbind(), _per_row(f, k), rows[:-1], rows[1:], strict=True)
    with _threads_for(state):
        for z_t, f_t, before, after in steps:
            z_t.baddbmm_(weight, before).tanh_()
            torch.lerp(z_t, before, f_t, out=after)
    return states, z


@contextlib.contextmanager
def _threads_for(state: Tensor) -> Iterator[None]:
    """One CPU thread for the steps of a small state.

    MKL's tanh splits even 4096 numbers over two threads. That is a fifth faster on an idle machine,
    but tens of times slower where another process holds a core, as every step waits for it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if state.numel() >= _THREADED_STATE else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _flat(x: Tensor) -> Tensor:
    """(..., B, K) -> (..., B * K), the same memory."""
    return x.view(*x.shape[:-2], -1)


def _per_row(f: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """f of each step, once per row of the state: C times (H, 1, B * K)."""
    return f.expand(*f.shape[:-1], k.shape[-1]).flatten(3).unbind()


def _chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, dy: Tensor, weight: Tensor, state: Tensor,
    d_state: Tensor, grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k (C, heads, B, K), v (C, H, V, B), f (C, H, B), W, and the first state."""
    states, z = _run_chunk(k, v, weight, f, state)
    before, after = states[:-1], states[1:]
    # g[t + 1] is the gradient of the state after step t; g[0] that of the chunk's first state.
    g = torch.zeros_like(states)
    torch.mul(dy, q, out=g[1:])
    g[-1] += _clamped(d_state, grad_clamp)
    a = (1 - z * z).mul_(1 - f)
    _run_back(g, a, _per_row(f, k), weight.transpose(-1, -2), grad_clamp)

    df = (g[1:] * (before - z)).sum((2, 4))
    dW = (_flat(before) @ _flat(a).transpose(-1, -2)).sum(0)
    dv = (a * k).sum(-1)
    # A product and a sum: on the CPU three times as fast as a batched vector-matrix product.
    dq = (after * dy).sum(2).sum_to_size(q.squeeze(2).shape)
    dk = (a * v).sum(2).sum_to_size(k.squeeze(2).shape)
    return dq, dk, dv, df, dW, g[0]


def _run_back(
    g: Tensor, a: Tensor, f: tuple[Tensor, ...], weight: Tensor, grad_clamp: float | None
) -> None:
    """The recurrence of the gradient, from the last step to the first, in place.

    a: on entry (1 - f) (1 - z^2) of each step, on return the gradient of tanh's argument. g: on
    entry what a state's gradient gets from dy and from the next chunk, on return the whole of it.

    weight: W, (H, V, V).
    """
    rows = _flat(g).unbind()
    steps = list(zip(rows[:-1], rows[1:], _flat(a).unbind(), f, strict=True))
    with _threads_for(g[0]):
        for t, (before, after, a_t, f_t) in reversed(list(enumerate(steps))):
            a_t.mul_(after)
            if grad_clamp is None or t == 0:  # g[0] is clamped by the chunk before
                before.addcmul_(f_t, after).baddbmm_(weight, a_t)
            else:
                before += _clamped(torch.mul(f_t, after).baddbmm_(weight, a_t), grad_clamp)


def _clamped(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)
