"""The patch lane: a small, tracked, verified set of patches on the pinned packages.

The lane itself is data (`patches/`). `megacpp patch` is its command; the two functions here are for
layers that drop a bridge when a patch makes it needless, and for `train` and `doctor`, which name
the patches that a plan needs. Importing this module reads no file and imports nothing heavy.

From data to disk: `manifest` (the lane's schema), `diffs` (bytes in, bytes out), `site` (where a
package is installed), `store` (the lane's folder in a site), `state` (what is applied, by digest),
`transaction` (the switch), `operations` (apply and revert). On top: verify, new, export, port.
"""

import functools
from collections.abc import Iterable

from megacpp_mcore.errors import MegacppError

__all__ = ["DependencyError", "InterruptedRun", "PatchError", "applied", "missing"]


class PatchError(MegacppError):
    """A lane, a site or a request that the patch lane refuses; names the file, entry or key."""


class InterruptedRun(PatchError):
    """The switch of the files was broken off; the journal stays, and the next run finishes it."""

    exit_status = 1


class DependencyError(PatchError):
    """A chosen patch changes lines that a patch not chosen writes or removes; `needs` is its id."""

    def __init__(self, message: str, needs: str = "") -> None:
        super().__init__(message)
        self.needs = needs


@functools.cache
def applied(package: str) -> frozenset[str]:
    """The ids of the shipped lane that are applied to `package` as this interpreter imports it.

    Read from the files' digests, once per process. Empty when the package is absent, of another
    version, editable, or shadowed by a checkout on the path; a patch with a drifted file is not
    applied. Raises PatchError for a package that the lane does not know, and while a run on it is
    unfinished.
    """
    from megacpp_mcore.patching import manifest, state

    lane = manifest.load()
    if package not in lane.packages:
        known = ", ".join(lane.packages) or "none"
        raise PatchError(f"the lane has no package {package!r}; it has {known}")
    found = state.read(lane, package)
    if found.interrupted:
        raise PatchError(f"{package}: {found.interrupted}")
    return frozenset(found.applied)


def missing(ids: Iterable[str]) -> tuple[str, ...]:
    """Those of `ids` that are not applied here, in the lane's order. Refuses an unknown id."""
    from megacpp_mcore.patching import manifest

    ids = tuple(ids)
    patches = manifest.load().select(ids) if ids else ()
    return tuple(patch.id for patch in patches if patch.id not in applied(patch.package))
