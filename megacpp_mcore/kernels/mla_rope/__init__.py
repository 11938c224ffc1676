"""RoPE of multi-latent attention: from the up-projections' outputs to attention's inputs.

`mla_rope` is the definition; `triton.py` and `unfused.py` are other implementations of it.
The math is in `reference.py`.
"""

from megacpp_mcore.kernels.mla_rope.inputs import MLARopeInputError, RotaryTable, check_inputs
from megacpp_mcore.kernels.mla_rope.reference import mla_rope

__all__ = ["MLARopeInputError", "RotaryTable", "check_inputs", "mla_rope"]
