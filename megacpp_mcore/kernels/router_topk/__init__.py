"""The router's choice: logits to weights, map and balance. The math is in `reference.py`."""

from megacpp_mcore.kernels.router_topk.reference import Choice, router_topk

__all__ = ["Choice", "router_topk"]
