"""Progress output of a run: a bar on a terminal, lines otherwise."""

import sys
from collections.abc import Callable

from tqdm import tqdm

from megacpp_mcore.recipe.schema import Schedule
from megacpp_mcore.terminal import has_room, left, printable


def step_line(iteration: int, total: int, loss: float, speed: str, lr: float, norm: float) -> str:
    """What a run says of a step, but for the time left. loss in nats per token."""
    return (
        f"step {iteration}/{total} | loss {loss:.4f} | {speed} | lr {lr:.2e} | grad norm {norm:.3f}"
    )


def held_out_line(iteration: int, loss: float) -> str:
    """What a run says of an evaluation, in nats per token."""
    return f"step {iteration} | held-out loss {loss:.4f} nats per token"


class TimeLeft:
    """The time until a run ends: its steps, evaluations and saves that are still to come.

    One that has not been yet: an evaluation's batches take a third of a step's, its forward pass; a
    save is not counted. evaluation_s, save_s: what the last one took.
    """

    def __init__(self, schedule: Schedule, save_interval: int | None, evaluates: bool) -> None:
        self._schedule, self._save_interval, self._evaluates = schedule, save_interval, evaluates
        self.evaluation_s = self.save_s = 0.0

    def seconds(self, done: int, last: int, step_s: float) -> float:
        """Seconds from step `done` to the end of step `last`. step_s: what a step takes."""
        schedule, seconds = self._schedule, (last - done) * step_s
        if self._evaluates:
            evaluation_s = self.evaluation_s or step_s * schedule.eval_iters / 3
            seconds += still_due(schedule.eval_interval, done, last) * evaluation_s
        return seconds + still_due(self._save_interval, done, last) * self.save_s


def still_due(interval: int | None, done: int, last: int) -> int:
    """How often `interval` comes after step `done` and before `last`, and once at the end."""
    return 1 + (last - 1) // interval - done // interval if interval and done < last else 1


_BAR = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class ProgressLog:
    """Progress on stderr: loss, tokens/s, time left. Without a terminal, a line per
    `log_interval`.

    seconds_left: what a step takes, in seconds -> seconds until the run ends, with its
    evaluations and saves.
    """

    def __init__(
        self, start: int, total: int, log_interval: int, seconds_left: Callable[[float], float]
    ) -> None:
        self._interval = log_interval
        self._total = total
        self._seconds_left = seconds_left
        self._bar = tqdm(
            total=total, initial=start, unit="step", file=sys.stderr,
            disable=not has_room(sys.stderr), dynamic_ncols=True, bar_format=_BAR,
        )  # fmt: skip
        self._shown = ""  # behind the bar, without the time left
        self._seconds, self._tokens, self._steps = 0.0, 0, 0  # since the last line

    def step(
        self, iteration: int, loss: float, tokens: int, lr: float, norm: float, seconds: float
    ) -> None:
        """Show a step. loss in nats per token, tokens of the step, norm before clipping, seconds
        that it took."""
        self._seconds += seconds
        self._tokens += tokens
        self._steps += 1
        speed = f"{self._tokens / self._seconds:,.0f} tokens/s"
        rest = f"{left(self._seconds_left(self._seconds / self._steps))} left"
        if not self._bar.disable:
            self._shown = f"loss {loss:.3f}, {speed}"
            self._bar.set_postfix_str(f"{self._shown}, {rest}", refresh=False)
            self._bar.update()
        elif iteration % self._interval == 0 or iteration == self._total:
            self.say(f"{step_line(iteration, self._total, loss, speed, lr, norm)} | {rest}")
        if iteration % self._interval == 0:
            self._seconds, self._tokens, self._steps = 0.0, 0, 0

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(printable(line), file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """Close the bar, and leave it on screen if all steps are done, without a time left."""
        self._bar.leave = self._bar.n >= self._total
        self._bar.set_postfix_str(self._shown, refresh=False)
        self._bar.close()
