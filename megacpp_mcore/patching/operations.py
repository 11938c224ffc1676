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
    return _run(manifest, "apply", folder, only, wait, step)


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
    return _run(manifest, "revert", folder, only, wait, step)


def _run(
    manifest: Manifest,
    operation: str,
    folder: Path | None,
    only: Collection[str],
    wait: float,
    step: Step,
) -> Outcome:
    manifest.check_diffs()
    selected = manifest.select(only)
    notes: list[str] = []
    held: dict[Path, Store] = {}
    with contextlib.ExitStack() as locks:
        try:
            while True:
                plans, absent = [], []
                to_lock = [s for s in state.stores(folder) if s.unfinished() and s.site not in held]
                if not to_lock:
                    try:
                        plans, absent = _plan(manifest, operation, folder, selected, not only)
                    except PatchError:
                        # Read without the lock, the state may be torn by a run beside this one.
                        to_lock = [s for s in _writable(manifest, folder) if s.site not in held]
                        if not to_lock:
                            raise
                    else:
                        to_lock = [p.store for p in plans if p.writes and p.store.site not in held]
                if not to_lock:
                    break
                for store in sorted(to_lock, key=lambda store: store.site):
                    plan.check_folder(store.site)
                    locks.enter_context(store.locked(wait))
                    locks.callback(_clean, store)
                    held[store.site] = store
                    notes += _recover(store, step)
            plans = [each for each in plans if each.writes]
            for each in plans:
                transaction.stage(
                    each.store, operation, each.versions, each.writes, each.originals, step
                )
                transaction.finish(each.store, _versions(each.store), step)
        except PatchError as error:
            if not notes:
                raise
            raise PatchError("; ".join([*notes, str(error)])) from error
        changed = [str(p.store.site / w.path) for p in plans for w in p.writes if w.patched]
        applied = {
            package: tuple(p.id for p in manifest.of(package) if p.id in found.applied(manifest))
            for package in manifest.packages
            if (found := state.read(manifest, package, folder)).installed is not None
        }
    return Outcome(operation, tuple(changed), applied, (*notes, *absent))


def _plan(
    manifest: Manifest,
    operation: str,
    folder: Path | None,
    selected: Sequence[Patch],
    all_: bool,
) -> tuple[list[plan.Plan], list[str]]:
    """The plans, and a sentence for each package that is left out because it is absent."""
    working: list[PackageState] = []
    absent: list[str] = []
    for package in dict.fromkeys(patch.package for patch in selected):
        found = state.read(manifest, package, folder)
        if found.problem and not (found.foreign_version and found.files and operation == "revert"):
            raise PatchError(f"{found.problem}. Nothing was changed")
        if found.problem and not all_:
            raise PatchError(f"{found.problem}: only `revert` without --only can work on it")
        if found.installed is not None:
            working.append(found)
            continue
        count = len(manifest.of(package))
        absent.append(f"{package} is not installed: its {count} patches are left out")
        if not all_:
            raise PatchError(f"{package} {found.pinned} is not installed in {_where(folder)}")
    if not working:
        raise PatchError(
            f"none of {', '.join(manifest.packages)} is installed in {_where(folder)}: there is "
            f"nothing to {operation}"
        )
    return plan.build(manifest, working, operation, selected, all_), absent


def _writable(manifest: Manifest, folder: Path | None) -> list[Store]:
    """The stores of the sites that have a pinned package and let this user write."""
    sites = {}
    for package in manifest.packages:
        with contextlib.suppress(PatchError):
            installed = site.find(package, folder)
            if installed is not None:
                plan.check_folder(installed.site)
                sites[installed.site] = Store(installed.site)
    return list(sites.values())


def _where(folder: Path | None) -> str:
    return str(folder) if folder else "this interpreter's site-packages"


def _versions(store: Store) -> Callable[[str], str | None]:
    def installed_version(package: str) -> str | None:
        try:
            found = site.find(package, store.site)
        except PatchError:
            return None  # there, but as a checkout or half installed: not what the run worked on
        return found.version if found else None

    return installed_version


def _recover(store: Store, step: Step) -> list[str]:
    """Finish what an earlier run left here."""
    done = transaction.finish(store, _versions(store), step)
    return [f"{store.site}: {done}"] if done else []


def _clean(store: Store) -> None:
    try:
        store.clean()
    except OSError as error:
        raise PatchError(
            f"the files are as asked, but {store.path} could not be tidied: {error}"
        ) from error
