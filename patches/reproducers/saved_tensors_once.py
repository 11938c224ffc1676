"""Mamba-3's backward must read its saved tensors once, or non-reentrant checkpointing refuses it.

The kernels need a GPU, so functions that return the right number of gradients replace them. The
autograd.Function itself runs under torch.utils.checkpoint.
"""

import inspect

from _common import DEFECT, RIGHT, hide_gpu, report, run
from _mamba import (
    stand_in_for_selective_scan,
    stand_in_for_tilelang,
    stand_in_for_unrelated_packages,
)


def main() -> int:
    hide_gpu()
    stand_in_for_unrelated_packages()
    stand_in_for_selective_scan()
    stand_in_for_tilelang({})
    import torch
    from torch.utils.checkpoint import CheckpointError, checkpoint

    seen = {}
    for name, function in (("SISO", siso()), ("MIMO", mimo())):
        value = torch.randn(3, requires_grad=True)
        try:
            checkpoint(function, value, use_reentrant=False).sum().backward()
            seen[name] = "gradient 7" if value.grad.tolist() == [7.0] * 3 else f"{value.grad}"
        except CheckpointError as error:
            seen[name] = str(error).split(": ", 1)[-1].split(". ")[0]
    right = set(seen.values()) == {"gradient 7"}
    saw = "; ".join(f"{name}: {what}" for name, what in seen.items())
    return report(RIGHT if right else DEFECT, saw)


def siso():
    """_Mamba3Function of the Triton kernels as a function of V, whose gradient is 7."""
    import torch
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined as module

    one = torch.ones(3)
    module.angle_dt_fwd = lambda *args, **kwargs: (one, one)
    module.mamba3_siso_fwd = lambda q, k, v, *args, **kwargs: (v * 7, *(one,) * 9, None)
    module.compute_dqkv = lambda do, **kwargs: (one, one, do * 7, one, one, None, None)
    module.compute_dqktheta = lambda **kwargs: (one,) * 7
    module.compute_ddt_dtrap_dinput_states = lambda **kwargs: (one,) * 5
    module.angle_dt_bwd = lambda **kwargs: (one,) * 3
    return lambda value: module._Mamba3Function.apply(
        *(one, one, value, *(one,) * 6), *(None,) * 7, 64, False
    )


def mimo():
    """The same of the tilelang kernels."""
    import torch
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo as module

    one = torch.ones(3)
    names = list(inspect.signature(module._Mamba3Function.forward).parameters)[1:]
    given = {"chunk_size": 64, "rotary_dim_divisor": 4, "dtype": torch.float32, "cu_seqlens": None}
    given |= {"return_state": False, "fuse_pregate_headwise_rms_norm": False}
    given |= {"Out_Norm_Weight": None, "outproj_norm_eps": 1e-5}
    rest = 11 + ("Out_Norm_Weight" in names)  # gradients of the operands behind V

    def backward(dout, *args, **kwargs) -> tuple:
        return one, one, dout * 7, *(one,) * rest

    module.angle_dt_fwd = lambda *args, **kwargs: (one, one)
    module.compute_dacs_segsum_triton = lambda *args: (one,) * 3
    module.mamba_mimo_forward = lambda q, k, v, *args, **kwargs: (v * 7, None, None)
    module.mamba_mimo_bwd_combined = backward
    module.angle_dt_bwd = lambda **kwargs: (one,) * 3
    return lambda value: module._Mamba3Function.apply(
        *(value if name == "V" else given.get(name, one) for name in names)
    )


run(main)
