"""The launch configurations of mamba-ssm's Mamba-3 kernels, by GPU and sizes.

Upstream's kernels autotune over up to 81 candidates each, minutes on their first call. On Hopper
they get, for state and head dims of up to 64, one: the fastest on an H200 at B 2, S 4096, 56 heads,
8 groups, N = P = 64, among upstream's own candidates with 1 to 3 stages, 2 to 8 warps, and either
256 registers or no limit. For larger dims the two kernels that hold a whole state, which with three
stages ask for more shared memory than there is, have a few candidates, and the others the same one.
"""

from typing import Any

_CAPABILITY, _CHUNK, _DIM = (9, 0), 64, 64
_FORWARD = "mamba3_siso_fwd:mamba3_siso_fwd_kernel"
_BACKWARD = "mamba3_siso_bwd:mamba3_siso_bwd_kernel_dqkv"
# kernel ("module:name" in mamba_ssm.ops.triton.mamba3) -> arguments of `triton.Config`
_FASTEST: dict[str, dict[str, Any]] = {
    _FORWARD: {"kwargs": {}, "num_warps": 4, "num_stages": 3, "maxnreg": 256},
    _BACKWARD: {"kwargs": {}, "num_warps": 4, "num_stages": 3, "maxnreg": 256},
    "mamba3_siso_bwd:mamba3_siso_bwd_kernel_dzdo": {
        "kwargs": {"CHUNK_SIZE": 64}, "num_warps": 8, "num_stages": 2,
    },
    "mamba3_siso_bwd:mamba3_siso_bwd_kernel_rotary_bias_angles": {
        "kwargs": {}, "num_warps": 8, "num_stages": 2,
    },
    "mamba3_siso_bwd:mamba3_siso_bwd_kernel_ddt_dtrap_dinput_states": {
        "kwargs": {"CHUNK_SIZE": 64}, "num_warps": 4, "num_stages": 2,
    },
    "angle_dt:angle_dt_fwd_kernel": {"kwargs": {}, "num_warps": 8, "num_stages": 1},
    "angle_dt:angle_dt_bwd_kernel": {"kwargs": {}, "num_warps": 8, "num_stages": 1},
}  # fmt: skip
_WIDE: tuple[dict[str, Any], ...] = (
    {"kwargs": {}, "num_warps": 4, "num_stages": 1, "maxnreg": 256},
    {"kwargs": {}, "num_warps": 4, "num_stages": 2, "maxnreg": 256},
    {"kwargs": {}, "num_warps": 8, "num_stages": 1},
    {"kwargs": {}, "num_warps": 8, "num_stages": 2},
)
KERNELS = tuple(_FASTEST)


def configurations(
    kernel: str, capability: tuple[int, int], state_dim: int, head_dim: int, chunk_size: int
) -> tuple[dict[str, Any], ...] | None:
    """Those that `kernel`, one of KERNELS, chooses among, or None for upstream's own candidates."""
    if (capability, chunk_size) != (_CAPABILITY, _CHUNK):
        return None
    if kernel in (_FORWARD, _BACKWARD) and max(state_dim, head_dim) > _DIM:
        return _WIDE
    return (_FASTEST[kernel],)
