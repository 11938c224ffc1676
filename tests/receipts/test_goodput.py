"""The goodput ledger, with a clock that passes when told to."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receipt_samples import Clock

from megacpp_mcore.receipts.goodput import CATEGORIES, SPANS, Goodput, GoodputError


def ledger() -> tuple[Goodput, Clock]:
    clock = Clock()
    return Goodput(clock=clock, started="2026-11-21T09:00:00Z"), clock


def test_time_goes_to_the_innermost_span():
    goodput, clock = ledger()
    clock.sleep(1)
    with goodput.span("step"):
        clock.sleep(10)
        with goodput.span("data"):
            clock.sleep(3)
        clock.sleep(10)
        with goodput.span("compile"):
            clock.sleep(5)
    with goodput.span("checkpoint"):
        clock.sleep(2)
    record = goodput.record()
    assert record["wall_s"] == 31
    assert record["seconds"] == {
        "step": 20,
        "compile": 5,
        "data": 3,
        "checkpoint": 2,
        "evaluation": 0,
        "lost": 0,
        "idle": 1,
    }
    assert record["useful"] == pytest.approx(20 / 31, abs=1e-6)


def test_a_span_nested_in_its_own_category_counts_once():
    goodput, clock = ledger()
    with goodput.span("step"), goodput.span("step"):
        clock.sleep(4)
    assert goodput.record()["seconds"]["step"] == 4


def test_a_record_inside_an_open_span_holds_the_time_so_far():
    goodput, clock = ledger()
    with goodput.span("checkpoint"):
        clock.sleep(2)
        inside = goodput.record()
        clock.sleep(3)
    assert inside["seconds"]["checkpoint"] == 2
    assert goodput.record()["seconds"]["checkpoint"] == 5


def test_an_exception_closes_its_span():
    goodput, clock = ledger()
    with pytest.raises(KeyError), goodput.span("step"):
        clock.sleep(1)
        raise KeyError("from the step")
    clock.sleep(2)
    seconds = goodput.record()["seconds"]
    assert (seconds["step"], seconds["idle"]) == (1, 2)


def test_a_ledger_without_any_time_is_no_division_by_zero():
    assert ledger()[0].record()["useful"] == 0.0


trees = st.recursive(
    st.tuples(st.just(None), st.integers(0, 10**12)),
    lambda inner: st.tuples(st.sampled_from(SPANS), st.lists(inner, max_size=4)),
    max_leaves=30,
)


@settings(deadline=None)  # a busy machine is no fault of the ledger
@given(st.lists(trees, max_size=5), st.lists(trees, max_size=3))
def test_the_parts_add_up_to_the_wall_time(first, second):
    """Whatever the nesting, and over a resume, to the rounding of the 7 figures (1 us each)."""

    def play(goodput, clock, tree, spent, category="idle"):
        kind, inside = tree
        if kind is None:
            clock.ns += inside
            spent[category] += inside
            return
        with goodput.span(kind):
            for branch in inside:
                play(goodput, clock, branch, spent, kind)

    spent = dict.fromkeys(CATEGORIES, 0)
    earlier = None
    walls = 0
    for process in (first, second):
        goodput, clock = ledger()
        if earlier:
            goodput.resume(earlier)
        for tree in process:
            play(goodput, clock, tree, spent)
        earlier = goodput.record()
        walls += clock.ns
    assert earlier["wall_s"] == pytest.approx(walls / 1e9, abs=2e-6)
    assert sum(earlier["seconds"].values()) == pytest.approx(walls / 1e9, abs=14e-6)
    for name, ns in spent.items():
        assert earlier["seconds"][name] == pytest.approx(ns / 1e9, abs=2e-6), name


def test_a_resume_keeps_earlier_segments_and_moves_steps_done_again_to_lost():
    first, clock = ledger()
    with first.span("step"):
        clock.sleep(100)
    with first.span("checkpoint"):
        clock.sleep(5)
    second, clock = ledger()
    second.resume(first.record(), lost_s=30)
    with second.span("step"):
        clock.sleep(50)
    record = second.record()
    assert record["wall_s"] == 155
    assert record["seconds"]["step"] == 120
    assert record["seconds"]["lost"] == 30
    assert [segment["wall_s"] for segment in record["segments"]] == [105, 50]
    assert record["segments"][0]["seconds"]["lost"] == 30


def test_lost_time_reaches_back_over_segments_and_never_below_zero():
    first, clock = ledger()
    with first.span("step"):
        clock.sleep(10)
    second, clock = ledger()
    second.resume(first.record())
    with second.span("step"):
        clock.sleep(4)
    third, _ = ledger()
    third.resume(second.record(), lost_s=6)
    steps = [segment["seconds"]["step"] for segment in third.record()["segments"]]
    assert steps == [8, 0, 0]
    fourth, _ = ledger()
    fourth.resume(second.record(), lost_s=1000)
    record = fourth.record()
    assert record["seconds"]["step"] == 0
    assert record["seconds"]["lost"] == 14
    assert sum(record["seconds"].values()) == record["wall_s"]


def test_a_resume_leaves_the_earlier_record_as_it_was():
    first, clock = ledger()
    with first.span("step"):
        clock.sleep(10)
    earlier = first.record()
    second, _ = ledger()
    second.resume(earlier, lost_s=5)
    assert earlier == first.record()


@pytest.mark.parametrize("category", ["lost", "training", ""])
def test_an_unknown_category_is_refused_with_the_known_ones(category):
    goodput, clock = ledger()
    known = "step, compile, data, checkpoint, evaluation, idle"
    with pytest.raises(GoodputError, match=known), goodput.span(category):
        clock.sleep(1)
    assert goodput.record()["wall_s"] == 0


def test_spans_that_do_not_nest_are_refused():
    goodput, _ = ledger()
    outer, inner = goodput.span("step"), goodput.span("data")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(GoodputError, match=r"'step' ends while the open spans are \['step', 'data"):
        outer.__exit__(None, None, None)


def test_another_thread_is_refused():
    goodput, _ = ledger()
    raised = []

    def prefetch():
        try:
            with goodput.span("data"):
                pass
        except GoodputError as error:
            raised.append(str(error))

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    assert raised and "another thread" in raised[0]
