"""`megacpp cuda`: build and install the packages of the extra `[cuda]`."""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

_EPILOG = """\
Wheels that are compiled stay in ~/.cache/megacpp-mcore/wheels (XDG_CACHE_HOME), by version, Python,
torch and architecture. An interrupted build goes on where it was. `make env-cuda` and
`make wheels-cuda` make the environment as well.

environment: CUDA_ARCHS (default: of the GPUs here), MAX_JOBS (default: a processor each, as far as
memory goes), CUDA_HOME, CXX.
"""


def register(subparsers: Any) -> None:
    """Add `cuda` with its commands."""
    parser = subparsers.add_parser(
        "cuda", help="build and install the packages for GPUs", epilog=_EPILOG
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    install = commands.add_parser(
        "install", help="into this Python, then doctor",
        description="Build what has no wheel, install the packages for GPUs at their pins into "
        "this Python, and examine the machine as `megacpp doctor` does.",
    )  # fmt: skip
    install.add_argument(
        "--wheels", type=Path, metavar="FOLDER",
        help="take every package from this folder; nothing is built, no network is used",
    )  # fmt: skip
    install.add_argument("--json", action="store_true", help="doctor's checks as a JSON list")
    install.set_defaults(run=run_install)
    wheels = commands.add_parser(
        "wheels", help="a folder of wheels, for machines without network",
        description="Build or fetch a wheel of each package for GPUs. This takes nvcc, no GPU.",
    )  # fmt: skip
    wheels.add_argument("--out", type=Path, metavar="FOLDER", required=True)
    wheels.set_defaults(run=run_wheels)
    for command in (install, wheels):
        command.add_argument(
            "--archs", default=os.environ.get("CUDA_ARCHS"), metavar="90",
            help="compute capabilities without the dot (default: CUDA_ARCHS, else the GPUs' here)",
        )  # fmt: skip
        command.add_argument(
            "--jobs", default=os.environ.get("MAX_JOBS"), metavar="N",
            help="files compiled at a time (default: MAX_JOBS, else by processors and memory)",
        )  # fmt: skip


def run_install(args: argparse.Namespace) -> int:
    """Install the packages; returns what doctor returns."""
    from megacpp_mcore import cli
    from megacpp_mcore.stack import cuda_packages, imports

    if not imports.has_driver():
        raise cuda_packages.CudaPackageError(
            "NVIDIA's driver (libcuda.so.1) is not on this machine, and without it Megatron cannot "
            "be imported with Transformer Engine: install where the GPUs are; `megacpp cuda "
            "wheels` builds the wheels for it here"
        )
    if args.wheels is None:
        folders = [wheel.parent for wheel in _build(args)]
    else:
        folders = [args.wheels]
        if absent := cuda_packages.missing(args.wheels):
            raise cuda_packages.CudaPackageError(
                f"{args.wheels} has no wheel of {', '.join(absent)}: `megacpp cuda wheels --out "
                "FOLDER` makes one of each"
            )
    cuda_packages.install(folders, network=args.wheels is None)
    return cli.main(["doctor", *(["--json"] if args.json else [])])


def run_wheels(args: argparse.Namespace) -> int:
    """Put a wheel of each package into the folder, and print its name."""
    from megacpp_mcore.stack import cuda_packages

    args.out.mkdir(parents=True, exist_ok=True)
    for wheel in _build(args):
        shutil.copy2(wheel, args.out)
    cuda_packages.fetch(args.out)
    print(args.out)
    return 0


def _build(args: argparse.Namespace) -> list[Path]:
    from megacpp_mcore.stack import cuda_build

    archs, jobs = cuda_build.architectures(args.archs), cuda_build.jobs(args.jobs)
    return cuda_build.build(archs, jobs, cuda_build.progress)
