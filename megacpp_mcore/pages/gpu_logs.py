"""The table of the GPU tests' logs."""

import collections
import re
from pathlib import Path

from megacpp_mcore.pages.tables import table


def gpu_tests(words: str, folder: Path) -> str:
    """The code that the logs of `tests/gpu/run.sh` are of, and a row for each. words: the
    folder of them, next to `folder`."""
    rows, logs_of = [], collections.Counter()
    place = folder.parent / words.strip()
    for path in sorted(place.glob("*.log")):
        lines = path.read_text().splitlines()
        of = re.search(r"commit (\S{1,12})\S*( \+ changes)?, tree (\S{12})", lines[0])
        code = f"commit {of[1]}{of[2] or ''}, tree {of[3]}"
        logs_of[code] += 1
        rows.append([
            f"[{path.stem}](examples/receipts/{place.name}/{path.name})", lines[-1],
            code, lines[1].partition(",")[0],
        ])  # fmt: skip
    if not rows:
        return "No log is committed."
    return f"{_origin(logs_of)}\n\n{table(['tests', 'outcome', 'code', 'machine'], rows)}"


def _origin(logs_of: collections.Counter[str]) -> str:
    """logs_of: the code -> the number of its logs. A tree is the package's, changes included: logs
    of one tree are of one code, from whichever commits their tests are."""
    if len(logs_of) == 1:
        return f"All are of one commit and tree: {next(iter(logs_of))}."
    each = "; ".join(f"{number} of {code}" for code, number in logs_of.most_common())
    if len(trees := {code.rpartition(" ")[2] for code in logs_of}) == 1:
        return f"All are of one tree of the package, {trees.pop()}: {each}."
    states = f"The logs are of {len(trees)} states of the package, {each}"
    return f"{states}: what passed on one may fail on another."
