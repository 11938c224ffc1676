"""The arithmetic between an M block's projection and its scan. The math is in `reference.py`."""

from megacpp_mcore.kernels.mamba3_prep.reference import ScanInputs, mamba3_prep

__all__ = ["ScanInputs", "mamba3_prep"]
