"""Starting to train from a wheel must not run make where there is no Makefile."""

from pathlib import Path

from _common import CANNOT_RUN, DEFECT, RIGHT, hide_gpu, report, run


def main() -> int:
    hide_gpu()
    import numpy
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    if (folder / "Makefile").exists():
        return report(CANNOT_RUN, f"{folder} has a Makefile: a source checkout, not a wheel")
    if not list(folder.glob("helpers_cpp.*.so")):
        return report(CANNOT_RUN, f"{folder} has no compiled helper: not the wheel as it ships")
    try:
        utils.compile_helpers()
    except SystemExit as stop:
        return report(DEFECT, f"compile_helpers() ended the process with exit code {stop.code}")
    except FileNotFoundError as error:
        return report(DEFECT, f"compile_helpers() wants make: {error}")
    from megatron.core.datasets import helpers_cpp

    index = numpy.zeros(8, dtype=numpy.int16)
    sample = numpy.zeros(8, dtype=numpy.int64)
    helpers_cpp.build_blending_indices(index, sample, numpy.array([0.75, 0.25]), 2, 8, False)
    assert (index == 0).sum() == 6, f"blending 0.75/0.25 gave {index}"
    return report(RIGHT, "compile_helpers() left the shipped helper alone; it blends 6 of 8")


run(main)
