"""An R block between its projections in plain torch: `prep` and `m2rnn`."""

from collections.abc import Sequence

from torch import Tensor

from megacpp_mcore.kernels.documents import positions
from megacpp_mcore.kernels.m2rnn import M2RNNInputError, m2rnn
from megacpp_mcore.kernels.m2rnn_core.prep import conv_and_decay, gated_norm


def m2rnn_core(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    W: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    *,
    heads: int,
    k_dim: int,
    v_dim: int,
    eps: float,
    chunk_size: int,
    grad_clamp: float | None,
    tanh: str,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The output of an R block's gated norm from what its input projection gives; differentiable.

    S tokens of a batch of b, H heads of k_dim K and v_dim V, C = 2 K + H V.

    projected: (S, b, rows), columns [q (K), k (K), v (H V), gate (H V), decay (H)]; more are
    padding, whose gradient is zero. conv_weight: (C, 1, taps). conv_bias: (C,). A_log, dt_bias:
    (H,). W: (H, V, V). D, norm_weight: (H V,). eps: of the norm. chunk_size, grad_clamp, tanh: as
    in `m2rnn`. cu_seqlens: (documents + 1,) integers that end at S, as in `m2rnn`, b = 1.

    Returns (S, b, H V) in projected's dtype, computed in float32 or wider. Raises M2RNNInputError
    for tensors that do not fit together.
    """
    values = heads * v_dim
    parts = (k_dim, k_dim, values, values, heads)
    check_inputs(projected, parts, cu_seqlens)
    *qkv, gate, decay, _ = projected.split([*parts, projected.shape[-1] - sum(parts)], dim=-1)
    offset = None
    if cu_seqlens is not None:
        offset = positions(projected.shape[0], cu_seqlens).view(-1, 1, 1)
    mixed, f = conv_and_decay(*qkv, decay, conv_weight, conv_bias, A_log, dt_bias, offset=offset)
    q, k, v = heads_of(mixed, k_dim, v_dim)
    y, _ = m2rnn(
        q, k, v, W, f, cu_seqlens=cu_seqlens, chunk_size=chunk_size, grad_clamp=grad_clamp,
        tanh=tanh,
    )  # fmt: skip
    return gated_norm(y, v, gate, D, norm_weight, channels=values, eps=eps)


def heads_of(mixed: Tensor, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of (s, b, 2 K + H V): q, k (b, s, 1, K) and v (b, s, H, V)."""
    q, k, v = mixed.transpose(0, 1).split((k_dim, k_dim, mixed.shape[-1] - 2 * k_dim), dim=-1)
    return q.unsqueeze(2), k.unsqueeze(2), v.unflatten(-1, (-1, v_dim))


def check_inputs(projected: Tensor, parts: Sequence[int], cu_seqlens: Tensor | None) -> None:
    """Raises M2RNNInputError unless the projection has tokens and the parts' columns."""
    if projected.dim() != 3 or projected.shape[-1] < sum(parts) or 0 in projected.shape:
        raise M2RNNInputError(
            f"the projection has shape {tuple(projected.shape)}, expected (S, b, rows) with tokens "
            f"and at least {sum(parts)} rows"
        )
    if cu_seqlens is not None and projected.shape[1] != 1:
        raise M2RNNInputError(
            f"cu_seqlens packs documents into one row, the batch is {projected.shape[1]}"
        )
