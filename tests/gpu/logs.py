"""From the notes of a run of the GPU tests (conftest.py) a log for each file, and a line for all.

python tests/gpu/logs.py NOTES FOLDER: what is to stand above each log is read from stdin. The exit
status is 1 where a test failed or was not run.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PRINTED = 600  # characters of what a test that passed has printed
_PRINTED_BY_FAILED = 3000


@dataclass
class Test:
    outcome: str = "not run"
    s: float = 0.0
    said: str = ""
    printed: str = ""

    def add(self, when: str, outcome: str, s: float, said: str, printed: str) -> None:
        """Another phase of it. It has passed when its call has: one whose time is up in its call
        was set up only. A failure in any phase is the test's; a crash is told after the report."""
        ranks = ("not run", "passed", "skipped", "failed")
        if outcome != "passed" or when == "call":
            self.outcome = max(self.outcome, outcome, key=ranks.index)
        self.s += s
        self.said = "\n".join(filter(None, (self.said, said)))
        self.printed += printed


def read(notes: Path) -> dict[str, dict[str, Test]]:
    """Test by name, by file."""
    files: dict[str, dict[str, Test]] = {}
    for line in notes.read_text().splitlines():
        found = json.loads(line)
        for node in found.get("collected", ()):
            file, _, name = node.partition("::")
            files.setdefault(file, {}).setdefault(name, Test())
        if "id" in found:
            file, _, name = found.pop("id").partition("::")
            files.setdefault(file, {}).setdefault(name, Test()).add(**found)
    return files


def counts(tests: list[Test]) -> str:
    found = Counter(test.outcome for test in tests)
    words = [f"{found[name]} {name}" for name in ("passed", "skipped", "failed", "not run")
             if found[name]]  # fmt: skip
    return f"{', '.join(words) or 'no tests'}, {sum(test.s for test in tests):.0f} s of tests"


def relative(text: str) -> str:
    """With paths of this checkout as they are in any other."""
    return text.replace(f"{ROOT}/", "")


def log(head: str, tests: dict[str, Test]) -> str:
    lines = [head.rstrip(), ""]
    for name, test in sorted(tests.items()):
        why = f": {test.said}" if test.outcome == "skipped" else ""
        lines.append(f"{test.outcome:8}{test.s:7.1f} s  {name}{why}")
        if test.outcome == "passed" and test.printed.strip():
            lines += [f"    {line}" for line in test.printed.strip()[-_PRINTED:].splitlines()]
    for name, test in sorted(tests.items()):
        if test.outcome == "failed":
            lines += ["", f"---- {name}", test.said]
            if printed := test.printed.strip()[-_PRINTED_BY_FAILED:]:
                lines += ["-- printed, at its end:", printed]
    return relative("\n".join([*lines, "", counts([*tests.values()]), ""]))


def main(notes: str, folder: str) -> int:
    head, files = sys.stdin.read(), read(Path(notes))
    for file, tests in sorted(files.items()):
        (Path(folder) / f"{Path(file).stem}.log").write_text(log(head, tests))
        print(f"{Path(file).stem}: {counts([*tests.values()])}")
    every = [test for tests in files.values() for test in tests.values()]
    print(f"all: {counts(every)}")
    return int(not every or any(test.outcome in ("failed", "not run") for test in every))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
