"""RoPE of multi-latent attention: from what the up-projections leave to what attention takes.

`mla_rope` is the definition; `triton.py` and `unfused.py` hold the same function by other means.
The math is in `reference.py`.
"""

from megacpp_mcore.kernels.mla_rope.inputs import MLARopeInputError, RotaryTable, check_inputs
from megacpp_mcore.kernels.mla_rope.reference import mla_rope

__all__ = ["MLARopeInputError", "RotaryTable", "check_inputs", "mla_rope"]
