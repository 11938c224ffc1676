"""The parts of README.md and docs/ that are written by a program: `make docs`.

A page has blocks from `<!-- NAME words -->` to `<!-- end -->`. Their content is what the generator
NAME (`blocks.GENERATORS`) makes of those words. The rest of a page is prose without any measured
number. tests/test_pages.py checks both.
"""
