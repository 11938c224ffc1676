"""Every command of the README's tour runs, in order, in one folder, as a new user would.

But for the start of Python, which `warm` shares: `megacpp` stands first on the PATH.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import warm

from megacpp_mcore import receipts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def tour() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_of_the_tour_runs(tmp_path):
    commands = tour()
    assert len(commands) >= 15
    path = f"{warm.folder_of_megacpp()}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_")}
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment | {"PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command


def test_the_readme_shows_the_two_commands():
    assert "make train" in README and "make test" in README


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_table_of_times_is_its_receipts():
    """The row's own time, and the time beside it where that has a number of the same receipt."""
    lines = re.findall(r"\| ([\d.]+) \| ([^|]+) \| \[[^]]+\]\(([^)]+)\) \|", README)
    assert len(lines) >= 5
    for time, beside, path in lines:
        rows = receipts.read(ROOT / path)["rows"]
        medians = [row["median_ms"] for row in rows if row["phase"] == "forward_backward"]
        times = [time] if beside.startswith("(") else [time, beside.split(",")[0]]
        for claimed in times:
            digits = len(claimed.partition(".")[2])
            assert claimed in [f"{median:.{digits}f}" for median in medians], (path, claimed)
