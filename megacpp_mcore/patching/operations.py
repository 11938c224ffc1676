"""`apply` and `revert`: read the state, plan, check, then switch."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patching import plan, site, state, transaction
from megacpp_mcore.patching.errors import PatchError
from megacpp_mcore.patching.manifest import Manifest, Patch
from megacpp_mcore.patching.state import PackageState
from megacpp_mcore.patching.store import Store
from megacpp_mcore.patching.transaction import Step, no_step

WAIT = 30.0  # seconds to wait for another run on the same site


@dataclass(frozen=True)
class Outcome:
    """What a run did. changed: the files it switched. applied: package -> ids now applied."""

    operation: str
    changed: tuple[str, ...]
    applied: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Request:
    """What is asked for. whole: no patch was named."""

    operation: str
    manifest: Manifest
    folder: Path | None
    selected: Sequence[Patch]
    whole: bool


def apply(
    manifest: Manifest,
    folder: Path | None = None,
    only: Collection[str] = (),
    wait: float = WAIT,
    step: Step = no_step,
) -> Outcome:
    """Put the lane, or the patches named in `only` beside those applied already, on a site.

    folder: site-packages; None for this interpreter's. wait: seconds for another run to end.
    Idempotent. Raises PatchError when anything is not as it must be; nothing has been changed then,
    except that a run broken off earlier may have been finished (its message says so).
    """
    return _run("apply", manifest, folder, only, wait, step)


def revert(
    manifest: Manifest,
    folder: Path | None = None,
    only: Collection[str] = (),
    wait: float = WAIT,
    step: Step = no_step,
) -> Outcome:
    """Take the lane, or the patches named in `only`, off again: the original bytes and modes.

    Arguments and errors as in `apply`. Also takes off what another release of the lane applied.
    """
    return _run("revert", manifest, folder, only, wait, step)


def _run(
    operation: str,
    manifest: Manifest,
    folder: Path | None,
    only: Collection[str],
    wait: float,
    step: Step,
) -> Outcome:
    manifest.check_diffs()
    request = _Request(operation, manifest, folder, manifest.select(only), not only)
    notes: list[str] = []
    with contextlib.ExitStack() as locks:
        try:
            plans, absent = _locked_plans(request, locks, notes, wait, step)
            for each in plans:
                transaction.stage(
                    each.store, operation, each.versions, each.writes, each.originals, step
                )
                completed, why = transaction.finish(each.store, _versions(each.store), step)
                if not completed:
                    raise PatchError(f"{each.store.site}: {why}. Nothing was changed there")
        except OSError as error:  # of reading or locking: the transaction handles its own
            said = [*notes, f"{error}: nothing was changed; {operation} again"]
            raise PatchError("; ".join(said)) from error
        except PatchError as error:
            if not notes:
                raise
            raise type(error)("; ".join([*notes, str(error)])) from error
        applied = {
            package: tuple(p.id for p in manifest.of(package) if p.id in found.applied(manifest))
            for package in manifest.packages
            if (found := state.read(manifest, package, folder)).installed is not None
        }
    changed = [str(p.store.site / w.path) for p in plans for w in p.writes if w.patched]
    return Outcome(operation, tuple(changed), applied, (*notes, *absent))


def _locked_plans(
    request: _Request, locks: contextlib.ExitStack, notes: list[str], wait: float, step: Step
) -> tuple[list[plan.Plan], list[str]]:
    """The plans that write something, with every site they write to locked, and nothing unfinished.

    Plans first without any lock, so that a run with nothing to do writes nothing at all.
    """
    held: set[Path] = set()
    while True:
        plans, absent = [], []
        wanted = [kept for kept in state.stores(request.folder) if kept.unfinished()]
        if held.issuperset(kept.site for kept in wanted):
            try:
                plans, absent = _plan(request)
                wanted = [each.store for each in plans]
            except (PatchError, OSError):
                # Read without the lock, the state may be torn by a run beside this one.
                wanted = _writable(request)
                if held.issuperset(kept.site for kept in wanted):
                    raise
        wanted = [kept for kept in wanted if kept.site not in held]
        if not wanted:
            return plans, absent
        for kept in sorted(wanted, key=lambda kept: kept.site):
            plan.check_folder(kept.site)
            locks.enter_context(kept.locked(wait))
            locks.callback(_clean, kept)
            held.add(kept.site)
            if kept.journal.exists():
                _, done = transaction.finish(kept, _versions(kept), step)
                notes.append(f"{kept.site}: {done}")


def _plan(request: _Request) -> tuple[list[plan.Plan], list[str]]:
    """The plans that write, and a sentence for each package that is left out because absent."""
    manifest, where = request.manifest, request.folder or "this interpreter's site-packages"
    working: list[PackageState] = []
    absent: list[str] = []
    for package in dict.fromkeys(patch.package for patch in request.selected):
        found = state.read(manifest, package, request.folder)
        leftovers = found.foreign_version and found.files and request.operation == "revert"
        if found.problem and not (leftovers and request.whole):
            raise PatchError(f"{found.problem}. Nothing was changed")
        if found.installed is not None:
            working.append(found)
        elif request.whole:
            count = len(manifest.of(package))
            absent.append(f"{package} is not installed: its {count} patches are left out")
        else:
            raise PatchError(f"{package} {found.pinned} is not installed in {where}")
    if not working:
        raise PatchError(
            f"none of {', '.join(manifest.packages)} is installed in {where}: there is nothing to "
            f"{request.operation}"
        )
    plans = plan.build(manifest, working, request.operation, request.selected, request.whole)
    return [each for each in plans if each.writes], absent


def _writable(request: _Request) -> list[Store]:
    """The stores of the sites that have a pinned package and let this user write."""
    sites = {}
    for package in request.manifest.packages:
        with contextlib.suppress(PatchError):
            installed = site.find(package, request.folder)
            if installed is not None:
                plan.check_folder(installed.site)
                sites[installed.site] = Store(installed.site)
    return list(sites.values())


def _versions(store: Store) -> Callable[[str], str | None]:
    def installed_version(package: str) -> str | None:
        try:
            found = site.find(package, store.site)
        except PatchError:
            return None  # there, but as a checkout or half installed: not what the run worked on
        return found.version if found else None

    return installed_version


def _clean(store: Store) -> None:
    try:
        store.clean()
    except OSError as error:
        raise PatchError(
            f"the files are as asked, but {store.path} could not be tidied: {error}"
        ) from error
