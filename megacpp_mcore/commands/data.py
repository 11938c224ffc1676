"""`megacpp data`: build and check Megatron `.bin/.idx` datasets."""

import argparse
import json
import shlex
import sys
import time
from typing import Any

from megacpp_mcore.errors import MegacppError

BYTE_VOCAB_SIZE = 257  # of training.data.text, which imports numpy

_BUILD_EPILOG = """\
Text: every file of the folders is one document of byte-level tokens: 0..255 are the bytes, 256 ends
the document. Hidden, binary and empty files are left out and counted. Documents are ordered
pseudo-randomly by --seed, because Megatron's --split holds out the last ones.
Parquet: every row of one column is one document, in the order of the shards.

  megacpp data build --torch-headers --out data/torch-headers
  megacpp data build src lib --include '*.cpp' --include '*.h' --out data/cpp
  megacpp data build shards/ --text-column content --out data/code
  megacpp data build shards/ --tokens-column ids --vocab-size 65536 --append-eod --out data/code
"""


def register(subparsers: Any) -> None:
    """Add `data` with its subcommands."""
    parser = subparsers.add_parser("data", help="build or check a Megatron dataset")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _register_build(commands)
    check = commands.add_parser("check", help="read a whole dataset and check that it is unchanged")
    check.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    check.set_defaults(run=run_check)


def _register_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="write PREFIX.bin, PREFIX.idx and PREFIX.json from text or Parquet shards",
        epilog=_BUILD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = build.add_argument
    add("sources", metavar="SRC", nargs="*", help="folders, read recursively, or files")
    add("--out", metavar="PREFIX", required=True, help="path of the dataset, without .bin")
    add("--torch-headers", action="store_true", help="add the headers of the installed torch")
    add("--include", metavar="GLOB", action="append", default=[], help="only files that match")
    column = build.add_mutually_exclusive_group()
    column.add_argument("--text-column", metavar="NAME", help="Parquet: a column of text")
    column.add_argument("--tokens-column", metavar="NAME", help="Parquet: lists of token ids")
    add("--vocab-size", type=int, metavar="N", help="with --tokens-column: ids are 0..N-1")
    add("--eod-id", type=int, metavar="ID", help="with --tokens-column (default: N-1)")
    add("--append-eod", action="store_true", help="with --tokens-column: end every row with it")
    add("--seed", type=int, help="for the order of text documents (default: 1234)")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    add("--quiet", action="store_true", help="no progress bar")
    build.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Build, then print what was written. Returns 130 when interrupted; nothing is left behind."""
    from megacpp_mcore.training.data.build import build

    started = time.monotonic()
    try:
        manifest = build(_source(args), args.out, overwrite=args.overwrite, quiet=args.quiet)
    except KeyboardInterrupt:
        print(f"megacpp: interrupted; {args.out} was not written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    print(f"wrote {args.out}.bin, .idx and .json in {seconds:.1f} s")
    _print_manifest(manifest)
    print(f"next: {_next(args.out, manifest)}")
    print(
        f"Megatron: --data-path {args.out} --tokenizer-type NullTokenizer --vocab-size "
        f"{manifest['vocab_size']} --null-tokenizer-eod-id {manifest['eod_id']}"
    )
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Verify a dataset and print its counts and its entropy."""
    from megacpp_mcore.training.data.entropy import corpus_entropy
    from megacpp_mcore.training.data.files import paths, read_pair

    known = paths(args.prefix)[2].exists()
    pair = read_pair(args.prefix, verify_hashes=known)
    unigram, bigram = corpus_entropy(args.prefix)
    if known:
        print(f"{args.prefix} is complete and unchanged")
        _print_manifest(pair.manifest)
    else:
        print(
            f"{args.prefix} is complete: .idx and .bin agree. There is no .json of `megacpp data "
            "build`, so whether it is unchanged is not known"
        )
        print(f"  documents  {pair.lengths.size:,}")
        print(f"  tokens     {pair.tokens.size:,} ({pair.tokens.dtype}, the largest id "
              f"{int(pair.tokens.max())})")  # fmt: skip
    print(f"  entropy    unigram {unigram:.4f}, bigram {bigram:.4f} nats per token")
    return 0


def _source(args: argparse.Namespace) -> Any:
    from megacpp_mcore.training.data.sources import torch_headers
    from megacpp_mcore.training.data.text import DEFAULT_SEED, TextFiles

    _refuse_unused(args)
    sources = [*args.sources, *([torch_headers()] if args.torch_headers else [])]
    if args.text_column is None and args.tokens_column is None:
        seed = DEFAULT_SEED if args.seed is None else args.seed
        return TextFiles(sources, args.include, seed)
    from megacpp_mcore.training.data.parquet import ParquetShards

    if args.text_column is not None:
        return ParquetShards(sources, args.text_column, "text", include=args.include)
    return ParquetShards(
        sources,
        args.tokens_column,
        "tokens",
        include=args.include,
        vocab_size=args.vocab_size,
        eod_id=args.vocab_size - 1 if args.eod_id is None else args.eod_id,
        append_eod=args.append_eod,
    )


def _refuse_unused(args: argparse.Namespace) -> None:
    if args.tokens_column is not None and args.vocab_size is None:
        raise MegacppError("--tokens-column needs --vocab-size, to check that ids are below it")
    if args.tokens_column is None:
        for option in ("vocab_size", "eod_id", "append_eod"):
            value = getattr(args, option)
            if value is not None and value is not False:  # an id may be 0
                raise MegacppError(
                    f"--{option.replace('_', '-')} is for --tokens-column only: text becomes "
                    f"bytes, with vocabulary 257 and end of document 256"
                )
    if args.text_column is not None or args.tokens_column is not None:
        if args.seed is not None:
            raise MegacppError("--seed is for text files only; Parquet rows keep their order")
        if args.torch_headers:
            raise MegacppError(
                "--torch-headers adds text files, which cannot be mixed with Parquet shards"
            )


def _next(prefix: str, manifest: dict[str, Any]) -> str:
    """The command that trains on the dataset."""
    words = ["megacpp", "train", "nam56r-tiny", "--set", f"data.data_path={json.dumps([prefix])}"]
    if manifest["vocab_size"] != BYTE_VOCAB_SIZE:
        words += ["--set", f"model.vocab_size={manifest['vocab_size']}"]
        words += ["--set", f"data.null_tokenizer_eod_id={manifest['eod_id']}"]
    return shlex.join(words)


def _print_manifest(manifest: dict[str, Any]) -> None:
    print(f"  documents  {manifest['documents']:,}")
    print(
        f"  tokens     {manifest['tokens']:,} (vocabulary {manifest['vocab_size']}, end of "
        f"document {manifest['eod_id']})"
    )
    for what, count in manifest["skipped"].items():
        print(f"  left out   {count:,} ({what})")
    print(f"  sha256     {manifest['bin_sha256']} (.bin)")
