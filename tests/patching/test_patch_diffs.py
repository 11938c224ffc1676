"""Diffs are applied to the byte or refused: `git` itself is the reference."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore.patching import PatchError, diffs

LINES = st.lists(
    st.sampled_from(
        [b"a\n", b"b\n", b"\n", b"a\r\n", b"  a\n", b"\xff\x0c\x0bx\n", b"--- a\n", b"+\n"]
    ),
    max_size=30,
)


@st.composite
def edits(draw):
    """(before, after): some lines replaced, with or without a newline at the end of each."""
    before = draw(LINES)
    after = list(before)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(after)))
        after[at : at + draw(st.integers(0, 3))] = draw(LINES)[:4]
    texts = [b"".join(lines) for lines in (before, after)]
    return [text[: len(text) - draw(st.integers(0, 1))] for text in texts]


@settings(max_examples=300, deadline=None)
@given(edits())
def test_made_diff_turns_before_into_after_and_back(pair):
    before, after = pair
    if before == after:
        assert diffs.make("p/x.py", before, after) == b""
        return
    (diff,) = diffs.parse(b"Why.\n\n" + diffs.make("p/x.py", before, after), "t.patch")
    assert diffs.apply(diff, before, "t") == after
    assert diffs.apply(diffs.reverse(diff), after, "t") == before


@settings(max_examples=25, deadline=None)
@given(edits())
def test_git_reads_ours_and_we_read_git(tmp_path_factory, pair):
    before, after = pair
    if before == after:
        return
    folder = tmp_path_factory.mktemp("git")

    def git(*arguments, data=None):
        run = subprocess.run(["git", *arguments], cwd=folder, input=data, capture_output=True)
        assert run.returncode in (0, 1) and not run.stderr, run.stderr
        return run.stdout

    git("init", "-q")
    file = folder / "x.py"
    file.write_bytes(before)
    git("apply", "--whitespace=nowarn", "-", data=diffs.make("x.py", before, after))
    assert file.read_bytes() == after
    file.write_bytes(before)
    git("-c", "core.autocrlf=false", "add", "x.py")
    file.write_bytes(after)
    (diff,) = diffs.parse(git("diff", "--text"), "t.patch")
    assert diffs.apply(diff, before, "t") == after


BEFORE = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
AFTER = BEFORE.replace(b"four", b"4")
DIFF = diffs.make("p/x.py", BEFORE, AFTER)


def applied(before, text=DIFF):
    (diff,) = diffs.parse(text, "t.patch")
    return diffs.apply(diff, before, "t")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (b"zero\n" + BEFORE, r"p/x.py: hunk 1, line 1: expected 'one\\n', found 'zero\\n'"),
        (BEFORE.replace(b"two", b"two "), r"hunk 1, line 2: expected 'two\\n', found 'two \\n'"),
        (BEFORE.replace(b"\n", b"\r\n"), r"expected 'one\\n', found 'one\\r\\n'"),
        (BEFORE[:-1], r"hunk 1, line 7: expected 'seven\\n', found 'seven'"),
        (b"one\n", r"hunk 1, line 2: expected 'two\\n', found the end of the file"),
        (AFTER, r"line 4: expected 'four\\n', found '4\\n'"),
        (None, "the file does not exist"),
    ],
    ids=["moved", "white-space", "crlf", "no-newline", "short", "applied-already", "no-file"],
)
def test_no_fuzz(before, message):
    with pytest.raises(PatchError, match=message):
        applied(before)


def test_creating_a_file_needs_it_absent():
    text = diffs.make("p/new.py", None, b"NEW = 1\n")
    assert applied(None, text) == b"NEW = 1\n"
    with pytest.raises(PatchError, match="must not exist"):
        applied(b"", text)


GIT = b"diff --git a/p/x.py b/p/x.py\n"
HEAD = GIT + b"--- a/p/x.py\n+++ b/p/x.py\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no `diff --git`"),
        (b"only words\n", "holds no `diff --git`"),
        (b"--- a/p/x.py\n+++ b/p/x.py\n@@ -1 +1 @@\n-a\n+b\n", "holds no `diff --git`"),
        (HEAD + b"@@ -1,1 +1,1 @@\n-a\n+b\n+c\n", "belong to no hunk"),
        (HEAD + b"@@ -1,1 +1,1 @@\n-a\n+b\nand words\n", "belong to no hunk"),
        (HEAD + b"@@ -1,3 +1,1 @@\n-a\n+b\n", "shorter than expected"),
        (HEAD + b"@@ -1,1 +1,1 @@\n*a\n+b\n", "Hunk diff line expected"),
        (HEAD, "and hunk follow"),
        (HEAD + b"@@ -1,1 +1,1 @@\n a\n", "changes nothing"),
        (HEAD + b"@@ -3,0 +4,1 @@\n+b\n", "has no context line"),
        (GIT + b"old mode 100644\nnew mode 100755\n", "old mode 100644"),
        (GIT + b"deleted file mode 100644\n--- a/p/x.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "de"),
        (b"diff --git a/p/x.py b/p/y.py\nsimilarity index 100%\n", "does not start with"),
        (GIT + b"Binary files a/p/x.py and b/p/x.py differ\n", "binary"),
        (GIT + b"--- a/p/y.py\n+++ b/p/x.py\n@@ -1 +1 @@\n-a\n+b\n", "no `--- a/p/x.py`"),
        (DIFF + DIFF, "more than one section"),
    ],
)  # fmt: skip
def test_what_is_no_plain_diff_is_refused(text, message):
    with pytest.raises(PatchError, match=message):
        diffs.parse(text, "t.patch")


def test_hunks_that_overlap_are_refused():
    text = HEAD + b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n@@ -2,2 +2,2 @@\n-b\n+d\n e\n"
    with pytest.raises(PatchError, match="hunk 2 overlaps"):
        applied(b"a\nb\ne\n", text)
