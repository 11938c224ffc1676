"""torch.nn.functional.scaled_dot_product_attention, with torch's choice of kernel or a named one.

A named kernel never falls back to another one, except for a row of no or one token: where cuDNN or
flash attention cannot serve, torch raises RuntimeError (`No available kernel`). cuDNN cannot serve
in deterministic mode.
"""

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacpp_mcore.kernels.core_attention.reference import attention
from megacpp_mcore.kernels.core_attention.varlen import padded_v
from megacpp_mcore.kernels.strides import readable


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """The kernel that torch chooses for the device, the dtype and the dims."""
    if not q.numel():
        return attention(q, k, v, scale=scale)  # on CUDA torch returns None for no rows
    return _sdpa(q, k, v, scale, dropout)


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """cuDNN's kernel, which takes dqk != dv and grouped queries without padding."""
    if q.numel() and q.shape[2] > 1:
        q, k, v = (readable(x) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _sdpa(q, k, v, scale, dropout)
    return sdpa(q, k, v, scale=scale, dropout=dropout)  # cuDNN refuses a row of one token


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """FlashAttention-2, which needs dqk == dv: a narrower v is padded with zeros to dqk."""
    if not q.numel():
        return attention(q, k, v, scale=scale)
    q, k, v = (readable(x) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return padded_v(lambda *x: _sdpa(*x, scale, dropout))(q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
