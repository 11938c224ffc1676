"""RoPE of grouped-query attention: rotates queries and keys, and passes the values on.

`REFERENCE` is the definition; `triton.py` and `megatron.py` are other implementations of its two
functions. The math is in `reference.py`.
"""

from megacpp_mcore.kernels.rope_qk.inputs import RopeQK, RopeQKInputError
from megacpp_mcore.kernels.rope_qk.reference import REFERENCE

__all__ = ["REFERENCE", "RopeQK", "RopeQKInputError"]
