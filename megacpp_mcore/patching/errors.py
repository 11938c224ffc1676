"""The refusals of the patch lane."""

from megacpp_mcore.errors import MegacppError


class PatchError(MegacppError):
    """A lane, a site or a request that the patch lane refuses; names the file, entry or key."""


class InterruptedRun(PatchError):
    """The switch of the files was broken off; the journal stays, and the next run finishes it."""

    exit_status = 1


class DependencyError(PatchError):
    """A chosen patch changes lines that a patch not chosen writes or removes; `needs` is its id."""

    needs: str = ""
