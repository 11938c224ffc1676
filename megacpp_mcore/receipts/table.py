"""The table of committed receipts: what claims each, of what code it is, and its kernels."""

import re
from pathlib import Path

from megacpp_mcore.receipts.reader import Receipt, observed, read

_HEAD = """\
# Receipts

`make docs` writes this page from the receipts;
`examples/rerun_receipts.sh GPUS DATA_PREFIX` measures them again.

A receipt is evidence of the code that it names: `tree` is git's id of `megacpp_mcore/`, `commit`
the checkout it ran from, `+ changes` that this had changes which the commit has not.

| receipt | of | claimed by | measured | code | kernels |
|---|---|---|---|---|---|
"""


def table(folder: Path, others: dict[str, list[str]]) -> str:
    """The page for `folder`, a checkout's examples/receipts. Claims are links of README.md and of
    docs/. others: receipt's file name -> what else takes figures from it; of the catalog,
    docs/kernels.md has those."""
    pages = _pages(folder.resolve().parents[1])
    rows = []
    for path in sorted(folder.rglob("*.json")):
        receipt, place = read(path), path.relative_to(folder).as_posix()
        claims = [name for name, text in pages.items() if _is_linked(place, text)]
        claims += others.get(place.partition("/")[2], [])
        cells = [
            f"[{place.removesuffix('.json')}]({place})", _subject(receipt),
            ", ".join(claims) or "nothing", receipt["created"][:10], _code(receipt),
            ", ".join(f"{surface} {name}" for surface, name in observed(receipt).items()),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return _HEAD + "\n".join(rows) + "\n"


def _pages(root: Path) -> dict[str, str]:
    """What README and each page of docs/ say; catalog's own page is left out."""
    docs = {path.stem: path for path in sorted((root / "docs").glob("*.md"))}
    docs.pop("kernels", None)
    paths = {"README": root / "README.md", **{f"docs/{stem}": p for stem, p in docs.items()}}
    return {name: path.read_text() for name, path in paths.items() if path.is_file()}


def _is_linked(place: str, page: str) -> bool:
    folders = [f"{parent}" for parent in Path(place).parents][:-1]
    return any(re.search(rf"receipts/{re.escape(one)}\)", page) for one in (place, *folders[:-1]))


def _subject(receipt: Receipt) -> str:
    lane, recipe = receipt["lane"]["device"], receipt["recipe"]
    name = recipe["name"] if recipe else "no recipe"
    if receipt["kind"] == "run":
        ranks = receipt["topology"]["world_size"]
        return f"{receipt['result']['steps']} steps of {name}, {ranks} x {lane['name']}"
    return f"{receipt['problem']['surface']} of {name}, {lane['name']}"


def _code(receipt: Receipt) -> str:
    code = receipt["code"]
    changes = " + changes" if code["dirty"] else ""
    found = [f"commit {code['commit'][:12]}{changes}"] if code["commit"] else []
    found += [f"tree {code['tree'][:12]}"] if "tree" in code else []
    return ", ".join([*found, f"sha256 {code['sha256'][:12]}"])
