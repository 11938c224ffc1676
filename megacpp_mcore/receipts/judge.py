"""Is B better than A: a verdict by a stated rule.

The rule of `judge_runs` (RUN_RULE) and `judge_rows` (ROW_RULE), which the report prints:

- B's time over A's, and its interval, are as `intervals` says: backends of one bench took turns and
  are compared round by round; two runs, two benches, and benches of fewer than 8 rounds are not.
- Faster: that whole interval is below 1 - margin; slower: above 1 + margin. The margin is there
  because the interval knows the noise within a run and not the one between two runs.
- Losses are paired: same step, same number of tokens; the last quarter of the pairs, 8 at least.
  Worse: the median difference B - A of each of the 8 blocks is above the tolerance; not worse: none
  is. (From the lowest to the highest of 8 is a 99.2 % interval of the median: 1 - 2^-7.) The
  tolerance is what chance would show between two runs on other batches: two standard errors,
  2 s sqrt(2 / n), of the difference of two means of n losses, s the scatter from step to step.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megacpp_mcore.receipts.checks import ReceiptError
from megacpp_mcore.receipts.intervals import (
    BLOCKS,
    Effect,
    block_medians,
    ratio_in_turns,
    time_ratio,
)
from megacpp_mcore.receipts.reader import Receipt, Row, by_round, warm
from megacpp_mcore.surfaces.backend import REFERENCE

MARGIN = 0.01
RUN_RULE = (
    "drop: the loss is worse, or a step slower. keep: both runs are complete, a step is faster and "
    "the loss is not worse. undecided: anything else. Faster or slower: the whole 99 % interval of "
    "the ratio of times per token, over warm steps, lies beyond the margin. Loss: paired step by "
    "step over the last quarter; worse when all 8 blocks' median differences are above the "
    "tolerance (2 standard errors of batch-to-batch scatter), not worse when none is. Memory, "
    "compile time and goodput are shown, not judged; one run a side says nothing of other seeds "
    "or machines"
)
ROW_RULE = (
    "drop: its error is beyond its tolerance, or it is slower. keep: its error is within the "
    "tolerance and it is faster. undecided: anything else. Faster or slower: the whole 99 % "
    "interval of the ratio of times lies beyond the margin. In turns: the ratio is taken round by "
    "round, of 8 rounds or more. Memory is shown, not judged"
)

Verdict = Literal["keep", "drop", "undecided"]
Speed = Literal["faster", "slower", "undecided"]
LossJudgement = Literal["worse", "not worse", "undecided"]


@dataclass(frozen=True)
class LossEffect:
    """The paired difference of losses, B - A, over `pairs` steps from `first_step` on."""

    effect: Effect
    tolerance: float
    pairs: int
    first_step: int
    judgement: LossJudgement


@dataclass(frozen=True)
class Judgement:
    """A verdict and the sentences that explain it."""

    verdict: Verdict
    reasons: tuple[str, ...]
    time: Effect
    loss: LossEffect | None = None


def speed(ratio: Effect, margin: float) -> Speed:
    """What a ratio of times says, given a margin (0.01 is one percent)."""
    if ratio.high is not None and ratio.high < 1 - margin:
        return "faster"
    if ratio.low is not None and ratio.low > 1 + margin:
        return "slower"
    return "undecided"


def is_wrong(row: Row) -> bool:
    """Whether a bench refused the row's results: its error is beyond its tolerance."""
    return row["error"] is not None and row["error"] > row["tolerance"]


def judge_rows(base: Row, row: Row, margin: float, *, in_turns: bool) -> Judgement:
    """Judge one bench row against another of the same phase; the rule is ROW_RULE. in_turns: they
    are of one receipt."""
    rounds = (by_round(base), by_round(row)) if in_turns else (None, None)
    ratio = ratio_in_turns(*rounds) if None not in rounds else None
    ratio = ratio or time_ratio(base["samples_ms"], row["samples_ms"])
    fast = speed(ratio, margin)
    if is_wrong(row):
        reason = f"wrong: error {row['error']:.3g} is beyond the tolerance {row['tolerance']:.3g}"
        return Judgement("drop", (reason,), ratio)
    if row["error"] is None and row["backend"] != REFERENCE and fast == "faster":
        return Judgement("undecided", ("faster, but its error was not measured",), ratio)
    verdicts: dict[str, Verdict] = {"faster": "keep", "slower": "drop", "undecided": "undecided"}
    return Judgement(verdicts[fast], (_time_reason(fast, ratio, margin),), ratio)


def judge_runs(a: Receipt, b: Receipt, margin: float = MARGIN) -> Judgement:
    """Judge run B against run A; the rule is RUN_RULE.

    Raises ReceiptError when one of them has no warm step.
    """
    rates = [warm(run, "tokens_per_s") for run in (a, b)]
    for name, rate in zip("AB", rates, strict=True):
        if not rate:
            raise ReceiptError(f"{name} has no warm step: nothing to compare")
    ratio = time_ratio(*([1 / tokens_per_s for tokens_per_s in rate] for rate in rates))
    fast = speed(ratio, margin)
    loss = _loss_effect(a["series"], b["series"])
    reasons = [f"time: {_time_reason(fast, ratio, margin)}", f"loss: {_loss_reason(loss)}"]
    incomplete = [
        f"{name} is {receipt['result']['status']}"
        for name, receipt in (("A", a), ("B", b))
        if receipt["result"]["status"] != "complete"
    ]
    if fast == "slower" or (loss and loss.judgement == "worse"):
        verdict: Verdict = "drop"
    elif fast == "faster" and loss and loss.judgement == "not worse" and not incomplete:
        verdict = "keep"
    else:
        verdict = "undecided"
    return Judgement(verdict, (*reasons, *incomplete), ratio, loss)


def _time_reason(fast: Speed, ratio: Effect, margin: float) -> str:
    if ratio.low is None or ratio.high is None:
        return "too few samples for an interval; 5 a side are enough"
    if fast != "undecided":
        return fast
    if ratio.low >= 1 - margin and ratio.high <= 1 + margin:
        return "no difference beyond the margin"
    return "the interval reaches into the margin"


def _loss_effect(a: Mapping[str, list], b: Mapping[str, list]) -> LossEffect | None:
    losses_a = dict(zip(zip(a["step"], a["tokens"], strict=True), a["loss"], strict=True))
    pairs = [
        (step, losses_a[step, tokens], loss)
        for step, tokens, loss in zip(b["step"], b["tokens"], b["loss"], strict=True)
        if losses_a.get((step, tokens)) is not None
    ]
    pairs = pairs[-max(BLOCKS, math.ceil(len(pairs) / 4)) :]
    if not pairs:
        return None
    count, first_step = len(pairs), pairs[0][0]
    if any(loss_b is None for _, _, loss_b in pairs):
        return LossEffect(Effect(math.inf, None, None), 0.0, count, first_step, "worse")
    deltas = [loss_b - loss_a for _, loss_a, loss_b in pairs]
    tolerance = _tolerance([loss_a for _, loss_a, _ in pairs])
    blocks, median = block_medians(deltas), statistics.median(deltas)
    if count < BLOCKS:
        return LossEffect(Effect(median, None, None), tolerance, count, first_step, "undecided")
    judgement: LossJudgement = "undecided"
    if min(blocks) > tolerance:
        judgement = "worse"
    elif max(blocks) <= tolerance:
        judgement = "not worse"
    effect = Effect(median, min(blocks), max(blocks))
    return LossEffect(effect, tolerance, count, first_step, judgement)


def _tolerance(losses: Sequence[float]) -> float:
    """2 s sqrt(2 / n); s from neighbours' differences, so that the falling trend is not in it."""
    if len(losses) < 2:
        return 0.0
    steps = [abs(after - before) for before, after in itertools.pairwise(losses)]
    # the median of |x - y| for two normals of deviation s is 0.6745 * sqrt(2) * s
    scatter = statistics.median(steps) / (0.6745 * math.sqrt(2))
    return 2 * scatter * math.sqrt(2 / len(losses))


def _loss_reason(loss: LossEffect | None) -> str:
    if loss is None:
        return "no step that both have at the same number of tokens"
    if loss.effect.value == math.inf:
        return "worse, B's is not finite"
    if loss.effect.low is None or loss.effect.high is None:
        return f"{loss.pairs} steps in common, {BLOCKS} are needed"
    return (
        f"{loss.judgement}, {loss.effect.low:+.4f} to {loss.effect.high:+.4f} nats per token "
        f"against a tolerance of {loss.tolerance:.4f}"
    )
