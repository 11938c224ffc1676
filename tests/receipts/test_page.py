"""`megacpp report html` and `report watch`: a page that needs nothing else, and a run followed."""

import json
import math
import os
import re
import threading
import time
from html.parser import HTMLParser

import pytest
import receipt_samples as samples

from megacpp_mcore.cli import main
from megacpp_mcore.receipts import ReceiptError, read, write
from megacpp_mcore.receipts.follow import follow
from megacpp_mcore.receipts.html import page

VOID = {"meta", "path", "polyline", "circle", "br"}


class Strict(HTMLParser):
    """Raises AssertionError where a tag is not closed, or something is loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not {"src", "href", "srcset", "onclick", "onload"} & dict(attributes).keys()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert tag not in VOID and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == [] and text.startswith("<!DOCTYPE html>")
    assert "@import" not in text and "url(" not in text and "http" not in text.lower()
    return parser


@pytest.fixture
def two(tmp_path):
    """Folders of two runs, the second twice as fast."""
    for name, ms in (("a", 900.0), ("b", 450.0)):
        (tmp_path / name).mkdir()
        samples.train(tmp_path / name / "receipt.json", ms=ms)
    return tmp_path / "a", tmp_path / "b"


def test_a_page_stands_alone_and_has_everything(two, capsys):
    first, second = two
    assert main(["report", "html", str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    text = (first / "report.html").read_text()
    parser = parsed(text)
    receipt, said = read(first / "receipt.json"), "".join(parser.texts)
    for decision in receipt["backends"]:
        assert decision["reason"] in said and decision["surface"] in said
    for word in ("Training loss", "verdict: ", "rule: margin", "Environment", "Recipe", "useful"):
        assert word in said, word
    assert f"{receipt['result']['steps']:,}" in said
    assert "prefers" in text or "color-scheme: light dark" in text
    assert 'name="viewport"' in text
    curves = [attributes for tag, attributes in parser.tags if tag == "polyline"]
    assert len(curves) >= 4 and len({c["stroke"] for c in curves}) == 2


def test_a_curve_goes_through_its_values(two):
    run = read(two[0] / "receipt.json")
    text = page([("a", run)])
    points = re.search(r'points="([^"]+)"', text)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    losses = run["series"]["loss"]
    assert len(heights) == len(losses)
    order = sorted(range(len(losses)), key=losses.__getitem__)
    assert heights[order[0]] == max(heights) and heights[order[-1]] == min(heights)
    span, tall = max(losses) - min(losses), max(heights) - min(heights)
    for loss, height in zip(losses, heights, strict=True):
        assert height - min(heights) == pytest.approx((max(losses) - loss) / span * tall, abs=0.11)


def test_times_are_those_of_warm_steps_and_what_no_run_has_has_no_column(two):
    """The first step compiles: on one scale with it all others are on the ground."""
    run = read(two[0] / "receipt.json")
    said = parsed(page([("a", run)])).texts
    top = said[said.index("Time of a step, ms, warm steps") + 1]
    assert float(top) == pytest.approx(max(run["series"]["ms"][1:]), rel=1e-3)
    assert "tokens/s" in said and "MFU" not in said
    run["result"]["mfu"] = 0.5
    said = parsed(page([("a", run), ("b", read(two[1] / "receipt.json"))])).texts
    assert "MFU" in said


def test_the_corpuss_entropies_are_levels_of_the_training_loss(two):
    run = read(two[0] / "receipt.json")
    losses = run["series"]["loss"]
    run["result"] |= {"unigram_entropy": max(losses) + 1.0, "bigram_entropy": min(losses)}
    text = page([("a", run)])
    said = "".join(parsed(text).texts)
    assert f"unigram entropy {max(losses) + 1:.4g}"[:20] in said and "bigram entropy" in said
    upper, lower = (float(y) for y in re.findall(r'd="M60 ([\d.]+)H392"[^>]*dasharray', text))
    heights = [float(p.split(",")[1]) for p in re.search(r'points="([^"]+)"', text)[1].split()]
    assert upper < min(heights) and lower == max(heights)
    other = json.loads(json.dumps(run))
    other["result"]["unigram_entropy"] = None
    unlike = page([("a", run), ("b", other)]).split("<h2>")[0]
    assert "dasharray" not in unlike


def test_a_page_of_a_run_without_a_loss_or_a_step(tmp_path, capsys):
    receipt, out = tmp_path / "r.json", tmp_path / "a.html"
    run = samples.start(receipt)
    run.write()
    assert main(["report", "html", str(receipt), "--out", str(out)]) == 0
    run.step(1, tokens=8, ms=1.0, loss=math.nan)
    run.write()
    assert main(["report", "html", str(receipt), "--out", str(out)]) == 0
    parsed(out.read_text())
    assert main(["report", "html", str(receipt), "--out", str(out / "b.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_names_are_text(two):
    run = json.loads(json.dumps(read(two[0] / "receipt.json")))
    run["recipe"]["name"] = "<script>alert(1)</script>"
    run["backends"][0]["reason"] = "a < b & \"c\" 'd'"
    parser = parsed(page([("<img src=x>", run)]))
    assert "a < b & \"c\" 'd'" in "".join(parser.texts)


def test_what_is_no_run_is_refused(tmp_path, two, capsys):
    write(tmp_path / "bench.json", samples.bench(te=0.9))
    assert main(["report", "html", str(tmp_path / "bench.json")]) == 2
    assert "is a bench; a page is of runs" in capsys.readouterr().err
    assert main(["report", "html", str(tmp_path / "nowhere")]) == 2


def test_a_run_is_followed_until_it_ends(two, tmp_path):
    run = tmp_path / "live"
    (run / "heartbeat").mkdir(parents=True)
    receipt = json.loads(json.dumps(read(two[0] / "receipt.json")))
    beat = run / "heartbeat" / "rank-0.json"
    beat.write_text(json.dumps({"count": 3, "doing": "in step 4", "at": 0, "host": "h"}))
    (run / "heartbeat" / "rank-1.json").write_text(
        json.dumps({"count": 2, "doing": "saving after step 3", "at": 0, "host": "h"})
    )
    lines, waiting = [], threading.Event()

    def watched():
        for line in follow(run, 0.01):
            lines.append(line)
            waiting.set()

    thread = threading.Thread(target=watched)
    thread.start()
    assert waiting.wait(10)
    assert lines == ["  rank 0: in step 4; rank 1: saving after step 3"]
    waiting.clear()
    write(run / "receipt.json", receipt | {"result": receipt["result"] | {"status": "running"}})
    assert waiting.wait(10) and lines[-1].startswith("running, step ")
    for path in (run / "heartbeat").iterdir():
        path.unlink()
    write(run / "receipt.json", receipt)
    thread.join(10)
    assert not thread.is_alive() and lines[-1].startswith("complete, step ")


def test_ranks_that_were_killed_are_not_waited_for(two, tmp_path):
    run = tmp_path / "dead"
    (run / "heartbeat").mkdir(parents=True)
    beat = run / "heartbeat" / "rank-3.json"
    beat.write_text(json.dumps({"count": 3, "doing": "in step 4", "at": 0, "host": "h"}))
    os.utime(beat, (time.time() - 600,) * 2)
    with pytest.raises(ReceiptError, match="neither a receipt nor a rank at work"):
        next(follow(run, 0.01))
    write(run / "receipt.json", read(two[0] / "receipt.json"))
    assert len(list(follow(run, 0.01))) == 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ReceiptError, match="neither a receipt nor a rank at work"):
        next(follow(tmp_path, 1))


def test_a_finished_run_is_one_line(two, capsys):
    assert main(["report", "watch", str(two[0])]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["report", "watch", str(two[0]), "--interval", "0"]) == 2
