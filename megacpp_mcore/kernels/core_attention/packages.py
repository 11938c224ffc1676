"""The flash-attn packages 2, 3 and 4, each imported only when a layer is built with it.

Shapes: q (b, s, h, dqk), k (b, s, g, dqk), v (b, s, g, dv) -> (b, s, h, dv), and packed as in
`varlen.py`. All take grouped queries, and need a contiguous last axis.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.core_attention.varlen import padded_v, readable
from megacpp_mcore.surfaces.core_attention import FLASH_2_MODULE, FLASH_4_MODULE, flash_3_module


@dataclass(frozen=True)
class FlashAttention:
    """A package's two functions: for rows of one sequence each, and for packed documents.

    narrows, drops: see FlashPackage.
    """

    rows: Callable[..., Any]
    documents: Callable[..., Any]
    narrows: Callable[[int, int, bool], bool]
    drops: bool

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float) -> Tensor:
        """Rows of one sequence each."""
        return self._run(self.rows, q, k, v, **self._options(scale, dropout))

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        """Packed documents."""
        options = self._options(scale, dropout) | {
            "cu_seqlens_q": bounds, "cu_seqlens_k": bounds,
            "max_seqlen_q": longest, "max_seqlen_k": longest,
        }  # fmt: skip
        return self._run(self.documents, q, k, v, **options)

    def _options(self, scale: float, dropout: float) -> dict[str, Any]:
        return {
            "softmax_scale": scale,
            "causal": True,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **({"dropout_p": dropout} if self.drops else {}),
        }

    def _run(self, call: Callable[..., Any], *qkv: Tensor, **options: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = call(q, k, v, **options)
            return found[0] if isinstance(found, tuple) else found  # some also return the log-sums

        q, k, v = (readable(x) for x in qkv)
        takes_v = self.narrows(q.shape[-1], v.shape[-1], q.shape[-2] != k.shape[-2])
        return (attend if takes_v else padded_v(attend))(q, k, v)


@dataclass(frozen=True)
class FlashPackage:
    """Where a package's functions are, and how they are called.

    narrows(dqk, dv, grouped): whether it takes a v narrower than q and k; if not, v is padded to
    dqk. drops: whether it has dropout. traced: whether torch.compile can trace it; version 4
    launches kernels that torch does not know.
    """

    module: Callable[[], str]
    narrows: Callable[[int, int, bool], bool]
    drops: bool
    traced: bool

    def load(self) -> FlashAttention:
        """Import it. Done when a layer is built, as an import in a call would break the graph."""
        module = importlib.import_module(self.module())
        functions = module.flash_attn_func, module.flash_attn_varlen_func
        if not self.traced:
            functions = tuple(torch.compiler.disable(function) for function in functions)
        return FlashAttention(*functions, self.narrows, self.drops)


def _never(dqk: int, dv: int, grouped: bool) -> bool:
    return False


def _in_whole_tiles(dqk: int, dv: int, grouped: bool) -> bool:
    """4.0.0b36 on Hopper has no kernel for 32 and 16, for example, nor for grouped dk and dv."""
    return not grouped and dqk % 64 == 0 and dv % 64 == 0


FLASH_2 = FlashPackage(lambda: FLASH_2_MODULE, _never, drops=True, traced=True)
FLASH_3 = FlashPackage(flash_3_module, _never, drops=False, traced=True)
FLASH_4 = FlashPackage(lambda: FLASH_4_MODULE, _in_whole_tiles, drops=False, traced=False)
