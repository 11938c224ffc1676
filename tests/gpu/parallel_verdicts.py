"""Whether a run's losses are those of the one-GPU run, to what bf16 allows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel_layouts import ONE, ROUNDING, STEPS, Run

_BF16_EPS = 2.0**-7


@dataclass
class Outcome:
    """What a run left. losses, norms: by step. reason: why there is nothing to compare, or None."""

    losses: dict[int, float]
    norms: dict[int, float]
    seconds: float = 0.0
    reason: str | None = None


def bound(step: int) -> float:
    """How far a loss may be from the one-GPU run's, as a part of it.

    A rounding to bf16 is wrong by half an epsilon at most. Every step adds to the weights what came
    of its own roundings, independent of the others': after n steps the root of n times as much.
    """
    return _BF16_EPS / 2 * math.sqrt(step)


def spread(step: int, run: Run, outcomes: Mapping[str, Outcome]) -> float:
    """How far other one-GPU runs' losses have been from the one-GPU run's up to a step, as a part
    of it: their roundings are others, or those of other kernels. Where training is chaotic, as
    around a spike of the loss, that is many times the bound: on a CPU a quarter of the weights
    moved by one rounding each, DP 2 and TP 2 were all 2 % away from one rank after 20 steps in
    bf16, and in float32 a rounding moved a loss by 7e-4, TP 2 by 5e-4.
    """
    one, found = outcomes[ONE.name].losses, [0.0]
    for other in ROUNDING:
        losses = outcomes[other.name].losses if other.name in outcomes else {}
        if other.name != run.name:
            found += [abs(losses[s] / one[s] - 1) for s in range(1, step + 1) if s in losses]
    return max(found)


def differences(run: Run, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What of a run is not as it should be: steps that are missing; losses out of bounds of the
    one-GPU run's; and of the run's whose checkpoint it goes on from, with the gradient norm of the
    first step, since both have the weights of that step. (Another run's norms are far apart after
    ten steps, where losses are not.)"""
    outcome, one = outcomes[run.name], outcomes[ONE.name]
    steps = range(run.first_step, STEPS + 1)
    missing = [step for step in steps if step not in outcome.losses]
    if outcome.reason or missing:
        return [outcome.reason or f"no losses of steps {missing}"]
    origin, first = _origin(run), run.first_step
    allowed = {step: bound(step) + 2 * spread(step, run, outcomes) for step in steps}
    found = _apart(outcome.losses, one.losses, "loss", "one GPU", allowed)
    if origin != ONE.name:
        since = {step: allowed[step] - bound(step) + bound(step - first + 1) for step in steps}
        found += _apart(outcome.losses, outcomes[origin].losses, "loss", origin, since)
    norms = outcomes[origin].norms
    return found + _apart(outcome.norms, norms, "gradient norm", origin, {first: bound(1)})


def _origin(run: Run) -> str:
    """The run that has this one's weights before its first step."""
    return run.start[0] if run.resumes else ONE.name


def _apart(
    found: dict[int, float], expected: dict[int, float], what: str, whose: str,
    allowed: Mapping[int, float],
) -> list[str]:  # fmt: skip
    """allowed: by step, as a part of the expected value."""
    return [
        f"step {step}: {what} {found[step]:.6f}, {whose} {expected[step]:.6f}"
        for step, most in allowed.items()
        if not abs(found[step] / expected[step] - 1) <= most
    ]


def line(run: Run, outcome: Outcome) -> str:
    """One run for people: first and last losses, time, or why it failed."""
    losses = list(outcome.losses.items())
    shown = ", ".join(f"{step}: {loss:.6f}" for step, loss in [*losses[:2], *losses[-2:]])
    norms = ", ".join(f"{norm:.6f}" for norm in list(outcome.norms.values())[:1])
    return (
        f"{run.name:16} {run.gpus} GPU {outcome.seconds:6.1f} s  losses {shown}; first gradient "
        f"norm {norms or 'none'}" + (f"  FAILED: {outcome.reason}" if outcome.reason else "")
    )


def table(runs: Iterable[Run], outcomes: Mapping[str, Outcome]) -> str:
    """A verdict a run, with the largest differences of losses and of the first gradient norm."""
    one, lines = outcomes[ONE.name], []
    for run in runs:
        outcome, origin = outcomes[run.name], outcomes[_origin(run)]
        off = [
            abs(outcome.losses[s] / one.losses[s] - 1) for s in outcome.losses if s in one.losses
        ]
        first = run.first_step
        has_norm = first in outcome.norms and first in origin.norms
        norm = abs(outcome.norms[first] / origin.norms[first] - 1) if has_norm else math.nan
        wrong = differences(run, outcomes)
        lines.append(
            f"{run.name:16} loss off by {max(off, default=math.nan):.2e} at most, first gradient "
            f"norm by {norm:.2e}: {'equal' if not wrong else 'DIFFERENT: ' + wrong[0]}"
        )
    return "\n".join(lines)


def unlike_in_print(stock: Outcome, twin: Outcome) -> list[str]:
    """Where Megatron's own script printed another loss or gradient norm than our entry had.

    Its second loss is twice a printed mean less the first: two digits' rounding.
    """
    if list(stock.losses) != list(twin.losses) or not stock.losses:
        return [f"steps {list(stock.losses)} and {list(twin.losses)}"]
    return [
        f"step {step}: loss {stock.losses[step]}, ours {loss}; gradient norm {stock.norms[step]}, "
        f"ours {twin.norms[step]}"
        for step, loss in twin.losses.items()
        if not abs(stock.losses[step] - loss) <= (2e-6 if step == 2 else 0.51e-6)
        or not abs(stock.norms[step] - twin.norms[step]) <= 0.51e-3
    ]
