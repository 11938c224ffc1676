"""Files that all workers of a run of the suite share: the first that needs one makes it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

_FOLDER = Path(os.environ["SUITE_FOLDER"])  # tests/conftest.py makes it, and removes it at the end


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The path of the file or folder `name`, which `make` wrote to the path that it was given.

    Others wait for the one that makes it; where it raises, the next one tries.
    """
    path, part = _FOLDER / name, _FOLDER / f"part-{name}"
    with open(_FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(part)
            part.rename(path)
    return path
