"""Find the generated blocks of a page and fill them."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.pages import (
    bench_tables,
    catalog_tables,
    gpu_logs,
    key_tables,
    profile_table,
    run_tables,
)
from megacpp_mcore.pages.tables import RECEIPTS

Generator = Callable[[str, Path], str]  # (words of the block, folder of receipts) -> markdown
GENERATORS: dict[str, Generator] = {
    "runs": run_tables.runs,
    "pair": run_tables.pair,
    "benches": bench_tables.benches,
    "layouts": run_tables.layouts,
    "curves": run_tables.curves,
    "starts": run_tables.starts,
    "profile": profile_table.profile,
    "training": run_tables.training,
    "dispatch": bench_tables.dispatch,
    "gpu-tests": gpu_logs.gpu_tests,
    "keys": lambda words, receipts: key_tables.section(words),
    "backends": lambda words, receipts: catalog_tables.surfaces(),
}
_BLOCK = re.compile(r"(?P<head><!-- (?P<name>[\w-]+)(?P<words>.*?)-->\n).*?(?P<end><!-- end -->)",
                    re.DOTALL)  # fmt: skip


class PageError(MegacppError):
    """A block that no generator writes, or whose words one cannot read."""


@dataclass(frozen=True)
class Page:
    """A page of the checkout at `root`."""

    path: Path
    text: str
    root: Path

    @functools.cached_property
    def filled(self) -> str:
        """The text with every block filled, for which all receipts of the page are read."""
        return fill(self.text, self.path, self.root)


def fill(text: str, path: Path, root: Path) -> str:
    """`text` of the page `path` with each block generated; links are relative to the page."""

    def block(found: re.Match[str]) -> str:
        name, words = found["name"], found["words"].strip()
        if name not in GENERATORS:
            raise PageError(
                f"{path}: no generator {name!r}; there are {', '.join(sorted(GENERATORS))}"
            )
        try:
            body = GENERATORS[name](words, root / RECEIPTS)
        except (KeyError, IndexError, ValueError) as error:
            raise PageError(f"{path}: {name} {words}: {type(error).__name__}: {error}") from error
        receipts = RECEIPTS.rpartition("/")[0]
        body = body.replace(f"]({receipts}", f"]({_up(path, root)}{receipts}")
        return f"{found['head']}\n{body.strip()}\n\n{found['end']}"

    return _BLOCK.sub(block, text)


def prose(text: str) -> str:
    """A page without its generated blocks and its code blocks."""
    return re.sub(r"```.*?```", "", _BLOCK.sub("", text), flags=re.DOTALL)


def pages(root: Path) -> Iterator[Page]:
    """README.md and every page of docs/ of the checkout at `root`."""
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        yield Page(path, path.read_text(), root)


def _up(path: Path, root: Path) -> str:
    return "../" * (len(path.resolve().relative_to(root.resolve()).parts) - 1)
