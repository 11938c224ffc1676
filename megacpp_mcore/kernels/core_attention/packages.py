"""The flash-attn packages 2, 3 and 4, each imported when it is called and nowhere else.

Shapes: q (b, s, h, dqk), k (b, s, g, dqk), v (b, s, g, dv) -> (b, s, h, dv), and packed as in
`varlen.py`. All take grouped queries, and each its last axis side by side.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.attention_support import flash_3_module
from megacpp_mcore.kernels.core_attention.varlen import padded_v, readable


@dataclass(frozen=True)
class FlashPackage:
    """How one of the packages is called. module: where its two functions are.

    pads_v: it needs dv == dqk. drops: it has dropout.
    """

    module: Callable[[], str]
    pads_v: bool
    drops: bool

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float) -> Tensor:
        """Rows of one sequence each."""
        call = self._function("flash_attn_func")
        return self._run(call, q, k, v, **self._options(scale, dropout))

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        """Documents one behind the other."""
        options = self._options(scale, dropout) | {
            "cu_seqlens_q": bounds, "cu_seqlens_k": bounds,
            "max_seqlen_q": longest, "max_seqlen_k": longest,
        }  # fmt: skip
        return self._run(self._function("flash_attn_varlen_func"), q, k, v, **options)

    def _function(self, name: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module()), name)

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
            return found[0] if isinstance(found, tuple) else found  # some return the sums beside it

        return (padded_v(attend) if self.pads_v else attend)(*(readable(x) for x in qkv))


FLASH_2 = FlashPackage(lambda: "flash_attn", pads_v=True, drops=True)
FLASH_3 = FlashPackage(flash_3_module, pads_v=True, drops=False)
FLASH_4 = FlashPackage(lambda: "flash_attn.cute", pads_v=False, drops=False)
