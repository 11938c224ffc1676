"""Mamba-3: the selective state space with trapezoidal steps and data-dependent rotation.

`mamba3_scan` runs over whole sequences and is differentiable; `mamba3_step` takes one token. The
math is in `reference.py`.
"""

from torch import Tensor

from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State, prepare
from megacpp_mcore.kernels.mamba3.reference import advance, mamba3_chunked

__all__ = ["Mamba3InputError", "Mamba3State", "mamba3_scan", "mamba3_step"]


def mamba3_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    adt: Tensor,
    dt: Tensor,
    trap: Tensor,
    angles: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    mimo_v: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    """Mamba-3 over sequences; differentiable in every tensor, states included.

    B batch, S tokens, H heads, G groups (head h reads group h // (H / G)), N state dim, P head dim,
    A rotated pairs (1 to N / 2), R rank. SISO leaves R and the mimo_* tensors out.

    q, k: (B, S, G, N), MIMO (B, S, R, G, N): C and B after their norm, before bias and rotation.
    v, z: (B, S, H, P): x and the gate (None: no gate).
    adt, dt: (B, S, H), float32: A * dt <= 0, and dt >= 0.
    trap: (B, S, H), before the sigmoid. angles: (B, S, H or 1, A), before the tanh; 1 is
    shared by all heads.
    q_bias, k_bias: (H, N), MIMO (H, R, N). D: (H,), the skip (None: none).
    mimo_v, mimo_z, mimo_out: (H, R, P); mimo_z exactly when z is given.
    chunk_size: tokens of a chunk; changes speed and rounding only.
    cu_seqlens: (documents + 1,) integers, offsets of documents packed into one row (B = 1): the
    state starts at zero in each. Tokens after the last offset are a document of their own.

    Pairs are (2i, 2i + 1) for SISO and (i, i + N / 2) for MIMO, as in upstream's kernels, so one's
    weights cannot be used for the other. The computation is in float32, or float64 when v is
    float64.

    Returns y (B, S, H, P) in v's dtype, and with return_final_state also the state after the last
    token. Raises Mamba3InputError (a MegacppError) for arguments that do not fit together, and for
    states together with cu_seqlens: scan such documents one by one.
    """
    if chunk_size < 1:
        raise Mamba3InputError(f"chunk_size is {chunk_size}; it must be at least 1")
    if cu_seqlens is not None and (initial_state is not None or return_final_state):
        raise Mamba3InputError(
            "states are not served together with cu_seqlens: scan the documents one by one"
        )
    inputs = prepare(
        q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z,
        mimo_v=mimo_v, mimo_z=mimo_z, mimo_out=mimo_out, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    y, state = mamba3_chunked(inputs, chunk_size, initial_state)
    return (y, state) if return_final_state else y


def mamba3_step(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    state: Mamba3State, mimo_v: Tensor | None = None, mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
) -> tuple[Tensor, Mamba3State]:  # fmt: skip
    """One more token: the arguments of `mamba3_scan` without S, and the state so far.

    Returns y (B, H, P) in v's dtype and the next state; `state` itself is unchanged. Raises
    Mamba3InputError for arguments that do not fit together.
    """
    token = [x.unsqueeze(1) for x in (q, k, v, adt, dt, trap, angles)]
    inputs = prepare(
        *token, q_bias, k_bias, D, None if z is None else z.unsqueeze(1),
        mimo_v=mimo_v, mimo_z=mimo_z, mimo_out=mimo_out,
    )  # fmt: skip
    y, state = advance(inputs, 0, inputs.state_in(state))
    return y.to(inputs.output_dtype), inputs.state_out(state)
