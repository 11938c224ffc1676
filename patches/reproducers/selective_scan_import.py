"""mamba_ssm must be importable without its CUDA extension, which only Mamba-1 uses."""

import sys

from _common import DEFECT, RIGHT, first_line, hide_gpu, report, run
from _mamba import stand_in_for_unrelated_packages

EXTENSION = "selective_scan_cuda"


def main() -> int:
    hide_gpu()
    import torch

    sys.modules[EXTENSION] = None  # not there, also where it is installed
    stand_in_for_unrelated_packages()
    try:
        import mamba_ssm
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            raise
        return report(DEFECT, f"import mamba_ssm: {error}")
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    u, delta = torch.randn(2, 1, 4, 8)
    a, (b, c) = torch.randn(4, 2), torch.randn(2, 1, 2, 8)
    try:
        mamba_ssm.selective_scan_fn(u, delta, a, b, c)
    except (ModuleNotFoundError, RuntimeError) as error:  # upstream's is a RuntimeError
        assert EXTENSION in str(error) and callable(mamba3_siso_combined)
        said = first_line(error)
        return report(RIGHT, f"mamba_ssm and Mamba-3 imported; Mamba-1's scan says: {said}")
    raise AssertionError("Mamba-1's scan ran without its extension")


run(main)
