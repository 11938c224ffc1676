"""Every command of the README's tour runs, in order, in one folder, as a new user would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def tour() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_of_the_tour_runs(tmp_path):
    commands = tour()
    assert len(commands) >= 15
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
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
