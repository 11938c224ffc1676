"""M2RNN in plain torch, as it is defined: the recurrence step by step.

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

clamp, off by default, limits every element of dh_t to [-grad_clamp, grad_clamp]: what step t
receives from step t + 1, before q_t dy_t^T is added, as in XMA's Triton kernel. dh_0 is returned
unclamped. (XMA's plain torch function clamps after that addition; models train on the kernel.)

Shapes are those of `megacpp_mcore.kernels.m2rnn.m2rnn`, which checks them; nothing is checked here.
The computation is in float32, or float64 when v is float64.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# (q, k, v, W, f, initial_state) -> (y, final_state), every row of the batch one document
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def m2rnn_sequential(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, *, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, grad_clamp: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence as it is written, one step after another under autograd; the reference.

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

    return over_documents(recurrence, q, k, v, W, f, initial_state, cu_seqlens)


def m2rnn_step(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q (B, Hq, K), k (B, Hk, K), v (B, H, V), f (B, H), state (B, H, K, V).

    Hq and Hk are 1 or H. Returns y (B, H, V) in v's dtype, and the next state in float32 (float64
    when v is float64); `state` itself is unchanged.
    """
    dtype = compute_dtype(v)
    y_dtype = v.dtype
    q, k, v, W, f, state = (x.to(dtype) for x in (q, k, v, W, f, state))
    z = torch.tanh(state @ W + k.unsqueeze(-1) * v.unsqueeze(-2))
    state = torch.lerp(z, state, f[..., None, None])
    return (q.unsqueeze(-1) * state).sum(-2).to(y_dtype), state


def compute_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def over_documents(
    recurrence: Recurrence, q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `recurrence` on each document from its own initial state."""
    batch, _, heads, v_dim = v.shape
    documents = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is None:
        h = W.new_zeros(documents, heads, k.shape[-1], v_dim, dtype=compute_dtype(v))
    else:
        h = initial_state.to(compute_dtype(v))
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
