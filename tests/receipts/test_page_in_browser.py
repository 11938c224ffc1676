"""`megacpp report html` in a browser: nothing is loaded, nothing is cut off, everything can be read
on a desk and on a phone, by day and by night.

MEGACPP_SCREENSHOTS=FOLDER keeps a picture of each.
"""

import json
import os
from pathlib import Path

import browser
import pytest
import receipt_samples as samples

from megacpp_mcore.cli import main
from megacpp_mcore.receipts import read, write

PROGRAM = browser.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium (MEGACPP_BROWSER, or on the PATH)"),
]
DESK, PHONE = (1280, 900, False), (390, 844, True)
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3 (AA), of text; 3 of a curve (1.4.11)
LEAST_TEXT_PX = 10.5

SEEN = (Path(__file__).parent / "page_as_seen.js").read_text()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = browser.Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A page of two runs whose names and reasons try to be markup."""
    folder = tmp_path_factory.mktemp("page")
    for name, ms in (("a", 900.0), ("b", 450.0)):
        (folder / name).mkdir()
        samples.train(folder / name / "receipt.json", ms=ms)
    nasty = json.loads(json.dumps(read(folder / "b" / "receipt.json")))
    nasty["recipe"]["name"] = "<img src=x onerror='document.title=1'>"
    nasty["result"] |= {"mfu": 0.4825, "tflops_per_s_per_device": 477.4}
    nasty["notes"] = ["a note that is longer than a screen is wide, " * 8]
    nasty["backends"][0]["reason"] = "<script>document.title = 1</script>" + "long" * 60
    write(folder / "b" / "receipt.json", nasty)
    out = folder / "page.html"
    assert main(["report", "html", str(folder / "a"), str(folder / "b"), "--out", str(out)]) == 0
    return out.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height", "phone"), [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_is_read_without_effort(chromium, url, width, height, phone, scheme):
    chromium.open(url, width, height, scheme, phone)
    if folder := os.environ.get("MEGACPP_SCREENSHOTS"):
        chromium.screenshot(Path(folder, f"{'phone' if phone else 'desk'}-{scheme}.png"))
    seen = chromium.run(SEEN)
    assert seen["across"] <= seen["width"] == width, "the page scrolls sideways"
    shown = [text for text in seen["texts"] if not text["closed"]]
    assert len(shown) > 50
    small = [t for t in shown if t["px"] < LEAST_TEXT_PX]
    pale = [t for t in shown if t["contrast"] < LEAST_CONTRAST]
    outside = [
        t for t in shown if t["cut"] or not (t["scrolls"] or 0 <= t["left"] < t["right"] <= width)
    ]
    empty = [t for t in shown if not (t["wide"] and t["tall"])]
    assert (small, pale, outside, empty) == ([], [], [], [])
    (reason,) = {t["wide"] for t in shown if t["text"].startswith("<script>")}
    assert reason >= 200, "a sentence in a narrow column is a tower of words"
    names = [t for t in shown if t["names"]]
    assert len(names) == 2 and all(t["cell"] >= 160 for t in names)
    assert {t["lines"] for t in shown if t["text"] == "complete"} == {1}
    lettering = [t for t in shown if t["text"].startswith(("unigram", "bigram"))]
    assert len(lettering) == 2 and all(t["halo"] for t in lettering), "a curve crosses words"
    assert phone or seen["summary"] == 0, "the table of runs goes on beyond the screen"
    assert phone or not [t for t in shown if t["cropped"]], "a line goes on beyond the screen"
    assert len(seen["curves"]) >= 4
    assert all(curve["wide"] > 50 and curve["contrast"] >= 3 for curve in seen["curves"])
    assert (sum(seen["canvas"][:3]) < 3 * 64) == (scheme == "dark")


def test_nothing_is_loaded_and_nothing_runs(chromium, url):
    chromium.open(url, *DESK[:2], "light", False)
    asked = [p["request"]["url"] for m, p in chromium.events if m == "Network.requestWillBeSent"]
    assert asked == [url]
    said = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
    assert [params for method, params in chromium.events if method in said] == []
    assert chromium.run("document.title").endswith("/b")


def test_what_is_folded_opens(chromium, url):
    chromium.open(url, *PHONE[:2], "light", True)
    before = chromium.run("document.documentElement.scrollHeight")
    chromium.run("document.querySelectorAll('summary').forEach(s => s.click())")
    assert chromium.run("document.documentElement.scrollHeight") > before + 500
    assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
