"""From an M block's projection to its scan, as far as it is arithmetic: `reference.py`."""

from megacpp_mcore.kernels.mamba3_prep.reference import ScanInputs, mamba3_prep

__all__ = ["ScanInputs", "mamba3_prep"]
