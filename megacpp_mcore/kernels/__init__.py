"""The operators: a folder each, with `reference.py` as the math in plain torch.

Importing any of them lets Triton assemble its kernels with a ptxas that does so right.
"""

from megacpp_mcore.host import ptxas

ptxas.choose()
