"""The process of one rank of `run_ranks`: runs a module, and ends when its launcher ends."""

import runpy
import sys

from megacpp_mcore.host.processes import end_children_with_this, end_with_parent


def main(launcher: str, module: str, *argv: str) -> None:
    """Run `python -m module argv...` in this process, a child of the process id `launcher`."""
    end_with_parent(int(launcher))
    end_children_with_this(int(launcher))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
