"""`megacpp report`: read receipts."""

import argparse
import json
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add `report show`, `compare`, `html` and `watch`."""
    parser = subparsers.add_parser("report", help="show and compare receipts, follow runs")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    show = actions.add_parser("show", help="print a receipt as one page")
    show.add_argument("receipt", type=Path, metavar="RUN", help="a run's folder, or a receipt")
    show.add_argument("-v", "--verbose", action="store_true",
        help="with the reason of every backend, every slow step, and the formulas")  # fmt: skip
    show.add_argument("--json", action="store_true", help="the receipt itself, if it is valid")
    show.set_defaults(run=_show)

    compare = actions.add_parser("compare", help="compare B with A; prints keep, drop or undecided")
    compare.add_argument("a", type=Path, metavar="A", help="a run's folder, or a receipt")
    compare.add_argument("b", type=Path, metavar="B", help="what is compared with it")
    compare.add_argument("--margin", type=float, metavar="SHARE",
        help="a time must differ by more than this share to count (default 0.01)")  # fmt: skip
    compare.add_argument("--allow-unlike", action="store_true",
        help="compare although lane, recipe, topology or problem differ")  # fmt: skip
    compare.add_argument("--json", action="store_true", help="verdicts and intervals as JSON")
    compare.set_defaults(run=_compare)

    page = actions.add_parser("html", help="runs as one self-contained HTML page")
    page.add_argument("runs", type=Path, nargs="+", metavar="RUN",
        help="a run's folder, or its receipt; each is compared with the first")  # fmt: skip
    page.add_argument("--out", type=Path, metavar="FILE.html",
        help="the page (default: report.html in the first run's folder)")  # fmt: skip
    page.set_defaults(run=_html)

    watch = actions.add_parser("watch", help="follow a live run until it ends")
    watch.add_argument("run_folder", type=Path, metavar="RUN")
    watch.add_argument("--interval", type=float, default=2.0, metavar="SECONDS",
        help="how often to look (default: 2)")  # fmt: skip
    watch.set_defaults(run=_watch)


def _show(args: argparse.Namespace) -> int:
    from megacpp_mcore import receipts
    from megacpp_mcore.receipts.show import show

    path = receipts.receipt_of(args.receipt)
    receipt = receipts.read(path)
    if args.json:
        print(json.dumps(receipt, indent=2))
        return 0
    print(show(receipt, str(path), verbose=args.verbose))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from megacpp_mcore import receipts
    from megacpp_mcore.receipts.compare import compare
    from megacpp_mcore.receipts.judge import MARGIN

    path_a, path_b = receipts.receipt_of(args.a), receipts.receipt_of(args.b)
    a, b = receipts.read(path_a), receipts.read(path_b)
    margin = MARGIN if args.margin is None else args.margin
    if args.json:
        from megacpp_mcore.receipts.compare import document

        found = document(a, b, margin=margin, allow_unlike=args.allow_unlike)
        print(json.dumps(found, indent=2))
        return 0
    text = compare(a, b, margin=margin, allow_unlike=args.allow_unlike)
    print(f"A  {path_a}\nB  {path_b}\n\n{text}")
    return 0


def _html(args: argparse.Namespace) -> int:
    from megacpp_mcore import receipts
    from megacpp_mcore.receipts.html import PAGE, page, write_page

    paths = [receipts.receipt_of(run) for run in args.runs]
    out = args.out or paths[0].parent / PAGE
    runs = [(str(run), receipts.read(path)) for run, path in zip(args.runs, paths, strict=True)]
    write_page(page(runs), out)
    print(out)
    return 0


def _watch(args: argparse.Namespace) -> int:
    from megacpp_mcore.receipts import ReceiptError
    from megacpp_mcore.receipts.follow import follow

    if not args.interval > 0:
        raise ReceiptError(f"--interval {args.interval}: more than 0 s is needed")
    for line in follow(args.run_folder, args.interval):
        print(line, flush=True)
    return 0
