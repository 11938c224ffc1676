"""The router's logits in float32. The math is in `reference.py`."""

from megacpp_mcore.kernels.router_gating.reference import router_gating

__all__ = ["router_gating"]
