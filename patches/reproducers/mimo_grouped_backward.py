"""Mamba-3 MIMO's backward must serve 1 < groups < heads, as its forward does.

tilelang needs a GPU, so its two backward kernels, which return a gradient per head, are replaced by
functions that write known numbers. The code after them, which sums the heads of a group, is tested.
"""

import os

from _common import DEFECT, RIGHT, hide_gpu, report, run
from _mamba import (
    stand_in_for_selective_scan,
    stand_in_for_tilelang,
    stand_in_for_unrelated_packages,
)

B, S, R, H, N, P, CHUNK = 2, 8, 2, 6, 4, 4, 4


def main() -> int:
    hide_gpu()
    os.environ["TRITON_INTERPRET"] = "1"  # upstream sums the groups with Triton
    import torch

    torch.manual_seed(0)
    per_head = {"q": torch.randn(B, S * R, H, N), "k": torch.randn(B, S * R, H, N)}

    def bwd_bwd(*problem, **more):
        def kernel(*tensors) -> None:
            dk, dq = tensors[8], tensors[12]
            assert dk.shape == dq.shape == (B, S * R, H, N), "the kernel's signature has changed"
            dq.copy_(per_head["q"])
            dk.copy_(per_head["k"])

        return kernel

    stand_in_for_unrelated_packages()
    stand_in_for_selective_scan()
    stand_in_for_tilelang(
        {
            "mamba_mimo_bwd_fwd": lambda *problem, **more: lambda *tensors: None,
            "mamba_mimo_bwd_bwd": bwd_bwd,
        }
    )
    ran = []
    for groups in (1, 2, 3, H):
        for name, backward in (("fixed", fixed_length), ("varlen", variable_length)):
            try:
                results = backward(groups)
            except ValueError as error:
                if str(error) != f"G value of {groups} is not currently supported!":
                    raise
                return report(DEFECT, f"{name} length, {H} heads, {groups} groups: {error}")
            check(results, per_head, groups)
            ran.append(f"{name} G={groups}")
    return report(RIGHT, f"{H} heads: gradients are the groups' sums for {', '.join(ran)}")


def check(results, per_head, groups: int) -> None:
    """dQ and dK summed over the heads that share a group, the biases' over batch and sequence."""
    for (grad, bias), name in (((results[0], results[6]), "q"), ((results[1], results[7]), "k")):
        heads = per_head[name].view(B, S, R, H, N)
        assert grad.shape == (B, S, R, groups, N)
        for group, members in enumerate(heads.chunk(groups, dim=3)):
            # a sum of at most 6 numbers of order 1 in fp32
            assert (grad[..., group, :] - members.sum(3)).abs().max() < 1e-5
        # and of 16 for the biases [heads, rank, channels]
        assert (bias - heads.sum((0, 1)).transpose(0, 1)).abs().max() < 1e-5


def arguments(groups: int) -> tuple:
    import torch

    q = torch.randn(B, S, R, groups, N)
    v, per_head_scalar = torch.randn(B, S, H, P), torch.randn(B, H, S)
    bias, mimo = torch.randn(H, R, N), torch.randn(H, R, P)
    angles, segsum = torch.randn(B, S, H, N // 4), torch.randn(B, H, S // CHUNK, CHUNK, CHUNK)
    dout = torch.randn(B, S, H, P)
    return (
        *(dout, q, q, v, bias, bias, mimo, mimo, v, mimo, angles),
        *(per_head_scalar, per_head_scalar, per_head_scalar, per_head_scalar),
        *(torch.randn(H), segsum, CHUNK, 4, torch.float32),
    )


def fixed_length(groups: int) -> tuple:
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd as module

    module.bwd_dtrap_ddt_triton = lambda trap, *rest: (trap, trap)
    module.bwd_dadt_fused_triton = lambda *tensors: tensors[2]
    return module.mamba_mimo_bwd_combined(*arguments(groups))


def variable_length(groups: int) -> tuple:
    import torch
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd_varlen as module

    module.bwd_dtrap_ddt_triton_varlen = lambda trap, *rest: (trap, trap)
    module.bwd_dadt_fused_triton_varlen = lambda *tensors: tensors[2]
    cu_seqlens = torch.tensor([0, S], dtype=torch.int32)
    return module.mamba_mimo_bwd_combined_varlen(*arguments(groups), cu_seqlens=cu_seqlens)


run(main)
