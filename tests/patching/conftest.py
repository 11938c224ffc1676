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
