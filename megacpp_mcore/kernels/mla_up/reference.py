"""MLA's up-projections and RoPE as they are defined, in plain torch.

Math (DeepSeek-V2, 2.1.2 and 2.1.3): every head's queries are a product of the latent of q, its keys
and values of the latent of k and v; the rotary parts of the queries, and the part of the keys that
all heads share, are rotated as `megacpp_mcore.kernels.mla_rope.reference` says.
"""

from torch import Tensor
from torch.nn.functional import linear

from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable
from megacpp_mcore.kernels.mla_rope.reference import mla_rope
from megacpp_mcore.kernels.mla_up.inputs import check_inputs


def mla_up(
    q_latent: Tensor,
    kv_latent: Tensor,
    k_pos: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    rotary: RotaryTable,
    *,
    qk_head_dim: int,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = True,
    into_main_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, and keys and values of every head; differentiable in the first five.

    q_latent: (s, b, q_rank), or (t, q_rank) for packed documents. kv_latent: (s, b, kv_rank).
    k_pos: (s, b, pos_dim), shared by all heads. q_weight: (heads * (qk_head_dim + pos_dim),
    q_rank). kv_weight: (heads * (qk_head_dim + v_head_dim), kv_rank). One floating dtype, any
    strides. rotary, cu_seqlens, interleaved: as in `mla_rope`. into_main_grad: a backend may add
    the weights' gradients to their main_grad by the contract of `kernels.main_grad`.

    Returns q (s, b, heads, qk_head_dim + pos_dim), k of that shape, v (s, b, heads, v_head_dim),
    or (t, heads, ...). Raises MLARopeInputError (a MegacppError) for arguments that do not fit
    together.
    """
    sizes = check_inputs(
        q_latent, kv_latent, k_pos, q_weight, kv_weight, rotary, qk_head_dim, cu_seqlens
    )
    q = linear(q_latent, q_weight).unflatten(-1, (sizes.heads, -1))
    kv = linear(kv_latent, kv_weight).unflatten(-1, (sizes.heads, -1))
    return mla_rope(
        q, kv, k_pos, rotary, qk_head_dim=qk_head_dim, cu_seqlens=cu_seqlens,
        interleaved=interleaved,
    )  # fmt: skip
