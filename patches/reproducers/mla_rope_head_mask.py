"""Fused MLA RoPE must not depend on BLOCK_H, even where it does not divide the heads (56).

The Triton kernels run in Triton's interpreter with a given block size. The buffers have room for
one more block, so that writes after the last token are detected and not fatal.
"""

import os

from _common import CANNOT_RUN, DEFECT, RIGHT, hide_gpu, report, run

TOKENS, HEADS, NOPE, ROPE, VALUE = 2, 56, 4, 4, 4
BLOCKS = (8, 16, 32, 64)
POISON = -77.0


def main() -> int:
    hide_gpu()
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    try:
        import triton
    except ImportError:
        return report(CANNOT_RUN, "triton is not installed")
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fusion

    torch.manual_seed(0)
    angles = torch.randn(TOKENS, ROPE // 2)
    cos, sin = (torch.cat((t, t), dim=-1).contiguous() for t in (angles.cos(), angles.sin()))
    wrong = {}
    for check in (query_forward, query_backward, key_value_forward, key_value_backward):
        for block in BLOCKS:
            grid = (TOKENS, triton.cdiv(HEADS, block))
            bad = check(fusion, grid, block, cos, sin)
            if bad:
                wrong[f"{check.__name__} BLOCK_H={block}"] = f"{bad} of {TOKENS * HEADS} heads"
    if wrong:
        return report(DEFECT, f"{HEADS} heads: " + "; ".join(f"{k}: {v}" for k, v in wrong.items()))
    return report(RIGHT, f"{HEADS} heads: all four kernels right with BLOCK_H {BLOCKS}")


def padded(*shape: int, random: bool = True):
    """A [TOKENS, *shape] view at the start of a buffer whose rest is poisoned, and that rest."""
    import torch

    size = TOKENS * shape[0] * shape[1]
    buffer = torch.full((size + 128 * shape[1],), POISON)
    view = buffer[:size].view(TOKENS, *shape)
    if random:
        view.normal_()
    return view, buffer[size:]


def rotated(pairs, cos, sin):
    """The rotation of interleaved pairs [TOKENS, heads, ROPE] into two halves."""
    import torch

    first, second = pairs[..., 0::2], pairs[..., 1::2]
    cos, sin = cos[:, None, : ROPE // 2], sin[:, None, : ROPE // 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotated_back(halves, cos, sin):
    """The transpose of `rotated`: from two halves to interleaved pairs."""
    import torch

    left, right = halves.chunk(2, dim=-1)
    cos, sin = cos[:, None, : ROPE // 2], sin[:, None, : ROPE // 2]
    return torch.stack((left * cos + right * sin, right * cos - left * sin), dim=-1).flatten(-2)


def wrong_heads(got, wanted, *rests) -> int:
    """How many heads differ, plus one for each buffer that was written after its end."""
    # fp32, two products and a sum per element of order 1: a few roundings
    differs = ((got - wanted).abs() > 1e-5).any(dim=-1).sum()
    return int(differs) + sum(bool((rest != POISON).any()) for rest in rests)


def query_forward(fusion, grid, block, cos, sin) -> int:
    query, rest = padded(HEADS, NOPE + ROPE)
    wanted = query.clone()
    wanted[..., NOPE:] = rotated(query[..., NOPE:], cos, sin)
    kernel = named(fusion, "rotary_fwd_q_kernel", "_mla_rope_fwd_inplace_kernel")
    launch(kernel, grid, block, cos, sin, Q=query, **strides(x=query))
    return wrong_heads(query, wanted, rest)


def query_backward(fusion, grid, block, cos, sin) -> int:
    grad, rest = padded(HEADS, NOPE + ROPE)
    wanted = grad.clone()
    wanted[..., NOPE:] = rotated_back(grad[..., NOPE:], cos, sin)
    kernel = named(fusion, "rotary_bwd_q_kernel", "_mla_rope_bwd_inplace_kernel")
    launch(kernel, grid, block, cos, sin, DO=grad, **strides(x=grad))
    return wrong_heads(grad, wanted, rest)


def key_value_forward(fusion, grid, block, cos, sin) -> int:
    import torch

    kv, _ = padded(HEADS, NOPE + VALUE)
    position, _ = padded(1, ROPE)
    key, key_rest = padded(HEADS, NOPE + ROPE, random=False)
    value, value_rest = padded(HEADS, VALUE, random=False)
    wanted = torch.cat(
        (kv[..., :NOPE], rotated(position, cos, sin).expand(-1, HEADS, -1), kv[..., NOPE:]), dim=-1
    )
    kernel = named(fusion, "rotary_fwd_kv_kernel", "_mla_rope_fwd_kv_split_kernel")
    tensors = {"KV": kv, "K_POS_EMB": position, "O_KEY": key, "O_VALUE": value}
    places = strides(kv=kv, emb=position, k=key, v=value)
    launch(kernel, grid, block, cos, sin, **tensors, **places)
    return wrong_heads(torch.cat((key, value), dim=-1), wanted, key_rest, value_rest)


def key_value_backward(fusion, grid, block, cos, sin) -> int:
    import torch

    key, key_rest = padded(HEADS, NOPE + ROPE)
    value, _ = padded(HEADS, VALUE)
    kv, rest = padded(HEADS, NOPE + VALUE, random=False)
    position, _ = padded(1, ROPE, random=False)
    wanted = torch.cat((key[..., :NOPE], value), dim=-1)
    summed = rotated_back(key[..., NOPE:].sum(dim=1, keepdim=True), cos, sin)
    kernel = named(fusion, "rotary_bwd_kv_kernel", "_mla_rope_bwd_kv_split_kernel")
    tensors = {"dK": key, "dV": value, "dKV": kv, "dEMB": position}
    places = strides(dk=key, dv=value, dkv=kv, demb=position)
    launch(kernel, grid, block, cos, sin, **tensors, **places)
    # the sum over 56 heads rounds 56 times
    wrong_sums = int(((position - summed).abs() > 1e-4).any(dim=-1).sum())
    return wrong_heads(kv, wanted, rest, key_rest) + wrong_sums


def named(fusion, *names: str):
    """The kernel that has the first of `names`; the second is 0.20's."""
    first, second = names
    return getattr(fusion, first) if hasattr(fusion, first) else getattr(fusion, second)


def strides(**tensors) -> dict[str, int]:
    """The kernels' arguments stride_NAME_seq and stride_NAME_nheads."""
    rows = {f"stride_{name}_seq": tensor.stride(0) for name, tensor in tensors.items()}
    return rows | {f"stride_{name}_nheads": tensor.stride(1) for name, tensor in tensors.items()}


def launch(kernel, grid, block, cos, sin, **values) -> None:
    """Run a kernel with its arguments by name; those of sequences of their own are not given."""
    values |= dict.fromkeys(("seq_num", "cu_seqlens_q", "cu_seqlens_kv", "position_ids"))
    values |= {"COS": cos, "SIN": sin, "emb_dim": ROPE, "k_dim": NOPE, "v_dim": VALUE}
    values |= {"qk_head_dim": NOPE, "nope_dim": NOPE, "head_num": HEADS, "BLOCK_H": block}
    values |= {"stride_cos_seq": cos.stride(0), "stride_sin_seq": sin.stride(0)}
    values |= {"batch_size": 1, "cp_rank": 0, "cp_size": 1}
    values |= {"INVERSE": False, "REMOVE_INTERLEAVING": False}
    kernel.fn[grid](**{name: values[name] for name in kernel.fn.arg_names})


run(main)
