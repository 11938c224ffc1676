"""FlashAttention-4 (CuTe DSL) of the package flash-attn-4, imported when a layer is built with it.

Shapes: q (b, s, h, dqk), k (b, s, g, dqk), v (b, s, g, dv) -> (b, s, h, dv), and packed as in
`varlen.py`. It takes grouped queries, and needs a contiguous last axis.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.core_attention.varlen import padded_v
from megacpp_mcore.kernels.strides import readable
from megacpp_mcore.surfaces.core_attention import FLASH_4_MODULE


class FlashAttention4:
    """The package's two functions. torch.compile does not know their kernels: a break around each.

    Made when a layer is built: an import in a call would break the graph once more.
    """

    def __init__(self) -> None:
        module = importlib.import_module(FLASH_4_MODULE)
        self.rows = torch.compiler.disable(module.flash_attn_func)
        self.documents = torch.compiler.disable(module.flash_attn_varlen_func)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Rows of one sequence each."""
        return _run(self.rows, q, k, v, softmax_scale=scale)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float
    ) -> Tensor:
        """Packed documents."""
        return _run(
            self.documents, q, k, v, softmax_scale=scale, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip


def narrows(dqk: int, dv: int, grouped: bool) -> bool:
    """Whether v may be narrower than q and k; else it is padded to dqk. 4.0.0b36 on Hopper has no
    kernel for 32 and 16, for example, nor for grouped dk and dv."""
    return not grouped and dqk % 64 == 0 and dv % 64 == 0


def _run(call: Callable[..., Any], *qkv: Tensor, **options: Any) -> Tensor:
    deterministic = torch.are_deterministic_algorithms_enabled()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = call(q, k, v, causal=True, deterministic=deterministic, **options)
        return found[0] if isinstance(found, tuple) else found  # some return the log-sums, too

    q, k, v = (readable(x) for x in qkv)
    takes_v = narrows(q.shape[-1], v.shape[-1], q.shape[-2] != k.shape[-2])
    return (attend if takes_v else padded_v(attend))(q, k, v)
