"""The parts of README.md and docs/ that are written by a program: `make docs`.

A page has blocks, `<!-- NAME words -->` to `<!-- end -->`; what stands between is the text of the
generator NAME (`blocks.GENERATORS`) for those words. The rest of a page is prose, and no measured
number stands in it: tests/test_pages.py holds both.
"""
