"""An empty environment with a wheel and what its metadata asks for, and nothing else.

pip would fetch 5 GB; here the same distributions are linked from the environment of the tests.
"""

import os
import subprocess
import sys
import venv
from collections import defaultdict
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def install(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Make an environment in `folder`. Returns its Python and its site-packages.

    wheel: installed with the distributions that it requires, and those that they require, without
    extras that nobody asks for. Raises LookupError for one that the tests' environment lacks.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install",
         "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    (own,) = metadata.distributions(path=[str(site)])
    link(required(own), site)
    return folder / "bin" / "python", site


def required(distribution: metadata.Distribution) -> set[str]:
    """The names of all distributions that `distribution` needs, itself left out."""
    found: set[tuple[str, str]] = set()
    todo = [(distribution, "")]
    while todo:
        asking, extra = todo.pop()
        for requirement in map(Requirement, asking.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for wanted in ("", *requirement.extras):
                key = (canonicalize_name(requirement.name), wanted)
                if key not in found:
                    found.add(key)
                    todo.append((metadata.distribution(requirement.name), wanted))
    return {name for name, _ in found}


def link(names: set[str], site: Path) -> None:
    """Link the files of installed distributions into `site`, whole folders where one owns them."""
    files, owners = {}, defaultdict(set)
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        kept = [p for p in map(PurePosixPath, distribution.files or ())
                if p.parts[0] not in ("..", "__pycache__") and not p.is_absolute()]  # fmt: skip
        root = Path(distribution.locate_file(""))
        files.setdefault(name, (root, kept))
        for path in kept:
            for part in (path, *path.parents):
                owners[part].add(name)
    for name in names:
        root, paths = files[name]
        for path in paths:
            whole = [path, *path.parents][:-1]  # but for the site itself
            place = next((p for p in reversed(whole) if owners[p] == {name}), path)
            if not (site / place).is_symlink():
                (site / place).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(root / place, site / place)
