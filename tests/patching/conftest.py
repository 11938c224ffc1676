import fakelane
import pytest

from megacpp_mcore.patching import manifest


@pytest.fixture
def site(tmp_path):
    """A fake site-packages with nothing applied."""
    return fakelane.make_site(tmp_path / "site")


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
