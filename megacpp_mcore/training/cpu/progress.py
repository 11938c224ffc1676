"""Progress output of a run: a bar on a terminal, lines otherwise."""

import sys
import time

from tqdm import tqdm


class ProgressLog:
    """Progress on stderr: loss, tokens/s, ETA. Without a terminal, a line per `log_interval`."""

    def __init__(self, start: int, total: int, log_interval: int) -> None:
        self._interval = log_interval
        self._total = total
        self._bar = tqdm(
            total=total, initial=start, unit="step", file=sys.stderr, disable=None,
            dynamic_ncols=True,
        )  # fmt: skip
        self._mark, self._tokens = time.monotonic(), 0
        self._done_since_mark = 0

    def step(self, iteration: int, loss: float, tokens: int, lr: float, norm: float) -> None:
        """Show a step. loss in nats per token, tokens of the step, norm before clipping."""
        self._tokens += tokens
        self._done_since_mark += 1
        if not self._bar.disable:
            speed = self._tokens / (time.monotonic() - self._mark)
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self._bar.update()
        elif iteration % self._interval == 0 or iteration == self._total:
            self._line(iteration, loss, lr, norm)

    def _line(self, iteration: int, loss: float, lr: float, norm: float) -> None:
        seconds = time.monotonic() - self._mark
        left = (self._total - iteration) * seconds / self._done_since_mark
        self.say(
            f"step {iteration}/{self._total} | loss {loss:.4f} | {self._tokens / seconds:,.0f} "
            f"tokens/s | lr {lr:.2e} | grad norm {norm:.3f} | {left:.0f} s left"
        )
        self._mark, self._tokens, self._done_since_mark = time.monotonic(), 0, 0

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """Close the bar, and leave it on screen."""
        self._bar.close()
