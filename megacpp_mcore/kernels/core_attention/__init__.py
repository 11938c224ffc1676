"""Causal attention: the definition, torch's fused kernels, and FlashAttention-4.

The functions of `reference.py` and `sdpa.py` take q (b, h, s, dqk), k (b, g, s, dqk) and v (b, g,
s, dv), h a multiple of g, in any strides, and return softmax(q k^T * scale, causal) v as (b, h, s,
dv) in v's dtype. `dropout` is the probability of dropping an attention weight. Those of
`varlen.py` and `flash_4.py` take layouts in which the heads of a token are contiguous. The math is
in `reference.py`.
"""

from megacpp_mcore.kernels.core_attention.reference import attention
from megacpp_mcore.kernels.core_attention.sdpa import sdpa, sdpa_cudnn, sdpa_flash
from megacpp_mcore.kernels.core_attention.varlen import padded_v, sdpa_varlen

__all__ = ["attention", "padded_v", "sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_varlen"]
