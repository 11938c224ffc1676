"""Rewrites the assertions of every test file as pytest does where it imports one, and keeps them
where it looks for them.

`conftest.py` starts this while the server of `warm` imports torch: in a fresh clone each worker
would rewrite all of them, and all at the same time.
"""

from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion import rewrite

_SILENT = SimpleNamespace(trace=lambda message: None)


def main() -> None:
    for path in sorted(Path(__file__).resolve().parent.rglob("test_*.py")):
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(kept.parent):
            source_hash, code = rewrite._rewrite_test(path, None)
            rewrite._write_pyc(_SILENT, code, source_hash, kept)


if __name__ == "__main__":
    main()
