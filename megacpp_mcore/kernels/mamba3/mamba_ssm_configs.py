"""The launch configurations of mamba-ssm's Mamba-3 kernels, by GPU and sizes.

(compute capability, state dim N, head dim P, chunk size) -> kernel ("module:name" in
mamba_ssm.ops.triton.mamba3) -> arguments of `triton.Config`.
"""

from typing import Any

PINNED: dict[tuple[tuple[int, int], int, int, int], dict[str, dict[str, Any]]] = {}
