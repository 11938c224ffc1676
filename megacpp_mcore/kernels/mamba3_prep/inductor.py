"""`megacpp_mcore.kernels.mamba3_prep.mamba3_prep` under torch.compile.

The columns that the scan reads directly from the projection (x, z, trap, angles) are not arguments:
if a graph returned views of its input, the gradient of each would be written out at the input's
full size.
"""

from megacpp_mcore.kernels import mamba3_prep as _public
from megacpp_mcore.kernels.inductor import compiled

mamba3_prep = compiled(_public.mamba3_prep)
