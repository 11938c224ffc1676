"""The receipt of a run, gathered while it runs: series, goodput and result."""

import bisect
import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts.checks import ReceiptError, validate
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.reader import warm
from megacpp_mcore.receipts.writer import receipt_head, write
from megacpp_mcore.recipe.changes import changed_keys, refused_changes

# A longer series is thinned to every 2nd, 4th, ... step, so that a run of a million steps still
# validates and writes its receipt in about a second.
MAX_ROWS = 8192
FINAL_WINDOW = 20  # kept steps that final_loss is the mean of
SLOW, MOST_SLOW = 1.25, 32  # a slow step, in medians; how many are listed
_REQUIRED = ("step", "tokens", "ms", "tokens_per_s", "peak_memory_bytes", "loss")
_OPTIONAL = ("grad_norm", "lr", "power_w", "power_limited")


@dataclass(frozen=True)
class Work:
    """What a token of training costs: forward and backward, as `hybrid.flops` counts it.

    peak_flops: operations a second that one device could do at most, None where that is not known;
    the model FLOPs utilisation (MFU) is against it. formula, peak: what they are, in words.
    """

    flops_per_token: float
    peak_flops: float | None = None
    formula: str = ""
    peak: str | None = None


class RunReceipt:
    """The receipt of a run in progress; one process (rank 0) holds it.

    recipe: from `recipe_entry`. topology, plan, backends, environment, lane: as in the schema
    (`lane.lane(...)`, `[asdict(decision) for decision in dispatch.decisions()]`, which is complete
    once the model is built). goodput: the ledger of this process. work: with it the result has the
    speed in operations. Nothing is written until `write`.
    Raises ReceiptError at once when one of them is not as the schema says.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        recipe: dict[str, Any],
        topology: dict[str, int],
        plan: dict[str, Any],
        backends: Sequence[dict[str, Any]],
        environment: dict[str, dict[str, str]],
        lane: dict[str, Any],
        goodput: Goodput,
        work: Work | None = None,
    ) -> None:
        self.path = Path(path)
        self._work = work
        self._goodput = goodput
        self._head = receipt_head("run", recipe, topology, backends, environment, lane, [])
        self._head["plan"] = plan
        self._columns: dict[str, list] = {name: [] for name in (*_REQUIRED, *_OPTIONAL)}
        self._evaluations: dict[str, list] = {"step": [], "loss": []}
        self._stride = 1
        self._cold_steps: list[int] = []
        self._gaps: list[dict[str, Any]] = []
        self._skip = 0  # steps to leave out before the next kept one
        self._last_step = self._tokens = self._peak = 0
        self._warm = False
        # now, not at the first checkpoint an hour from here
        validate(self._document("running", None, {}), f"the receipt for {self.path}")

    def resume(self, earlier: dict[str, Any], step: int, tokens: int) -> None:
        """Go on from `earlier`, the receipt of the run so far, at the checkpoint of `step`.

        tokens: trained on up to that checkpoint. What `earlier` recorded after the checkpoint is
        dropped, and its step time becomes `lost`. Raises ReceiptError when `earlier` is no run
        or another recipe's (`recipe.changes.refused_changes`), or when this process has recorded
        steps already.
        """
        if earlier["kind"] != "run":
            raise ReceiptError(f"a run cannot resume from a {earlier['kind']} receipt")
        recipes = earlier["recipe"]["content"], self._head["recipe"]["content"]
        changed = changed_keys(*recipes)
        if refused := refused_changes(*recipes):
            raise ReceiptError(
                f"the earlier receipt is of recipe {_recipe_text(earlier['recipe'])}, this run "
                f"of {_recipe_text(self._head['recipe'])}: {refused}; resume with the same recipe, "
                "or write to another path"
            )
        if self._last_step:
            raise ReceiptError(f"resume comes before the first step; step {self._last_step} is in")
        series, info = earlier["series"], earlier["series_info"]
        keep = bisect.bisect_right(series["step"], step)
        for name, column in self._columns.items():
            column.extend(series.get(name, [None] * keep)[:keep])
        evaluated = bisect.bisect_right(earlier["evaluations"]["step"], step)
        for name, column in self._evaluations.items():
            column.extend(earlier["evaluations"][name][:evaluated])
        self._stride = info["stride"]
        self._cold_steps = [cold for cold in info["cold_steps"] if cold <= step]
        self._gaps = [gap for gap in info["gaps"] if gap["step"] <= step]
        self._goodput.resume(earlier["goodput"], self._lost_s(earlier, keep))
        if (profile := earlier.get("profile")) and profile["step"] <= step:
            self.profile(profile)
        self._last_step, self._tokens = step, tokens
        self._peak = earlier["result"]["peak_memory_bytes"] or 0
        self._head["created"] = earlier["created"]
        self._head["notes"] = [*earlier["notes"], f"resumed from the checkpoint of step {step}"]
        for key, (before, now) in changed.items():
            self.note(f"from step {step + 1} on {key} is {now}, before it was {before}")
        if (known := earlier["result"]["steps"]) < step:
            self.note(
                f"steps {known + 1} to {step} are not in the series: the process that did them "
                "ended before it wrote its receipt"
            )
        fields = ("lane", "topology", "backends", "environment", "code", "patches")
        if changed := [name for name in fields if earlier.get(name) != self._head[name]]:
            # what the receipt says of them is true from here on only
            self._cold_steps = list(self._columns["step"])
            self.note(
                f"from step {step + 1} on with another {', '.join(changed)}; the steps before "
                "count as cold"
            )

    def _lost_s(self, earlier: dict[str, Any], keep: int) -> float:
        """Step time of the rows from `keep` on. On a GPU a cold step's is booked as compile."""
        rows, cold = earlier["series"], earlier["series_info"]["cold_steps"]
        dropped = list(zip(rows["step"], rows["ms"], strict=True))[keep:]
        compiled_s = sum(ms for step, ms in dropped if step in cold) / 1000
        compiled_s = min(compiled_s, earlier["goodput"]["segments"][-1]["seconds"]["compile"])
        return sum(ms for _, ms in dropped) * self._stride / 1000 - compiled_s

    def step(
        self,
        step: int,
        *,
        tokens: int,
        ms: float,
        loss: float,
        peak_memory_bytes: int | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        power_w: float | None = None,
        power_limited: float | None = None,
        cold: bool = False,
    ) -> None:
        """Record one training step; costs a few microseconds, however long the run is.

        step: counted from 1. tokens: in this step, over all ranks. ms: wall time of the step. loss:
        nats per token. cold: this step compiled or autotuned; the first one of a process always
        counts as cold. power_w: mean power of this process's GPU in the step. power_limited: share
        of the step in which its power limit held the clock down. A loss or grad_norm that is not
        finite is stored as null with its reason.
        Raises ReceiptError when step does not grow, or tokens or ms is not positive and finite.
        """
        if step <= self._last_step:
            raise ReceiptError(f"step {step} comes after step {self._last_step}; steps must grow")
        if not (tokens > 0 and 0 < ms < math.inf):
            raise ReceiptError(f"step {step}: tokens {tokens} and ms {ms} must be positive, finite")
        self._last_step = int(step)
        self._tokens += int(tokens)
        self._peak = max(self._peak, int(peak_memory_bytes or 0))
        cold = cold or not self._warm
        self._warm = True
        if self._skip:
            self._skip -= 1
            return
        if cold:
            self._cold_steps.append(self._last_step)
        values = (
            int(step),
            self._tokens,
            round(float(ms), 6),
            round(float(tokens * 1000 / ms), 4),
            None if peak_memory_bytes is None else int(peak_memory_bytes),
            self._finite(step, "loss", loss),
            self._finite(step, "grad_norm", grad_norm),
            self._finite(step, "lr", lr),
            self._finite(step, "power_w", power_w),
            self._finite(step, "power_limited", power_limited),
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._skip = self._stride - 1
        if len(self._columns["step"]) >= MAX_ROWS:
            self._thin()

    def _thin(self) -> None:
        for column in self._columns.values():
            del column[1::2]
        kept = set(self._columns["step"])
        self._cold_steps = [step for step in self._cold_steps if step in kept]
        self._gaps = [
            gap for gap in self._gaps if gap["step"] in kept or gap["column"] == "evaluation"
        ]
        self._skip = self._stride - 1  # the row just dropped was half a new stride away
        self._stride *= 2

    def _finite(self, step: int, column: str, value: float | None) -> float | None:
        if value is None:
            return None
        value = float(value)  # a numpy or torch scalar is no JSON number
        if math.isfinite(value):
            return value
        gap = {"step": int(step), "column": column, "value": str(value), "reason": "not finite"}
        self._gaps.append(gap)
        return None

    def evaluation(self, step: int, loss: float) -> None:
        """Record the held-out loss (nats per token) after `step` steps; 0 is before training.

        Evaluating a step again replaces its loss. Raises ReceiptError for a step before the last.
        """
        steps, losses = self._evaluations["step"], self._evaluations["loss"]
        if steps and step < steps[-1]:
            raise ReceiptError(f"an evaluation of step {step} comes after one of {steps[-1]}")
        if steps and step == steps[-1]:
            steps.pop()
            losses.pop()
        steps.append(int(step))
        losses.append(self._finite(step, "evaluation", loss))

    def profile(self, found: dict[str, Any]) -> None:
        """Record which kernels one step ran: its number, and as in the schema."""
        self._head["profile"] = found

    def note(self, sentence: str) -> None:
        """Add what a reader of the receipt must know, once however often the run is resumed."""
        if sentence not in self._head["notes"]:
            self._head["notes"].append(sentence)

    def write(
        self, status: str = "running", reason: str | None = None, **result: Any
    ) -> dict[str, Any]:
        """Write the receipt as it stands, at a checkpoint and at the end, and return it.

        status: running, complete, interrupted or failed; the last two need a reason. result: more
        figures for the receipt's `result` (`unigram_entropy=...`), numbers, strings, booleans.
        Raises ReceiptError as `receipts.write` does, and for a result that is computed here.
        """
        document = self._document(status, reason, result)
        write(self.path, document)
        return document

    def _document(self, status: str, reason: str | None, result: dict[str, Any]) -> dict[str, Any]:
        own = self._result(status, reason)
        if taken := own.keys() & result.keys():
            raise ReceiptError(f"result {', '.join(sorted(taken))} is computed by the receipt")
        filled = {
            name: column
            for name, column in self._columns.items()
            if name in _REQUIRED or any(value is not None for value in column)
        }
        document = self._head | {
            "goodput": self._goodput.record(),
            "series": filled,
            "series_info": self._info(),
            "evaluations": self._evaluations,
            "result": own | result,
        }
        return copy.deepcopy(document)  # the caller's copy does not change with the next step

    def _info(self) -> dict[str, Any]:
        return {"stride": self._stride, "cold_steps": self._cold_steps, "gaps": self._gaps}

    def _result(self, status: str, reason: str | None) -> dict[str, Any]:
        series = {"series": self._columns, "series_info": self._info()}
        speeds, times = warm(series, "tokens_per_s"), warm(series, "ms")
        speed = statistics.median(speeds) if speeds else None
        wall = self._goodput.record()["wall_s"]
        losses = self._columns["loss"][-FINAL_WINDOW:]
        evaluated = self._evaluations["loss"]
        return {
            "status": status,
            "reason": reason,
            "steps": self._last_step,
            "tokens": self._tokens,
            "final_loss": statistics.fmean(losses) if losses and None not in losses else None,
            "final_eval_loss": evaluated[-1] if evaluated else None,
            "tokens_per_s_median": speed,
            "tokens_per_s_mean": round(statistics.fmean(speeds, times), 4) if speeds else None,
            "tokens_per_s_wall": round(self._tokens / wall, 4) if wall else None,
            "slow_steps": _slow(list(zip(warm(series, "step"), times, strict=True))),
            "peak_memory_bytes": self._peak or None,
            **self._speed_in_operations(speed),
        }

    def _speed_in_operations(self, tokens_per_s: float | None) -> dict[str, float | None]:
        if self._work is None:
            return {}
        flops, peak, speed = self._work.flops_per_token, self._work.peak_flops, None
        if tokens_per_s is not None:
            speed = tokens_per_s * flops / self._head["topology"]["world_size"]
        return {
            "flops_per_token": flops,
            "flops_formula": self._work.formula,
            "tflops_per_s_per_device": None if speed is None else round(speed / 1e12, 4),
            "mfu": None if speed is None or peak is None else round(speed / peak, 6),
            "mfu_peak_tflops": None if peak is None else peak / 1e12,
            "mfu_peak": self._work.peak,
        }


def _slow(times: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Those of (step, ms) that took more than SLOW medians, the slowest first."""
    if not times:
        return []
    limit = SLOW * statistics.median(ms for _, ms in times)
    found = sorted((pair for pair in times if pair[1] > limit), key=lambda pair: -pair[1])
    return [list(pair) for pair in found[:MOST_SLOW]]


def _recipe_text(recipe: dict[str, Any]) -> str:
    return f"{recipe['name']} ({recipe['sha256'][:12]})"
