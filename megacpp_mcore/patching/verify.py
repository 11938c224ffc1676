"""Prove a patch: its reproducing test shows the defect without the lane, and none with it.

The test runs in a fresh process, twice: with copies of the installed packages as their wheels came,
and with copies that have the whole lane. The environment itself is never changed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patching import PatchError, state
from megacpp_mcore.patching.manifest import Manifest, Patch
from megacpp_mcore.patching.state import PackageState

PROVED = "proved"
NOT_RUN = "not run here"
FAILED = "failed"

# the reproducer's contract
RIGHT, DEFECT, CANNOT_RUN, INAPPLICABLE = 0, 1, 77, 78
_MEANING = {RIGHT: "right behaviour", DEFECT: "defect shown", CANNOT_RUN: "cannot run here"}
_MEANING[INAPPLICABLE] = "inapplicable"
_LOG_LINES = 40


@dataclass(frozen=True)
class Run:
    """One run of a reproducer. status: its exit status, negative for a signal, None for a timeout.

    saw: the last line it printed. log: the last lines of its stderr.
    """

    status: int | None
    saw: str
    log: str

    @property
    def crashed(self) -> bool:
        """Whether it ended with an exception that nobody caught, for which Python exits with 1."""
        return self.status == DEFECT and "Traceback (most recent call last)" in self.log

    @property
    def meaning(self) -> str:
        if self.crashed:
            return "broken (an uncaught exception; catch it and say what was seen)"
        broken = "timed out" if self.status is None else f"exit {self.status}"
        return _MEANING.get(self.status, f"broken ({broken})")


@dataclass(frozen=True)
class Proof:
    """The two runs of one patch's reproducer, and what follows from them."""

    patch: str
    verdict: str  # PROVED, NOT_RUN or FAILED
    reason: str
    pristine: Run
    patched: Run


def verify(
    manifest: Manifest,
    folder: Path | None = None,
    only: Collection[str] = (),
    timeout: float = 600.0,
) -> Iterator[Proof]:
    """Prove every patch of the lane, or those in `only`, one after the other.

    folder: site-packages whose packages are copied (patched or not); None for this interpreter's.
    timeout: seconds for one run. A selected patch of an absent package is left out unless named.
    Raises PatchError when a package cannot be used (another version, drifted, ...) or nothing is
    left to prove.
    """
    selected = manifest.select(only)
    states = [state.read(manifest, package, folder) for package in manifest.packages]
    for each in states:
        drifted = [path for path, file in each.files.items() if file.strange]
        reason = each.problem or each.interrupted
        if reason or drifted:
            reason = reason or f"{each.installed.site / drifted[0]} was changed outside this lane"
            raise PatchError(f"{each.package}: cannot verify on it: {reason}")
    found = {each.package: each for each in states if each.installed is not None}
    for patch in selected:
        if only and patch.package not in found:
            raise PatchError(f"patch {patch.id!r}: {patch.package} is not installed")
    selected = tuple(patch for patch in selected if patch.package in found)
    if not selected:
        raise PatchError(f"none of {', '.join(manifest.packages)} is installed: nothing to verify")
    return _prove(found.values(), selected, timeout)


def _prove(
    found: Collection[PackageState], selected: Sequence[Patch], timeout: float
) -> Iterator[Proof]:
    sites = [each.installed.site for each in found]
    with tempfile.TemporaryDirectory(prefix="megacpp-verify-") as scratch:
        trees = pristine, patched = Path(scratch, "pristine"), Path(scratch, "patched")
        for each in found:
            _copy_package(each, pristine, ())
            _copy_package(each, patched, [patch.id for patch in each.patches])
        for patch in selected:
            runs = [run(patch.reproducer, tree, sites, timeout) for tree in trees]
            yield Proof(patch.id, *_judge(patch, *runs), *runs)


def _copy_package(found: PackageState, target: Path, ids: Collection[str]) -> None:
    """Copy an installed package, without caches, to `target` with exactly the patches `ids`."""
    site, without = found.installed.site, shutil.ignore_patterns("__pycache__")
    for name in {path.split("/")[0] for path in found.files} | {found.installed.info.name}:
        shutil.copytree(site / name, target / name, ignore=without, dirs_exist_ok=True)
    for path in found.links:
        data = found.composed(path, ids)
        (target / path).unlink(missing_ok=True)
        if data is not None:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)


def run(script: Path, tree: Path, sites: Sequence[Path], timeout: float) -> Run:
    """Run a reproducer with `tree` first on the path."""
    known = {os.path.realpath(entry) for entry in sys.path}
    others = [str(site) for site in sites if str(site) not in known]
    path = [str(tree), *others, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="megacpp-reproducer-") as folder:
        process = subprocess.Popen(
            [sys.executable, str(script.resolve())],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it starts ends with it
        )
        try:
            outputs, status = process.communicate(timeout=timeout), process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            outputs, status = process.communicate(), None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    printed, log = (data.decode("utf-8", "replace").strip().splitlines() for data in outputs)
    return Run(status, printed[-1] if printed else "", "\n".join(log[-_LOG_LINES:]))


def _judge(patch: Patch, pristine: Run, patched: Run) -> tuple[str, str]:
    both = f"without the patch: {pristine.meaning}; with it: {patched.meaning}"
    statuses = (pristine.status, patched.status)
    if statuses == (DEFECT, RIGHT) and not pristine.crashed:
        return PROVED, both
    if statuses == (CANNOT_RUN, CANNOT_RUN) and patch.needs == "gpu":
        return NOT_RUN, f"needs a GPU: {pristine.saw or 'the reproducer gave no reason'}"
    if statuses == (CANNOT_RUN, CANNOT_RUN):
        return FAILED, f"{both}, although the manifest says needs = {patch.needs!r}"
    return FAILED, both
