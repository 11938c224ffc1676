"""M2RNN in plain torch: the recurrence step by step, and the same values in chunks.

Math (the M2RNN paper's public code, open-lm-engine/accelerated-model-architectures), per head, with
a state h of K rows and V columns, q_t and k_t of K values and v_t of V values:

    z_t = tanh(h_{t-1} W + k_t v_t^T)
    h_t = f_t h_{t-1} + (1 - f_t) z_t
    y_t = q_t^T h_t

Backward, with g_t the whole gradient of h_t:

    g_t   = q_t dy_t^T + clamp(dh_t)            dh_S is the gradient of the final state
    a_t   = (1 - f_t) g_t (1 - z_t^2)           the gradient of tanh's argument
    dh_{t-1} = f_t g_t + a_t W^T                dh_0 is the gradient of the initial state
    dq_t = h_t dy_t     dk_t = a_t v_t     dv_t = a_t^T k_t
    df_t = sum(g_t (h_{t-1} - z_t))     dW = sum_t h_{t-1}^T a_t

clamp, off by default, limits every element of dh_t to [-grad_clamp, grad_clamp], as XMA's Triton
kernel does: what a step receives from the step behind it, before the step's own dy joins. dh_0 goes
out unclamped. (XMA's plain torch function clamps after dy has joined; models train on the kernel.)

Shapes are those of `megacpp_mcore.kernels.m2rnn.m2rnn`, which checks them; nothing is checked here.
The computation is in float32, or float64 when v is float64.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# (q, k, v, W, f, initial_state) -> (y, final_state), every row of the batch one document
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def m2rnn_sequential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    grad_clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, one step after another under autograd: the truth.

    Keeps every intermediate of every step alive for the backward pass.
    """

    def recurrence(q, k, v, W, f, h):
        q, k, v, W, f = (x.to(h.dtype) for x in (q, k, v, W, f))
        y = []
        for t in range(v.shape[1]):
            f_t = f[:, t, :, None, None]
            z = torch.tanh(h @ W + k[:, t, :, :, None] * v[:, t, :, None, :])
            h = f_t * h + (1 - f_t) * z
            y.append((q[:, t, :, :, None] * h).sum(-2))
            if grad_clamp is not None:
                h = _ClampGradient.apply(h, grad_clamp)
        return torch.stack(y, dim=1), h

    return _over_documents(recurrence, q, k, v, W, f, initial_state, cu_seqlens)


def m2rnn_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    grad_clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same values as `m2rnn_sequential`, from one opaque operator each way.

    Saved for the backward pass: the inputs, and the state before every chunk_size-th step. The
    backward pass recomputes one chunk at a time, from the last to the first.
    """

    def recurrence(q, k, v, W, f, h):
        y, final_state, _ = _forward(q, k, v, W, f, h, chunk_size, grad_clamp)
        return y, final_state

    return _over_documents(recurrence, q, k, v, W, f, initial_state, cu_seqlens)


def m2rnn_step(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q (B, Hq, K), k (B, Hk, K), v (B, H, V), f (B, H), state (B, H, K, V).

    Hq and Hk are 1 or H. Returns y (B, H, V) in v's dtype, and the next state in float32 (float64
    when v is float64); `state` itself is left as it is.
    """
    dtype = _compute_dtype(v)
    y_dtype = v.dtype
    q, k, v, W, f, state = (x.to(dtype) for x in (q, k, v, W, f, state))
    z = torch.tanh(state @ W + k.unsqueeze(-1) * v.unsqueeze(-2))
    state = torch.lerp(z, state, f[..., None, None])
    return (q.unsqueeze(-1) * state).sum(-2).to(y_dtype), state


def _compute_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _over_documents(
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `recurrence` on each document from its own initial state."""
    batch, _, heads, v_dim = v.shape
    documents = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is None:
        h = W.new_zeros(documents, heads, k.shape[-1], v_dim, dtype=_compute_dtype(v))
    else:
        h = initial_state.to(_compute_dtype(v))
    if cu_seqlens is None:
        y, h = recurrence(q, k, v, W, f, h)
        return y.to(v.dtype), h
    lengths = cu_seqlens.diff().tolist()
    pieces = zip(*(x.split(lengths, dim=1) for x in (q, k, v, f)), h.split(1), strict=True)
    outputs = [
        # Megatron pads cu_seqlens with empty documents: their state passes through.
        recurrence(*piece[:3], W, *piece[3:]) if length else (piece[2].to(h.dtype), piece[4])
        for length, piece in zip(lengths, pieces, strict=True)
    ]
    y, states = zip(*outputs, strict=True)
    return torch.cat(y, dim=1).to(v.dtype), torch.cat(states)


class _ClampGradient(torch.autograd.Function):
    """Identity whose gradient is clamped, element by element, to [-limit, limit]."""

    @staticmethod
    def forward(ctx, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.limit, ctx.limit), None


# The chunked recurrence. Inside it a state lies as (H, V, B, K): one step is then a product of W^T
# with all rows of the batch at once, (H, V, V) @ (H, V, B * K), and elementwise operations run over
# long contiguous rows. Tensors of a chunk of C steps broadcast against (C, H, V, B, K).


@torch.library.custom_op("megacpp::m2rnn_chunked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    h: Tensor,
    chunk_size: int,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
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
    dy: Tensor | None,
    dh: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    checkpoints: Tensor,
    chunk_size: int,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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

_SHARED_STATE = 2**15  # elements; below it torch's own elementwise loops stay on one thread, too

_STATE_IN = (1, 3, 0, 2)  # (B, H, K, V) -> (H, V, B, K)
_STATE_OUT = (2, 0, 3, 1)  # (H, V, B, K) -> (B, H, K, V)
_KEYS_OUT = (2, 0, 1, 3)  # (C, heads, B, K) -> (B, C, heads, K)
_VALUES_OUT = (3, 0, 1, 2)  # (C, H, V, B) -> (B, C, H, V)
_DECAY_OUT = (2, 0, 1)  # (C, H, B) -> (B, C, H)


def _contiguous(x: Tensor) -> Tensor:
    """A contiguous copy: what an operator returns must not be a view of what it was given."""
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
    """States (C + 1, H, V, B, K), the first of them `state`, and candidates z (C, H, V, B, K).

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
    """One CPU thread for the steps of a state too small to share.

    MKL's tanh shares 4096 numbers between two threads: a fifth faster on an idle machine, tens of
    times slower where another process holds a core, since every step then waits for that thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if state.numel() >= _SHARED_STATE else 1)
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    dy: Tensor,
    weight: Tensor,
    state: Tensor,
    d_state: Tensor,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    """Turn `a` from the slope of step t into its gradient; add what step t sends back to g[t].

    weight: W, (H, V, V).
    """
    rows = _flat(g).unbind()
    steps = list(zip(rows[:-1], rows[1:], _flat(a).unbind(), f, strict=True))
    with _threads_for(g[0]):
        for t, (before, after, a_t, f_t) in reversed(list(enumerate(steps))):
            a_t.mul_(after)
            if grad_clamp is None or t == 0:  # what leaves the chunk is clamped where it arrives
                before.addcmul_(f_t, after).baddbmm_(weight, a_t)
            else:
                before += _clamped(torch.mul(f_t, after).baddbmm_(weight, a_t), grad_clamp)


def _clamped(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)
