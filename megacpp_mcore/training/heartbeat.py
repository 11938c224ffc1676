"""A heartbeat of every rank: a rank that makes no progress ends the run, which names it.

The loop calls `beat` at every step, evaluation and save, and `note` where a rank reads data. A
thread writes the rank's last word into FOLDER/rank-N.json, and after `timeout_s` seconds
without one it dumps the stacks of all threads, names the rank with the least progress, and ends
the process. The other ranks wait for it in a collective, so they time out, too, and every rank's
stacks are in the log. A rank whose interpreter is stuck as well (the thread needs it) is ended by
`faulthandler`'s timer.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_mcore.files import read_regular

EXIT_STATUS = 75  # of a rank that ends itself so: sysexits' "temporary failure", to be resumed
_GRACE_S = 20  # from the thread's end of a process to that by faulthandler


class Heartbeat:
    """One rank's. folder: shared by the ranks of a run. timeout_s: None watches nothing.

    on_timeout: called with the sentence that names the rank, before the process ends.
    """

    def __init__(
        self, folder: Path, rank: int, timeout_s: float | None,
        on_timeout: Callable[[str], Any] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self._folder, self._rank, self._timeout = folder, rank, timeout_s
        self._on_timeout = on_timeout
        self._count, self._doing, self._alone = 0, "starting", False
        self._at, self._since = time.time(), time.monotonic()  # a set clock is no hang
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Heartbeat":
        if self._timeout is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._rank == 0:
                self._forget_ranks_of_a_larger_run()
            self.beat("starting")
            self._write()  # in the place of an earlier run's
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()
            self._path(self._rank).unlink(missing_ok=True)

    def _forget_ranks_of_a_larger_run(self) -> None:
        """A run that was killed leaves its files."""
        for path in self._folder.glob("rank-*.json"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) >= int(os.environ.get("WORLD_SIZE", "1")):
                path.unlink(missing_ok=True)

    def beat(self, doing: str) -> None:
        """The rank makes progress: it begins `doing`, as every rank does, so beats are counted."""
        self._count += 1
        self.note(doing)

    def note(self, doing: str, *, alone: bool = False) -> None:
        """Progress that not every rank makes. alone: the rank waits for no other meanwhile."""
        self._doing, self._alone = doing, alone
        self._at, self._since = time.time(), time.monotonic()
        if self._timeout is not None:
            faulthandler.dump_traceback_later(self._timeout + _GRACE_S, exit=True)

    def _watch(self) -> None:
        while not self._stop.wait(min(5.0, self._timeout / 8)):
            self._write()
            if time.monotonic() - self._since > self._timeout:
                self._end()

    def _word(self) -> dict[str, Any]:
        return {"count": self._count, "doing": self._doing, "alone": self._alone, "at": self._at,
                "host": socket.gethostname(), "pid": os.getpid()}  # fmt: skip

    def _write(self) -> None:
        path = self._path(self._rank)
        temporary = path.with_suffix(".tmp")  # not synced: it is for the living
        try:
            temporary.write_text(json.dumps(self._word()))
            temporary.replace(path)
        except OSError:
            return  # a full disk is not what this watches

    def _end(self) -> None:
        sentence = self.verdict()
        print(f"megacpp: {sentence}\nmegacpp: stacks of rank {self._rank}:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        self._on_timeout(sentence)
        os._exit(EXIT_STATUS)

    def verdict(self) -> str:
        """The sentence that names the rank with the least progress, and what it was doing. Of
        those with as many beats it is one that waited for no other, else the first to be silent."""
        ranks = {self._rank: self._word()}
        for path in self._folder.glob("rank-*.json"):
            try:
                number, found = int(path.stem.removeprefix("rank-")), json.loads(read_regular(path))
                found |= {"count": int(found["count"]), "at": float(found["at"])}
                if {"doing", "host"} <= found.keys():
                    ranks.setdefault(number, found)
            except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue  # it is no rank's word

        def order(number: int) -> tuple[int, bool, float]:
            word = ranks[number]
            return word["count"], not word.get("alone"), word["at"]

        last = min(ranks, key=order)
        found = ranks[last]
        return (
            f"rank {last} on {found['host']} has made no progress for "
            f"{time.time() - found['at']:.0f} s: it was {found['doing']}"
        )

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"
