"""RMSNorm and LayerNorm over the last dimension. The math is in `reference.py`."""

from megacpp_mcore.kernels.norm.reference import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
