"""`megacpp data`: build and check Megatron `.bin/.idx` datasets."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from megacpp_mcore.commands.data_tokenizer import add_sources, register_tokenizer, set_threads
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.terminal import Progress

BYTE_VOCAB_SIZE = 257  # of training.data.text, which imports numpy

_BUILD_EPILOG = """\
Text: every file of the folders is one document, of byte-level tokens (0..255 are the bytes, 256
ends the document) or of those of --tokenizer (`megacpp data tokenizer` trains one). Hidden, binary
and empty files are left out and counted. Documents are ordered pseudo-randomly by --seed, because
Megatron's --split holds out the last ones.
Parquet: every row of one column is one document, in the order of the shards.

examples:
  megacpp data build --torch-headers --out data/torch-headers
  megacpp data build src lib --include '*.cpp' --include '*.h' --out data/cpp
  megacpp data build shards/ --text-column content --out data/code
  megacpp data build repos/ --tokenizer tokenizer.json --dedup --drop-generated \\
      --strip-licence --held-out-folders 0.05 --resume --out data/cpp
  megacpp data build shards/ --tokens-column ids --vocab-size 65536 --append-eod --out data/code
"""


def register(subparsers: Any) -> None:
    """Add `data` with its subcommands."""
    parser = subparsers.add_parser("data", help="build or check a Megatron dataset")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _register_build(commands)
    register_tokenizer(commands)
    check = commands.add_parser("check", help="read a whole dataset and check that it is unchanged")
    check.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    check.add_argument("--json", action="store_true", help="as JSON")
    check.set_defaults(run=run_check)


def _register_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="write PREFIX.bin, PREFIX.idx and PREFIX.json from text or Parquet shards",
        epilog=_BUILD_EPILOG,
    )
    add = build.add_argument
    add_sources(build)
    add("--out", metavar="PREFIX", required=True, help="path of the dataset, without .bin")
    column = build.add_mutually_exclusive_group()
    column.add_argument("--text-column", metavar="NAME", help="Parquet: a column of text")
    column.add_argument("--tokens-column", metavar="NAME", help="Parquet: lists of token ids")
    add("--vocab-size", type=int, metavar="N", help="with --tokens-column: ids are 0..N-1")
    add("--eod-id", type=int, metavar="ID", help="with --tokens-column (default: N-1)")
    add("--append-eod", action="store_true", help="with --tokens-column: end every row with it")
    add("--seed", type=int, help="for the order of text documents (default: 1234)")
    text = build.add_argument_group("text files")
    text.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; else bytes")
    text.add_argument("--workers", type=int, metavar="N",
        help="threads of the tokenizer (default: all cores)")  # fmt: skip
    text.add_argument("--dedup", action="store_true",
        help="leave out files with the content of an earlier one")  # fmt: skip
    text.add_argument("--drop-generated", action="store_true",
        help="leave out files that say that a program wrote them")  # fmt: skip
    text.add_argument("--strip-licence", action="store_true",
        help="without the comments about a licence that files begin with")  # fmt: skip
    text.add_argument("--held-out-folders", type=float, metavar="SHARE",
        help="hold out whole first folders below a source (repositories), those whose share of the "
        "bytes is nearest to this; prints them and the value of data.split")  # fmt: skip
    text.add_argument("--resume", action="store_true",
        help="keep what is done when interrupted, and go on from what is kept")  # fmt: skip
    add("--json", action="store_true", help="print PREFIX.json when it is written")
    build.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Build, then print what was written. Returns 130 when interrupted; nothing is left behind."""
    from megacpp_mcore.training.data.build import build

    started, source = time.monotonic(), _source(args)
    try:
        manifest = build(
            source, args.out, overwrite=args.overwrite, quiet=args.quiet, resume=args.resume
        )
    except KeyboardInterrupt:
        kept = "; what is done is kept, the same command goes on from it" if args.resume else ""
        print(f"megacpp: interrupted; {args.out} was not written{kept}", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(manifest, indent=2))
        return 0
    seconds = time.monotonic() - started
    print(f"wrote {args.out}.bin, .idx and .json in {seconds:.1f} s")
    _print_manifest(manifest)
    if read := manifest.get("text_bytes"):
        rate = f", {(read - source.earlier_bytes) / seconds / 1e6:.1f} MB/s" if seconds else ""
        ends = manifest["documents"]
        print(f"  bytes      {read:,}, {read / (manifest['tokens'] - ends):.2f} a token{rate}")
    print(f"next: {_next(args.out, manifest)}")
    print(
        f"Megatron: --data-path {args.out} --tokenizer-type NullTokenizer --vocab-size "
        f"{manifest['vocab_size']} --null-tokenizer-eod-id {manifest['eod_id']}"
    )
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Verify a dataset and print its counts and its entropy. Fails with 1 where it is damaged."""
    from megacpp_mcore.training.data.entropy import corpus_entropy
    from megacpp_mcore.training.data.files import DataError, paths, read_pair

    *there, manifest = paths(args.prefix)
    known = os.path.exists(manifest)  # False, too, for a name that no file can have
    try:
        pair = read_pair(args.prefix, verify_hashes=known)
        with Progress("data check", pair.tokens.size, "tok") as progress:
            unigram, bigram = corpus_entropy(args.prefix, advance=progress.advance)
    except DataError as error:
        if all(map(os.path.isfile, there)):  # the answer is no
            error.exit_status = 1
        raise
    if args.json:
        about = {"prefix": args.prefix, "unchanged": known or None,
                 "documents": int(pair.lengths.size), "tokens": int(pair.tokens.size),
                 "unigram_entropy": unigram, "bigram_entropy": bigram}  # fmt: skip
        print(json.dumps(about | {"manifest": pair.manifest}, indent=2))
        return 0
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
        set_threads(args.workers)
        return TextFiles(sources, args.include, seed, _text_options(args))
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


def _text_options(args: argparse.Namespace) -> Any:
    from megacpp_mcore.training.data.text import TextOptions
    from megacpp_mcore.training.data.tokenizer import TextTokenizer

    share = args.held_out_folders
    if share is not None and not 0 < share < 1:
        raise MegacppError(f"--held-out-folders {share}: it is a share, above 0 and below 1")
    tokenizer = TextTokenizer.read(args.tokenizer) if args.tokenizer else None
    return TextOptions(
        tokenizer, dedup=args.dedup, drop_generated=args.drop_generated,
        strip_licence=args.strip_licence, held_out=share,
    )  # fmt: skip


_OF_TEXT = ("tokenizer", "workers", "dedup", "drop_generated", "strip_licence", "held_out_folders",
            "resume")  # fmt: skip


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
        for option in _OF_TEXT:
            if getattr(args, option):
                name = option.replace("_", "-")
                raise MegacppError(f"--{name} is for text files only, not for Parquet shards")
        if args.seed is not None:
            raise MegacppError("--seed is for text files only; Parquet rows keep their order")
        if args.torch_headers:
            raise MegacppError(
                "--torch-headers adds text files, which cannot be mixed with Parquet shards"
            )


def _next(prefix: str, manifest: dict[str, Any]) -> str:
    """The command that trains on the dataset."""
    words = ["megacpp", "train", "nam56r-tiny", "--set", f"data.data_path={json.dumps([prefix])}"]
    if split := manifest.get("split"):
        words += ["--set", f"data.split={split}"]
    if tokenizer := manifest.get("tokenizer"):
        words += ["--set", f"data.tokenizer_sha256={tokenizer['sha256']}"]
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
    if held := manifest.get("held_out"):
        more = ", ..." if held["folders"] > len(held["names"]) else ""
        print(
            f"  held out   {100 * held['tokens'] / manifest['tokens']:.2f} % of the tokens, "
            f"{held['documents']:,} documents of {held['folders']} folders: "
            f"{', '.join(held['names'])}{more}"
        )
    for what, count in manifest["skipped"].items():
        print(f"  left out   {count:,} ({what})")
    print(f"  sha256     {manifest['bin_sha256']} (.bin)")
