"""A stand-in for a GPU that is always late: what is copied from it is there after a wait only."""

from collections.abc import Callable
from typing import Any

import torch


class LateGpu:
    """As `readback.OnGpu`. Marks are numbers; a step of it takes 100 ms between two of them.

    on_wait: called when the host waits for work that is not done.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.on_wait: Callable[[], Any] = lambda: None
        self._marks = self._done = 0
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def mark(self) -> int:
        self._marks += 1
        return self._marks

    def passed(self, mark: int) -> bool:
        return mark <= self._done

    def wait(self, mark: int) -> None:
        if not self.passed(mark):
            self.on_wait()
            self.finish(mark)

    def finish(self, mark: int | None = None) -> None:
        """Do the work before `mark`, or all of it."""
        self._done = self._marks if mark is None else mark
        for at, copy, source in self._copies:
            if at < self._done:
                copy.copy_(source)

    def milliseconds(self, first: int, last: int) -> float:
        assert first < last <= self._done, "an event that has not passed has no time"
        return 100.0 * (last - first)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(tensor, -777)
        self._copies.append((self._marks, copy, tensor.clone()))
        return copy
