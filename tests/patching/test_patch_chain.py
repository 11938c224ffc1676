"""A subset of the patches of one file: the chosen changes and nothing else, or a refusal."""

import itertools

import pytest
from fakelane import ONE, edit
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore.patching import DependencyError, PatchError, diffs


def link(name, before, after):
    (diff,) = diffs.parse(diffs.make("p/x.py", before, after), name)
    return name, diff


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([(4, b""), (14, b"n1\nn2\n"), (24, b"m\n"), (34, b"")]),
    st.sets(st.integers(0, 3)),
)
def test_patches_far_apart_go_on_in_any_subset(spots, chosen):
    """Each replaces one line by nothing, one or two: the same result as editing by hand."""
    lines = [b"%d\n" % number for number in range(40)]

    def edited(patches):
        replaced = {spots[patch][0]: spots[patch][1] for patch in patches}
        return b"".join(replaced.get(number, line) for number, line in enumerate(lines))

    links = [link(str(n), edited(range(n)), edited(range(n + 1))) for n in range(4)]
    ids = {str(patch) for patch in chosen}
    assert diffs.compose(b"".join(lines), links, ids) == edited(chosen)


ADDS = edit(ONE, (b"one = 5\n", b"one = 5\nadded = 1\n"))
CHANGES_ADDED = edit(ADDS, (b"added = 1", b"added = 2"))
REMOVES = edit(ONE, (b"one = 5\n", b""))
NEAR_REMOVED = edit(REMOVES, (b"one = 6\n", b"one = 66\n"))


@pytest.mark.parametrize("middle, last", [(ADDS, CHANGES_ADDED), (REMOVES, NEAR_REMOVED)])
def test_a_patch_on_another_ones_lines_names_it(middle, last):
    links = [link("first", ONE, middle), link("second", middle, last)]
    with pytest.raises(DependencyError, match="'first'") as caught:
        diffs.compose(ONE, links, {"second"})
    assert caught.value.needs == "first"
    assert diffs.closure([(ONE, links)], "second") == {"first", "second"}
    assert diffs.compose(ONE, links, {"first", "second"}) == last


def test_a_patch_needs_whoever_wrote_the_last_line_that_it_shows():
    below = edit(ONE, (b"one = 8\n", b"one = 8\nadded = 1\n"))
    above = edit(below, (b"one = 6\n", b"one = 66\n"))  # its third line of context is the other's
    with pytest.raises(DependencyError, match="'below'"):
        diffs.compose(ONE, [link("below", ONE, below), link("above", below, above)], {"above"})


def test_what_is_needed_needs_more():
    versions = [ONE, ADDS, CHANGES_ADDED, edit(CHANGES_ADDED, (b"added = 2", b"added = 3"))]
    links = [link(name, *versions[n : n + 2]) for n, name in enumerate("abc")]
    assert diffs.closure([(ONE, links)], "c") == {"a", "b", "c"}


def test_equal_lines_are_told_apart():
    """The same block stands twice; leaving out the first patch must not move the second one."""
    before = b"a\nb\nc\n" * 6
    first = b"new\n" * 4 + before
    place = len(first) - len(b"a\nb\nc\n" * 2)
    second = first[:place] + first[place:].replace(b"b", b"B", 1)
    links = [link("first", before, first), link("second", first, second)]
    expected = before[: place - 16] + before[place - 16 :].replace(b"b", b"B", 1)
    assert diffs.compose(before, links, {"second"}) == expected


def test_a_created_file():
    links = [
        ("makes", diffs.parse(diffs.make("p/x.py", None, b"a\nb\n"), "makes")[0]),
        link("edits", b"a\nb\n", b"a\nc\n"),
    ]
    assert diffs.compose(None, links, {"makes", "edits"}) == b"a\nc\n"
    assert diffs.compose(None, links, {"makes"}) == b"a\nb\n"
    assert diffs.compose(None, links, set()) is None
    with pytest.raises(DependencyError, match="'makes'"):
        diffs.compose(None, links, {"edits"})
    with pytest.raises(PatchError, match="must not exist"):
        diffs.compose(b"a\n", links, {"makes"})


def test_every_subset_starts_from_the_right_bytes():
    for ids in itertools.chain.from_iterable(itertools.combinations("ab", n) for n in range(3)):
        links = [link("a", ONE, ADDS), link("b", ADDS, CHANGES_ADDED)]
        with pytest.raises(PatchError, match="hunk 1, line 4: expected"):
            diffs.compose(edit(ONE, (b"one = 3\n", b"one = 3 \n")), links, set(ids))
