"""MLA's up-projections and RoPE in one operator: from the latents to attention's inputs.

`mla_up` is the definition; `triton.py` is another implementation of it. The math is in
`reference.py`.
"""

from megacpp_mcore.kernels.mla_up.inputs import MLAUpInputError, Sizes, check_inputs
from megacpp_mcore.kernels.mla_up.reference import mla_up

__all__ = ["MLAUpInputError", "Sizes", "check_inputs", "mla_up"]
