"""`megacpp data tokenizer`: train a tokenizer; and what `data build` shares with it."""

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.terminal import Progress, has_room, printable

_TOKENIZER_EPILOG = """\
Indentation after a line break, the path of an #include, a word with the space before it and a run
of punctuation are never cut by a token of another; every byte has a token.

examples:
  megacpp data tokenizer repos/ --include '*.cpp' --include '*.h' --out tokenizer.json
  megacpp data tokenizer --torch-headers --vocab-size 8192 --out tokenizer.json
"""


def register_tokenizer(commands: Any) -> None:
    """Add `tokenizer`."""
    tokenizer = commands.add_parser(
        "tokenizer",
        help="train a byte-level BPE tokenizer on text",
        description="Train a byte-level BPE tokenizer for C++ on the files of SRC, and write it as "
        "a tokenizer.json. Needs the extra [tokenizer].",
        epilog=_TOKENIZER_EPILOG,
    )
    add = tokenizer.add_argument
    add_sources(tokenizer)
    add("--out", metavar="FILE", type=Path, required=True, help="tokenizer.json to write")
    add("--vocab-size", type=int, metavar="N", default=65536, help="tokens (default: 65536)")
    add("--max-bytes", type=int, metavar="N", default=1 << 30,
        help="read about so many bytes, of pseudo-random files (default: 1 GiB)")  # fmt: skip
    add("--workers", type=int, metavar="N", help="threads (default: all cores)")
    tokenizer.set_defaults(run=run_tokenizer)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add SRC and what goes with it."""
    add = parser.add_argument
    add("sources", metavar="SRC", nargs="*", help="folders, read recursively, or files")
    add("--torch-headers", action="store_true", help="add the headers of the installed torch")
    add("--include", metavar="GLOB", action="append", default=[], help="only files that match")
    add("--overwrite", action="store_true", help="replace what is at --out")
    add("--quiet", action="store_true", help="no progress bar")


def run_tokenizer(args: argparse.Namespace) -> int:
    """Train and write the tokenizer; print its size and what comes next."""
    from megacpp_mcore.training.data import tokenizer
    from megacpp_mcore.training.data.sources import torch_headers
    from megacpp_mcore.training.data.text import TextFiles

    set_threads(args.workers)
    if os.path.exists(args.out) and not args.overwrite:
        raise MegacppError(f"{args.out} exists: name another --out, or give --overwrite")
    if args.max_bytes < 1:
        raise MegacppError(f"--max-bytes {args.max_bytes}: at least 1 is needed")
    sources = [*args.sources, *([torch_headers()] if args.torch_headers else [])]
    files, started = TextFiles(sources, args.include), time.monotonic()
    shows = not args.quiet and has_room(sys.stderr)
    total = min(files.total, args.max_bytes)
    progress = Progress("data tokenizer", total, quiet=args.quiet or shows)
    texts = files.texts(args.max_bytes, progress.advance)
    try:
        made = tokenizer.train(texts, args.vocab_size, args.out, shows)
    except (KeyboardInterrupt, SystemExit) as stopped:  # SystemExit: SIGTERM
        _leave(args.out, stopped)
    print(f"wrote {args.out} in {time.monotonic() - started:.1f} s")
    print(f"  tokens     {made.vocab_size:,} (end of document {made.eod_id})")
    sample = [text for text in files.texts(1 << 22) if text]
    tokens = sum(len(t) - 1 for t in made.documents(sample) if t is not None)
    print(f"  bytes      {sum(map(len, sample)) / max(1, tokens):.2f} a token, of the first files")
    print(f"  sha256     {made.sha256}")
    print(f"next: megacpp data build SRC --tokenizer {shlex.quote(str(args.out))} --out PREFIX")
    return 0


def _leave(out: Path, stopped: BaseException) -> NoReturn:
    """End the process, though the library's threads are at work: Python's own end would wait for
    them."""
    status = 128 + signal.SIGINT
    if isinstance(stopped, SystemExit):
        status = stopped.code
    else:
        print(f"megacpp: interrupted; {printable(str(out))} was not written", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


def set_threads(workers: int | None) -> None:
    """Set the library's threads, before it is used; None: as many as cores."""
    if workers is not None and workers < 1:
        raise MegacppError(f"--workers {workers}: at least 1 is needed")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
