"""A run that is told to stop ends its step first."""

import signal
from types import FrameType


class StopSignals:
    """Records SIGINT and SIGTERM instead of exiting; a second signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopSignals":
        self._saved = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
