"""What a run leaves behind: processes, and shared memory, found by a mark in their environment."""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MARK = "MEGACPP_TEST_MARK"
_WITHIN_S = 10


class Marked:
    """The processes that start with `environment`, and all that come from them."""

    def __init__(self, mark: str | None = None) -> None:
        self.mark = mark or uuid.uuid4().hex
        self.environment = {MARK: self.mark}
        self.shared: set[str] = set()

    def pids(self) -> list[int]:
        """Those that are alive. Zombies, whose memory is freed, have no environment any more."""
        wanted = f"{MARK}={self.mark}".encode()
        found, own = [], os.getpid()
        for path in Path("/proc").iterdir():
            try:
                if (
                    path.name.isdigit()
                    and int(path.name) != own
                    and wanted in (path / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def note_shared_memory(self) -> None:
        """Remember the shared memory that they have now."""
        for pid in self.pids():
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                places = [line.partition("/dev/shm/") for line in lines]
                self.shared |= {f"/dev/shm/{name}" for _, found, name in places if found}
            except OSError:
                continue

    def left(self) -> list[str]:
        """What is still there after ten seconds, or nothing as soon as nothing is."""
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline and (self.pids() or self._memory()):
            time.sleep(0.05)
        return [*map(_command, self.pids()), *self._memory()]

    def _memory(self) -> list[str]:
        return [name for name in self.shared if os.path.exists(name)]


def _command(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return f"{pid}"


def wait_until(there: Callable[[], bool], seconds: float = 240) -> None:
    """Wait for a condition of another process. Ranks that import Megatron beside other tests on two
    busy cores may take two minutes."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
