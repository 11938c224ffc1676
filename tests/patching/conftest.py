import contextlib
import os
import tempfile
from pathlib import Path

import fakelane
import pytest

from megacpp_mcore.patching import manifest


@pytest.fixture
def site(tmp_path):
    """A fake site-packages with nothing applied.

    In memory where that is possible: a kill is the same there, and syncing costs nothing.
    """
    with contextlib.ExitStack() as stack:
        if os.access("/dev/shm", os.W_OK):
            tmp_path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        yield fakelane.make_site(tmp_path / "site")


@pytest.fixture
def sets(lane, site):
    """(files without the lane, files with it); the site is left without it."""
    return fakelane.two_sets(lane, site)


@pytest.fixture
def lane(tmp_path):
    """The lane of alpha, beta and gamma."""
    return manifest.load(fakelane.make_lane(tmp_path / "lane"))


@pytest.fixture
def proving_lane(lane):
    """The same lane with reproducers that do show the defect: each looks for its own line."""
    for name, text in (
        ("alpha", "one = 333\n"),
        ("beta", "one = 1515\n"),
        ("gamma", "one = 3333\n"),
    ):
        (lane.lane / f"reproducers/{name}.py").write_text(fakelane.CHECKS.format(text=text))
    return manifest.load(lane.lane)
