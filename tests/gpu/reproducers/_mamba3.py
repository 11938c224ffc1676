"""Inputs of mamba-ssm's Mamba-3 kernels on a GPU, and its functions as users call them."""

import sys
import traceback

import torch

BATCH, SEQ, HEADS, DIM, ANGLES = 2, 128, 4, 64, 16


def inputs(groups, rank):
    """By the name of mamba-ssm's arguments. rank: of MIMO; 0 is SISO."""
    torch.manual_seed(0)
    own = (rank,) if rank else ()

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()

    found = {
        "Q": normal(BATCH, SEQ, *own, groups, DIM), "K": normal(BATCH, SEQ, *own, groups, DIM),
        "V": normal(BATCH, SEQ, HEADS, DIM),
        "ADT": (-torch.rand(BATCH, HEADS, SEQ, device="cuda")).requires_grad_(),
        "DT": torch.rand(BATCH, HEADS, SEQ, device="cuda").requires_grad_(),
        "Trap": normal(BATCH, HEADS, SEQ),
        "Q_bias": normal(HEADS, *own, DIM, dtype=torch.float32),
        "K_bias": normal(HEADS, *own, DIM, dtype=torch.float32),
        "Angles": normal(
            BATCH, SEQ, HEADS, ANGLES, dtype=torch.float32 if rank else torch.bfloat16
        ),
        "D": normal(HEADS, dtype=torch.float32), "Z": normal(BATCH, SEQ, HEADS, DIM),
    }  # fmt: skip
    if rank:
        names = ("MIMO_V", "MIMO_Z", "MIMO_Out")
        found |= {name: normal(HEADS, rank, DIM, dtype=torch.float32) for name in names}
    return found


def siso(**tensors):
    """With the launch configurations of training: autotuning takes minutes in each process."""
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    from megacpp_mcore.kernels.mamba3.mamba_ssm_ops import set_up

    set_up(tensors["Q"].shape[-1], tensors["V"].shape[-1], chunk_size=64)
    return mamba3_siso_combined(**tensors, chunk_size=64)


def mimo(**tensors):
    from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo

    rank = tensors["Q"].shape[2]
    return mamba3_mimo(
        **tensors, chunk_size=64 // rank, rotary_dim_divisor=DIM // ANGLES, dtype=torch.bfloat16
    )


def run(main):
    """Exit with what main returns, or 3 where it raises."""
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(3)
