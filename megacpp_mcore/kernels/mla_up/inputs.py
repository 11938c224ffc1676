"""The sizes of `mla_up`, and the checks that every backend makes of its arguments."""

from typing import NamedTuple

from torch import Tensor

from megacpp_mcore.kernels.mla_rope.inputs import MLARopeInputError, RotaryTable, check_table


class MLAUpInputError(MLARopeInputError):
    """Arguments of `mla_up` that do not fit together."""


class Sizes(NamedTuple):
    """heads, and dims of a head: plain of q and k, pos of q and k, v. Ranks of the two latents."""

    heads: int
    plain: int
    pos: int
    v: int
    q_rank: int
    kv_rank: int


def check_inputs(
    q_latent: Tensor,
    kv_latent: Tensor,
    k_pos: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    rotary: RotaryTable,
    qk_head_dim: int,
    cu_seqlens: Tensor | None,
) -> Sizes:
    """The sizes. Raise MLAUpInputError unless the arguments of `mla_up` fit together, and
    MLARopeInputError, its base, for the table of angles."""
    layouts = {2: "(t, rank) of packed documents", 3: "(s, b, rank)"}
    if q_latent.dim() not in layouts or (q_latent.dim() == 2) != (cu_seqlens is not None):
        with_bounds = "without" if cu_seqlens is None else "with"
        raise MLAUpInputError(
            f"q_latent is {tuple(q_latent.shape)} {with_bounds} cu_seqlens; it must be "
            f"{layouts[3]}, or {layouts[2]} with cu_seqlens"
        )
    tokens = tuple(q_latent.shape[:-1])
    for name, x in (("kv_latent", kv_latent), ("k_pos", k_pos)):
        if tuple(x.shape[:-1]) != tokens or not x.shape[-1]:
            raise MLAUpInputError(
                f"{name} is {tuple(x.shape)}; with q_latent {tuple(q_latent.shape)} it must be "
                f"{(*tokens, '> 0')}"
            )
    sizes = _sizes(q_latent, kv_latent, k_pos, q_weight, kv_weight, qk_head_dim)
    tensors = {"q_latent": q_latent, "kv_latent": kv_latent, "k_pos": k_pos,
               "q_weight": q_weight, "kv_weight": kv_weight}  # fmt: skip
    if len({x.dtype for x in tensors.values()}) > 1:
        found = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise MLAUpInputError(f"{found}; they must have one dtype")
    if len(devices := {x.device for x in (*tensors.values(), *rotary)}) > 1:
        raise MLAUpInputError(
            f"{', '.join(tensors)}, cos and sin are on {', '.join(sorted(map(str, devices)))}; "
            "they must be on one device"
        )
    check_table(rotary, tokens[0], sizes.pos)
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        raise MLAUpInputError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}; it must be one row "
            "of integers"
        )
    return sizes


def _sizes(
    q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, q_weight: Tensor, kv_weight: Tensor,
    plain: int,
) -> Sizes:  # fmt: skip
    """The sizes by the weights' rows: q's tell how many heads there are, k and v's how wide v
    is."""
    pos, q_rank, kv_rank = k_pos.shape[-1], q_latent.shape[-1], kv_latent.shape[-1]
    head = plain + pos
    shape = tuple(q_weight.shape)
    if plain < 1 or len(shape) != 2 or shape[1] != q_rank or not shape[0] or shape[0] % head:
        raise MLAUpInputError(
            f"q_weight is {shape}; with qk_head_dim {plain} (1 or more), {pos} dims in k_pos and "
            f"a latent of {q_rank} it must be (heads * {head}, {q_rank})"
        )
    heads, shape = shape[0] // head, tuple(kv_weight.shape)
    v = shape[0] // heads - plain if shape else 0
    if len(shape) != 2 or shape[1] != kv_rank or v < 1 or shape[0] != heads * (plain + v):
        raise MLAUpInputError(
            f"kv_weight is {shape}; with {heads} heads, qk_head_dim {plain} and a latent of "
            f"{kv_rank} it must be ({heads} * ({plain} + v), {kv_rank})"
        )
    return Sizes(heads, plain, pos, v, q_rank, kv_rank)
