"""The launch configurations of mamba-ssm's Mamba-3 kernels, by GPU and sizes.

(compute capability, state dim N, head dim P, chunk size) -> kernel ("module:name" in
mamba_ssm.ops.triton.mamba3) -> arguments of `triton.Config`: the fastest on an H200 at B 2, S 4096,
56 heads, 8 groups, among upstream's own candidates with 1 to 3 stages, 2 to 8 warps, and either 256
registers or no limit.
"""

from typing import Any

PINNED: dict[tuple[tuple[int, int], int, int, int], dict[str, dict[str, Any]]] = {
    ((9, 0), 64, 64, 64): {
        "mamba3_siso_fwd:mamba3_siso_fwd_kernel": {
            "kwargs": {},
            "num_warps": 4,
            "num_stages": 3,
            "maxnreg": 256,
        },
        "mamba3_siso_bwd:mamba3_siso_bwd_kernel_dzdo": {
            "kwargs": {"CHUNK_SIZE": 64},
            "num_warps": 8,
            "num_stages": 2,
        },
        "mamba3_siso_bwd:mamba3_siso_bwd_kernel_dqkv": {
            "kwargs": {},
            "num_warps": 4,
            "num_stages": 3,
            "maxnreg": 256,
        },
        "mamba3_siso_bwd:mamba3_siso_bwd_kernel_rotary_bias_angles": {
            "kwargs": {},
            "num_warps": 8,
            "num_stages": 2,
        },
        "mamba3_siso_bwd:mamba3_siso_bwd_kernel_ddt_dtrap_dinput_states": {
            "kwargs": {"CHUNK_SIZE": 64},
            "num_warps": 4,
            "num_stages": 2,
        },
        "angle_dt:angle_dt_fwd_kernel": {"kwargs": {}, "num_warps": 8, "num_stages": 1},
        "angle_dt:angle_dt_bwd_kernel": {"kwargs": {}, "num_warps": 8, "num_stages": 1},
    }
}
