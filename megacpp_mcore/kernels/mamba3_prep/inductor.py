"""`megacpp_mcore.kernels.mamba3_prep.mamba3_prep` under torch.compile.

What the scan reads as the projection has it (x, z, trap, angles) is not among the arguments: a
graph that returns views of its input has the gradient of each written out over the whole input.
"""

from megacpp_mcore.kernels import mamba3_prep as _public
from megacpp_mcore.kernels.inductor import compiled

mamba3_prep = compiled(_public.mamba3_prep)
