"""Causal attention over whole sequences, in torch: the definition and torch's fused kernels.

Every function takes q (b, h, s, dqk), k (b, g, s, dqk) and v (b, g, s, dv), h a multiple of g, in
any strides, and returns softmax(q k^T * scale, causal) v as (b, h, s, dv) in v's dtype. `dropout`
is the share of the attention weights that is dropped. The math is in `reference.py`.
"""

from megacpp_mcore.kernels.core_attention.reference import attention
from megacpp_mcore.kernels.core_attention.sdpa import sdpa, sdpa_cudnn, sdpa_flash

__all__ = ["attention", "sdpa", "sdpa_cudnn", "sdpa_flash"]
