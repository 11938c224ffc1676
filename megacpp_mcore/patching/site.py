"""Where a pinned package is installed, and whether its files may be patched there.

Nothing here imports the package: its version comes from its metadata, its files from the folder.
"""

import base64
import csv
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patching import PatchError


@dataclass(frozen=True)
class Installed:
    """One package found in one site-packages folder."""

    package: str
    version: str
    site: Path
    info: Path  # the .dist-info folder

    @property
    def reinstall(self) -> str:
        """The command that brings the wheel's own files back."""
        return f"pip install --force-reinstall --no-deps {self.package}=={self.version}"


def search_path() -> list[Path]:
    """The folders this interpreter imports from, in order."""
    return [Path(entry or os.getcwd()).resolve() for entry in sys.path]


def find(package: str, site: Path | None = None) -> Installed | None:
    """The package in the folder `site`; without one, in the first folder of this interpreter that
    has it. None when it is not installed.

    Raises PatchError when it is there in a form the lane does not patch: a development checkout
    (egg-info), an editable install, two versions recorded side by side, no RECORD.
    """
    for folder in search_path() if site is None else [site.resolve()]:
        infos = [
            folder / name
            for name in sorted(os.listdir(folder) if folder.is_dir() else ())
            if name.endswith((".dist-info", ".egg-info"))
            and re.sub(r"[-_.]+", "-", re.split(r"-|\.egg-info$", name)[0]).lower() == package
        ]
        if infos:
            return _installed(package, folder, infos)
    return None


def _installed(package: str, site: Path, infos: list[Path]) -> Installed:
    info = infos[0]
    wheels_only = (
        "the lane patches installed wheels only. Change the checkout itself, or install the wheel"
    )
    if len(infos) > 1:
        names = ", ".join(info.name for info in infos)
        raise PatchError(
            f"{package}: {site} records it {len(infos)} times ({names}): an install was broken "
            f"off; reinstall it first"
        )
    if info.suffix == ".egg-info":
        raise PatchError(f"{package}: {info} is a development checkout; {wheels_only}")
    distribution = importlib.metadata.Distribution.at(info)
    name = "METADATA"
    try:
        version = distribution.version
        name = "direct_url.json"
        direct_url = json.loads(distribution.read_text(name) or "{}")
        editable = direct_url.get("dir_info", {}).get("editable", False)
    except (ValueError, AttributeError) as error:
        raise PatchError(f"{package}: {info}/{name}: cannot be read: {error}") from error
    if editable:
        url = direct_url.get("url")
        raise PatchError(f"{package}: is an editable install of {url}; {wheels_only}")
    if not (info / "RECORD").is_file():
        raise PatchError(
            f"{package}: {info} has no RECORD, so neither pip nor uv installed it and nothing says "
            f"which files are its own; install the wheel"
        )
    return Installed(package, version, site, info)


def check_inside(site: Path, package: str, paths: Iterable[str]) -> None:
    """Refuse a file that is a link, or outside the site because a folder on its path is one."""
    for file in (site / path for path in paths):
        if file.resolve() != file:
            raise PatchError(
                f"{package}: {file} is a link to {file.resolve()}: patching it would change a file "
                f"outside {site}. Reinstall with real files (uv: --link-mode=copy)"
            )


def shadowed(installed: Installed, paths: Iterable[str]) -> str:
    """Why this interpreter would import one of `paths` from elsewhere, "" when from `installed`.

    Looks for the outermost regular package around each file, as the import system does: a checkout
    earlier on the path hides the whole package, even a file it does not have.
    """
    earlier = list(itertools.takewhile(lambda folder: folder != installed.site, search_path()))
    for path in paths:
        markers = [parent / "__init__.py" for parent in reversed(Path(path).parents)][1:]
        marker = next((m for m in markers if (installed.site / m).is_file()), Path(path))
        for folder in earlier:
            if (folder / marker).is_file():
                return (
                    f"{installed.package} is installed in {installed.site}, but this interpreter "
                    f"imports {path} from {folder}, which the lane does not patch; take it off "
                    f"PYTHONPATH, or name the folder with --site"
                )
    return ""


class Record:
    """A package's RECORD by its rows. path: its own, below the site. rows: path -> its line."""

    def __init__(self, installed: Installed) -> None:
        self.path = f"{installed.info.name}/RECORD"
        text = (installed.site / self.path).read_bytes().decode("utf-8", "surrogateescape")
        self._lines = [
            ((next(csv.reader([line])) or [""])[0], line) for line in io.StringIO(text).readlines()
        ]
        self._end = "\r\n" if self._lines and self._lines[0][1].endswith("\r\n") else "\n"
        self.rows = dict(self._lines)

    def row(self, path: str, data: bytes | None) -> str | None:
        """The line for a file with these bytes (PEP 376, urlsafe base64); None for no file."""
        if data is None:
            return None
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        text = io.StringIO()
        csv.writer(text, lineterminator=self._end).writerow((path, f"sha256={digest}", len(data)))
        return text.getvalue()

    def with_rows(self, rows: Mapping[str, str | None]) -> bytes:
        """The bytes with some rows replaced: path -> its new line, or None to take it out.

        A path without a row is added first, so that taking it out again restores the bytes even of
        a RECORD whose last line has no end.
        """
        rest = dict(rows)
        kept = [rest.pop(path, line) for path, line in self._lines]
        lines = [line for line in [*rest.values(), *kept] if line is not None]
        return "".join(lines).encode("utf-8", "surrogateescape")
