"""`megacpp patch`: the patch lane on the pinned packages of an environment."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError

_EPILOG = """\
exit status: 0 success (status: everything is applied; verify: proved; port: no conflicts),
1 otherwise, 2 refused, with the reason on stderr and nothing changed.

examples:
  megacpp patch status
  megacpp patch apply
  megacpp patch revert --only mla-rope-head-mask
  megacpp patch verify
  megacpp patch new my-fix --from edited/ --test reproduce.py --reason '...' --drop-when '...'
"""

_LONGEST = 1_000_000  # seconds: poll() takes 24 days
_EDITED = "edited files, under their paths in site-packages"
_TEST = "script: exits 1 with the defect, 0 without it, 77 if it cannot run here"


def register(subparsers: Any) -> None:
    """Add `patch` with its subcommands."""
    parser = subparsers.add_parser(
        "patch",
        help="the patch lane: list, status, apply, revert, verify, new, export, port",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, text: str, *options: str) -> Any:
        command = commands.add_parser(name, help=text, description=text)
        argument = command.add_argument
        argument("--lane", metavar="DIR", type=Path, help="folder of manifest.toml (default: ours)")
        if "--site" in options:
            of = "site-packages (default: this Python's)"
            argument("--site", metavar="DIR", type=Path, help=of)
        if "--only" in options:
            argument("--only", metavar="ID", action="append", default=[], help="may be repeated")
        command.set_defaults(run=run)
        return argument

    argument = add("list", run_list, "the patches of the lane, and their reasons")
    argument("--json", action="store_true")
    argument = add("status", run_status, "what is applied here", "--site")
    argument("--json", action="store_true")
    for name, text in (
        ("apply", "apply the lane to the installed packages"),
        ("revert", "restore the original files, byte for byte"),
    ):
        run = functools.partial(run_change, name)
        argument = add(name, run, text, "--site", "--only")
        wait = "how long to wait for another patch command (%(default)s)"
        argument("--wait", metavar="SECONDS", type=_seconds, default=30.0, help=wait)
        argument("--json", action="store_true")
    text = "run each patch's reproducer without and with the lane"
    argument = add("verify", run_verify, text, "--site", "--only")
    argument("--timeout", metavar="SECONDS", type=_seconds, default=600.0, help="per run")
    argument("--json", action="store_true")
    text = "make a patch from an edited copy of installed files"
    argument = add("new", run_new, text, "--site")
    argument("id", metavar="ID")
    argument("--from", dest="edited", metavar="DIR", type=Path, required=True, help=_EDITED)
    argument("--reason", metavar="TEXT", required=True)
    argument("--test", metavar="FILE", type=Path, required=True, help=_TEST)
    argument("--drop-when", metavar="TEXT", required=True)
    argument("--needs", choices=("cpu", "gpu"), default="cpu", help="what the test needs")
    states = ("not-reported", "open", "merged")
    argument("--upstream", dest="state", choices=states, default=states[0])
    argument("--link", metavar="LINK", help="of the upstream issue or pull request")
    argument("--merged-in", metavar="VERSION")
    argument("--defect", metavar="N", type=int, help="number on the facts page")
    argument = add("export", run_export, "print a patch as a mail for `git am`", "--site")
    argument("id", metavar="ID")
    argument("--author", metavar="'NAME <ADDRESS>'", help="default: git's user")
    text = "how the lane fares on another version, which it does not change"
    argument = add("port", run_port, text, "--only")
    argument("--to", metavar="VERSION", required=True, help="installed in --site")
    argument("--site", metavar="DIR", type=Path, required=True)
    of = "site-packages with the pinned versions, for merges (default: this Python's)"
    argument("--base", metavar="DIR", type=Path, help=of)
    argument("--no-test", action="store_true", help="run no reproducer where the lines do not tell")
    argument("--timeout", metavar="SECONDS", type=_seconds, default=600.0, help="per reproducer")
    argument("--write", metavar="DIR", type=Path, help="make the lane of what applies there")
    argument("--json", action="store_true")


def _seconds(text: str) -> float:
    """What a wait can take; nan would end none, and inf is more than the system can wait."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= _LONGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_LONGEST:,}")


def run_list(args: argparse.Namespace) -> int:
    """Print every patch of the lane."""
    from megacpp_mcore.patching import manifest

    lane = manifest.load(args.lane)
    if args.json:
        return _print_json(lane.patches)
    for package, version in lane.packages.items():
        print(f"{package} {version}")
        for patch in lane.of(package):
            upstream = " ".join(patch.upstream.values())
            print(f"  {patch.id}  (test needs {patch.needs}; upstream: {upstream})")
            print(f"    {' '.join(patch.reason.split())}")
            for file in patch.files:
                print(f"    {file.path}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print the state of every package and patch."""
    from megacpp_mcore.patching import manifest, state

    rows = state.status(manifest.load(args.lane), args.site)
    if args.json:
        _print_json(rows)
    else:
        for row in rows:
            _print_status(row)
    installed = any(row["installed"] for row in rows)
    return 0 if installed and all(row["complete"] for row in rows) else 1


def _print_status(row: dict[str, Any]) -> None:
    if row["installed"] is None and not row["problem"]:
        print(f"{row['package']} {row['pinned']}: not installed")
    else:
        where = f" in {row['site']}" if row["site"] else ""
        print(f"{row['package']} {row['installed'] or row['pinned']}{where}")
    for key in ("problem", "interrupted"):
        if row[key]:
            print(f"  {key}: {row[key]}")
    for patch in row["patches"]:
        files = f": {', '.join(patch['files'])}" if patch["files"] else ""
        print(f"  {patch['state']:<12}  {patch['id']}{files}")
    if any(patch["state"] == "drifted" for patch in row["patches"]):
        print("  drifted: someone else changed these files; apply and revert refuse to touch them")
    for path in row["leftovers"]:
        print(f"  left by another release of the lane: {path}")


def run_change(operation: str, args: argparse.Namespace) -> int:
    """Apply or revert, then print which files changed."""
    from megacpp_mcore.patching import manifest, operations

    lane = manifest.load(args.lane)
    outcome = operations.change(operation, lane, args.site, args.only, args.wait)
    if args.json:
        return _print_json(outcome)
    for line in (*outcome.notes, *(f"changed {path}" for path in outcome.changed)):
        print(line)
    for package, ids in outcome.applied.items():
        print(f"{package}: applied: {', '.join(ids) or 'no patch'}")
    if not outcome.changed:
        print(f"nothing to {operation}: nothing would change")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print each proof when it is done. Returns 0 if at least one was proved and none failed."""
    from megacpp_mcore.patching import manifest, verify

    proofs = []
    for proof in verify.verify(manifest.load(args.lane), args.site, args.only, args.timeout):
        proofs.append(proof)
        if not args.json:
            _print_proof(proof)
    verdicts = [proof.verdict for proof in proofs]
    kinds = (verify.PROVED, verify.NOT_RUN, verify.FAILED)
    if args.json:
        _print_json(proofs)
    else:
        print(", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds))
    return 0 if verify.PROVED in verdicts and verify.FAILED not in verdicts else 1


def _print_proof(proof: Any) -> None:
    print(f"{proof.verdict:<12}  {proof.patch}: {proof.reason}", flush=True)
    if proof.verdict == "not run here":
        return
    for name, run in (("without", proof.pristine), ("with", proof.patched)):
        print(f"    {name}: {run.saw or '(it printed nothing)'}", flush=True)
        for line in run.log.splitlines() if proof.verdict == "failed" else ():
            print(f"      stderr: {line}")


def run_new(args: argparse.Namespace) -> int:
    """Write the patch, its test and its manifest entry."""
    from megacpp_mcore.patching import manifest, new

    lane = args.lane or manifest.shipped_lane()
    if args.lane is None and not (lane.parent / "pyproject.toml").is_file():
        raise MegacppError(f"{lane} belongs to an installed package: name a checkout's with --lane")
    given = vars(args)
    upstream = {key: given[key] for key in ("state", "link", "merged_in") if given[key] is not None}
    keys = ("id", "reason", "drop_when", "needs", "defect")
    draft = {key: given[key] for key in keys if given[key] is not None} | {"upstream": upstream}
    written, proof = new.new(lane, draft, args.edited, args.test, args.site)
    _print_proof(proof)
    for path in written:
        print(f"wrote {path}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Print the patch as a mail."""
    from megacpp_mcore.patching import export, manifest

    mail = export.export(manifest.load(args.lane), args.id, args.site, args.author)
    sys.stdout.flush()
    sys.stdout.buffer.write(mail)
    sys.stdout.buffer.flush()
    return 0


def run_port(args: argparse.Namespace) -> int:
    """Print the result for each patch. Returns 0 if none conflicts."""
    from megacpp_mcore.patching import manifest, port

    lane, timeout = manifest.load(args.lane), None if args.no_test else args.timeout
    more = (args.only, args.base, timeout, args.write)
    reports = port.port(lane, args.to, args.site, *more)
    if args.json:
        _print_json(reports)
    else:
        for report in reports:
            print(f"{report.result:<16}  {report.patch}")
            for detail in report.details:
                print(f"    {detail}")
        if args.write:
            print(f"wrote {args.write}")
    return 1 if any(report.result == port.CONFLICT for report in reports) else 0


def _print_json(value: Any) -> int:
    def plain(part: Any) -> Any:
        return str(part) if isinstance(part, Path) else dataclasses.asdict(part)

    print(json.dumps(value, indent=2, default=plain))
    return 0
