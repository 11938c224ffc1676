"""RoPE of grouped-query attention: queries and keys turned together, the values passed along.

`REFERENCE` is the definition; `triton.py` and `megatron.py` hold the same two functions by other
means. The math is in `reference.py`.
"""

from megacpp_mcore.kernels.rope_qk.inputs import RopeQK, RopeQKInputError
from megacpp_mcore.kernels.rope_qk.reference import REFERENCE

__all__ = ["REFERENCE", "RopeQK", "RopeQKInputError"]
