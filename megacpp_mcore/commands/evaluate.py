"""`megacpp evaluate`: how well a trained model predicts a dataset."""

import argparse
import json
from pathlib import Path
from typing import Any

from megacpp_mcore.commands.generate import add_model_arguments, device_of
from megacpp_mcore.errors import MegacppError

_EPILOG = """\
examples:
  megacpp evaluate runs/nam56r-tiny --data runs/data/torch-include
  megacpp evaluate runs/nam56r-tiny --data data/other --documents 0:200 --html other.html --json

Without --documents, the documents that data.split held out for validation are judged if the data is
the run's own, else all of them. Bits per byte count every token, ends of documents included, over
the bytes of the text. A document longer than seq_length is read in windows of that length. The
baselines are n-grams with Witten-Bell smoothing, counted in the rest of the data.
"""


def register(subparsers: Any) -> None:
    """Add `evaluate`."""
    parser = subparsers.add_parser(
        "evaluate",
        help="judge a trained model: bits per byte, by position and kind of file",
        description="The loss of a checkpoint's model on documents of a dataset, by position and "
        "kind of file, compared with unigrams, bigrams and an n-gram model.",
        epilog=_EPILOG,
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--data", metavar="PREFIX", required=True, help="a dataset, without .bin")
    add("--documents", metavar="A:B", help="judge documents A to B - 1 of it")
    add("--tokens", type=int, default=1_000_000, metavar="N",
        help="stop after the document with the Nth token (default: 1,000,000)")  # fmt: skip
    add("--baseline", metavar="PREFIX",
        help="count n-grams in this dataset (default: in --data's other documents)")  # fmt: skip
    add("--order", type=int, metavar="N",
        help="of the n-gram baseline, 2 to 16 (default: 5, less for a large vocabulary; one that "
        "is named and does not fit the vocabulary is refused)")  # fmt: skip
    add("--html", type=Path, metavar="FILE",
        help="write a page: loss by position, bits per byte by kind, baselines")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Judge, print, and write the page."""
    if args.tokens < 1 or not (args.order is None or 2 <= args.order <= 16):
        raise MegacppError("--tokens must be at least 1, --order from 2 to 16")
    documents = _range(args.documents)
    from megacpp_mcore.inference.trained import trained
    from megacpp_mcore.training.data.files import read_pair

    source = trained(args.run_folder, args.iteration)
    pair = read_pair(args.data, vocab_size=source.recipe["model"]["vocab_size"])
    from megacpp_mcore.inference import loading  # imports torch

    device = device_of(args)
    with loading.loaded(source, device=device, dtype=args.dtype) as loaded:
        result = _judge(args, source, pair, documents, loaded)
    result = {
        "run": str(args.run_folder), "iteration": source.iteration, "recipe": source.name,
        "data": args.data, "device": device, **result,
    }  # fmt: skip
    if args.html:
        from megacpp_mcore.inference.evaluation_page import page
        from megacpp_mcore.receipts.html import write_page

        write_page(page(result), args.html)
    print(json.dumps(result, indent=2) if args.json else _page(result))
    return 0


def _judge(args: argparse.Namespace, source: Any, pair: Any, documents: Any, loaded: Any) -> dict:
    from megacpp_mcore.inference import evaluate, ngrams
    from megacpp_mcore.inference.text import tokenizer_of
    from megacpp_mcore.terminal import Progress
    from megacpp_mcore.training.data.files import read_pair

    selection = evaluate.select(pair, source.recipe, documents)
    vocab_size = loaded.recipe.model.vocab_size
    if args.order:
        ngrams.check_order(args.order, vocab_size)  # before the model has been judged
    order = args.order or next(n for n in (5, 4, 3, 2) if ngrams.fits(n, vocab_size))
    most = 8 * args.tokens
    if args.baseline:
        other = read_pair(args.baseline, vocab_size=vocab_size)
        nothing = evaluate.Selection(0, 0, "")
        counted = evaluate.documents_outside(other, nothing, most)
    else:
        counted = evaluate.documents_outside(pair, selection, most)
    tokenizer = tokenizer_of(vocab_size, loaded.eod, args.tokenizer, source.tokenizer_sha256)
    total = evaluate.count_tokens(pair, selection, args.tokens)
    with Progress("evaluate", total, "tok") as progress:
        return evaluate.judge(
            loaded, pair, selection, counted=counted, order=order, most_tokens=args.tokens,
            bytes_of=lambda tokens: tokenizer.bytes_of(tokens, loaded.eod), say=progress.advance,
        )  # fmt: skip


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    begin, colon, end = text.partition(":")
    if not (colon and begin.isdecimal() and end.isdecimal()):
        raise MegacppError(f"--documents {text}: expected A:B, two numbers")
    return int(begin), int(end)


def _page(result: dict[str, Any]) -> str:
    chosen = result["selection"]
    lines = [
        f"{result['recipe']}, iteration {result['iteration']}, on {result['data']}: "
        f"{result['documents']:,} documents ({chosen['why']}), {result['tokens']:,} tokens, "
        f"{result['bytes']:,} bytes",
        "",
        f"{'':20}{'bits/byte':>10}{'nats/token':>12}",
        _row("model", result),
        *(_row(f"{row['name']}", row) for row in result["baselines"]),
    ]
    if not result["baselines"]:
        lines.append("no baselines: every document of the data is judged; name --baseline PREFIX")
    lines += ["", f"{'kind of file':20}{'bits/byte':>10}{'nats/token':>12}{'documents':>12}"]
    lines += [_row(row["kind"], row) + f"{row['documents']:>12,}" for row in result["kinds"]]
    lines += ["", f"{'tokens of context':20}{'nats/token':>22}"]
    for row in result["positions"]:
        place = str(row["to"]) if row["from"] >= row["to"] else f"{row['from']}-{row['to']}"
        lines.append(f"{place:20}{row['loss']:>22.4f}")
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any]) -> str:
    bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
    return f"{name:20}{bits:>10}{row['loss']:>12.4f}"
