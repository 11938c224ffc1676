"""The rows of an embedding's weight, in Megatron's layout. The math is in `reference.py`."""

from megacpp_mcore.kernels.embedding.reference import embedding

__all__ = ["embedding"]
