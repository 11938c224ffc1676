"""FlashAttention-4 (CuTe DSL) of the package flash-attn-4, imported when a layer is built with it.

Its forward and backward functions are called under an autograd function of our own, because the
package's public ones choose the output's layout: [b, s, h, dv] in memory, which the layer would
copy to Megatron's [s, b, h, dv]. Both are private to the package, so one version of it is served
(`surfaces/core_attention.py`). It takes grouped queries, and needs a contiguous last axis.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.core_attention.varlen import padded_v
from megacpp_mcore.kernels.strides import readable
from megacpp_mcore.surfaces.core_attention import FLASH_4_MODULE


class FlashAttention4:
    """The package's attention. torch.compile does not know its kernels: a break around each call.

    Made when a layer is built: an import in a call would break the graph once more. Gradients are
    added up in one order, so that two runs, or a captured step and an eager one, agree to the bit.
    """

    def __init__(self) -> None:
        module = importlib.import_module(f"{FLASH_4_MODULE}.interface")
        self.forward, self.backward = module._flash_attn_fwd, module._flash_attn_bwd
        self.attend = torch.compiler.disable(_Attention.apply)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Rows of one sequence each: q [s, b, h, dqk], k [s, b, g, dqk], v [s, b, g, dv]
        -> [s, b, h, dv], contiguous."""
        rows = (x.transpose(0, 1) for x in (q, k, v))
        return self._padded(*rows, softmax_scale=scale).transpose(0, 1)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float
    ) -> Tensor:
        """Packed documents, as in `varlen.py`: q [t, h, dqk], k [t, g, dqk], v [t, g, dv]
        -> [t, h, dv]."""
        return self._padded(
            q, k, v, softmax_scale=scale, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip

    def _padded(self, *qkv: Tensor, **options: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(self, q, k, v, options)

        q, k, v = (readable(x) for x in qkv)
        takes_v = narrows(q.shape[-1], v.shape[-1], q.shape[-2] != k.shape[-2])
        return (attend if takes_v else padded_v(attend))(q, k, v)


def narrows(dqk: int, dv: int, grouped: bool) -> bool:
    """Whether v may be narrower than q and k; else it is padded to dqk. 4.0.0b36 on Hopper has no
    kernel for 32 and 16, for example, nor for grouped dk and dv."""
    return not grouped and dqk % 64 == 0 and dv % 64 == 0


class _Attention(torch.autograd.Function):
    """q (b, s, h, dqk) with the rest alike -> (b, s, h, dv) that is [s, b, h, dv] in memory; packed
    q (t, h, dqk) -> (t, h, dv)."""

    @staticmethod
    def forward(
        ctx: Any, package: FlashAttention4, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        *tokens, heads, _ = q.shape
        out = q.new_empty(*reversed(tokens), heads, v.shape[-1])
        if len(tokens) == 2:
            out = out.transpose(0, 1)
        # The log-sums are asked for without gradients, too: else evaluation compiles a kernel more.
        out, log_sums, *_ = package.forward(
            q, k, v, causal=True, return_lse=True, out=out, **options
        )
        ctx.package, ctx.options = package, options
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    @no_second_derivative
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.package.backward(
            *ctx.saved_tensors[:4], d_out, ctx.saved_tensors[4],
            causal=True, deterministic=True, **ctx.options,
        )  # fmt: skip
        return None, *gradients, None
