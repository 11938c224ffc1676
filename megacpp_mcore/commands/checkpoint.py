"""`megacpp checkpoint`: list, verify and prune the checkpoints of a run."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import locked
from megacpp_mcore.terminal import Progress
from megacpp_mcore.training.checkpoints import checksums, folder

_EPILOG = """\
RUN is a run's folder (runs/NAME), or the folder that holds the checkpoints.

exit status: 0 done (verify: every one is whole), 1 verify found a damaged one, 2 refused.

examples:
  megacpp checkpoint list runs/nam56r-tiny
  megacpp checkpoint verify runs/nam56r-tiny --iteration 300
  megacpp checkpoint prune runs/nam56r-tiny --keep 2
"""


def register(subparsers: Any) -> None:
    """Add `checkpoint` with its commands."""
    parser = subparsers.add_parser(
        "checkpoint", help="list, verify and prune a run's checkpoints", epilog=_EPILOG
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_folder", metavar="RUN", type=Path)
        command.add_argument("--json", action="store_true", help="as a JSON list")
        command.set_defaults(run=run)
        return command

    add("list", run_list, "every checkpoint: iteration, state, size, when it was written")
    verify = add("verify", run_verify, "read every file and compare it with its checksum")
    verify.add_argument("--iteration", type=int, metavar="N", help="only this one")
    prune = add(
        "prune",
        run_prune,
        "delete all complete checkpoints but the newest, if a whole one is among those that stay",
    )
    prune.add_argument("--keep", type=int, metavar="N", required=True, help="how many stay")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted")


def run_list(args: argparse.Namespace) -> int:
    """Print every checkpoint of the folder."""
    rows = [_row(path) for path in folder.named(_place(args.run_folder))]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["written"]))
        print(f"{row['name']:<28} {row['state']:<22} {row['bytes'] / 2**20:>12,.1f} MiB  {written}")
    if not rows:
        print(f"no checkpoint in {_place(args.run_folder)}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Read every complete checkpoint. Returns 1 if one is damaged or incomplete."""
    place = _place(args.run_folder)
    rows = []
    for path in _chosen(place, args.iteration):
        row = _row(path)
        if row["state"] == "complete":
            row["state"] = _verified(path, row["bytes"])
        rows.append(row)
        if not args.json:
            print(f"{row['name']:<28} {row['state']}")
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["state"] in ("whole", _UNSUMMED) for row in rows) else 1


_UNSUMMED = "complete, without checksums"


def _verified(path: Path, size: int) -> str:
    try:
        with Progress(path.name, size) as progress:
            return "whole" if checksums.verify(path, progress.advance) else _UNSUMMED
    except checksums.DamagedError as error:
        return f"damaged: {error}"


def run_prune(args: argparse.Namespace) -> int:
    """Delete the older complete checkpoints."""
    if args.keep < 1:
        raise MegacppError(f"--keep {args.keep}: at least 1 stays")
    place = _place(args.run_folder)
    there = [folder.path_of(place, n) for n in folder.complete(place)]
    doomed = there[: -args.keep]
    if (named := _tracked(place)) in doomed:
        raise MegacppError(
            f"{place / folder.TRACKER} names {named.name}, from which a run resumes: keep more, or "
            "resume the run first"
        )
    if doomed:
        _refuse_damaged(there[-args.keep :])
    rows = [_row(path) for path in doomed]
    if not args.dry_run:
        with _exclusive(place):
            folder.recover(place)
            folder.prune(place, args.keep)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    verb = "would delete" if args.dry_run else "deleted"
    for row in rows:
        print(f"{verb} {row['name']}")
    freed = sum(row["bytes"] for row in rows)
    print(f"{len(rows)} {'would be ' * args.dry_run}deleted, {freed / 2**20:,.1f} MiB")
    return 0


def _refuse_damaged(kept: list[Path]) -> None:
    """Raises MegacppError unless one of those that stay is whole, to resume from."""
    reasons = []
    for path in reversed(kept):
        try:
            checksums.verify(path)
            return
        except checksums.DamagedError as error:
            reasons.append(str(error))
    raise MegacppError(
        f"{'; '.join(reasons)}. No whole checkpoint would stay, so nothing is deleted: --keep "
        f"more than {len(kept)}; `megacpp checkpoint verify` says which are whole"
    )


def _tracked(place: Path) -> Path | None:
    """The checkpoint that the tracker file names."""
    with contextlib.suppress(OSError, ValueError):
        return folder.path_of(place, int((place / folder.TRACKER).read_text()))
    return None


@contextlib.contextmanager
def _exclusive(place: Path) -> Iterator[None]:
    """Hold the lock of the run that `place` is of, so that no process on the CPU trains in it."""
    from megacpp_mcore.training.run_folder import LOCK

    run = Path(os.path.abspath(place)).parent
    if not os.path.lexists(run / LOCK):
        yield
        return
    try:
        held = locked(run / LOCK)
    except BlockingIOError:
        raise MegacppError(f"a process is training in {run}: wait for it") from None
    with held:
        yield


def _place(run: Path) -> Path:
    """The folder that holds the checkpoints. Raises MegacppError when there is none."""
    for place in (run / "checkpoints", run):
        if os.path.isdir(place) and (place.name == "checkpoints" or folder.named(place)):
            return place
    raise MegacppError(
        f"{run} holds no checkpoints: name a run's folder, or the folder of its checkpoints "
        "(checkpoint.save of a run on GPUs)"
    )


def _chosen(place: Path, iteration: int | None) -> list[Path]:
    found = [path for path in folder.named(place) if path.name.startswith("iter_")]
    if iteration is None:
        return found
    if (path := folder.path_of(place, iteration)) in found:
        return [path]
    there = ", ".join(str(folder.iteration_of(path)) for path in found) or "none"
    raise MegacppError(f"--iteration {iteration}: {place} has those of {there}")


def _row(path: Path) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()]
    state = "complete" if folder.is_complete(path) else "incomplete"
    if folder.is_unfinished(path):
        state = "left by a kill"
    elif path.name.startswith("superseded-"):
        state = "superseded"
    return {
        "name": path.name, "path": str(path), "state": state,
        "bytes": sum(file.stat().st_size for file in files), "written": path.stat().st_mtime,
    }  # fmt: skip
