"""Fused MLA RoPE's compiled kernels with 56 heads and each BLOCK_H: 0 right, 1 the defect."""

import sys
import traceback

import torch
import triton
from megatron.core.fusions import fused_mla_yarn_rope_apply as fusion

TOKENS, HEADS, NOPE, ROPE, BLOCKS = 64, 56, 64, 64, (8, 16, 32, 64)


def rotated(x, cos, sin, back):
    """Of interleaved pairs into halves, or its transpose."""
    cos, sin = (t[:, None, : ROPE // 2] for t in (cos, sin))
    if back:
        left, right = x.chunk(2, dim=-1)
        return torch.stack((left * cos + right * sin, right * cos - left * sin), -1).flatten(-2)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def wrong_heads(kernel, block, cos, sin, back):
    x = torch.randn(TOKENS + 1, HEADS, NOPE + ROPE, device="cuda")  # and room behind the last token
    wanted = x.clone()
    wanted[:-1, :, NOPE:] = rotated(x[:-1, :, NOPE:], cos, sin, back)
    grid = (TOKENS, triton.cdiv(HEADS, block))
    strides, rest = (x.stride(0), x.stride(1)), (1, None, None)
    kernel.fn[grid](x, cos, sin, NOPE, ROPE, HEADS, *rest, *strides, 0, 1, BLOCK_H=block)
    torch.cuda.synchronize()
    return int(((x - wanted).abs() > 1e-5).any(-1).sum())  # fp32: two products of order 1, a sum


def main():
    torch.manual_seed(0)
    angles = torch.randn(TOKENS, ROPE // 2, device="cuda")
    cos, sin = (torch.cat((t, t), -1).contiguous() for t in (angles.cos(), angles.sin()))
    kernels = {"forward": fusion.rotary_fwd_q_kernel, "backward": fusion.rotary_bwd_q_kernel}
    wrong = {
        f"{name} BLOCK_H={block}": heads
        for name, kernel in kernels.items()
        for block in BLOCKS
        if (heads := wrong_heads(kernel, block, cos, sin, name == "backward"))
    }
    print(f"wrong heads: {wrong}" if wrong else f"{HEADS} heads right with BLOCK_H {BLOCKS}")
    return int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(3)
