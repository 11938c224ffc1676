"""Every rank's backends: gathered for the receipt, and compared before the first step."""

import socket
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import Decision, DispatchError, Workload

# What a rank decided: its host, and (surface, workload) -> decisions, None for what nobody asked.
_OfRank = tuple[str, dict[tuple[str, Workload | None], tuple[Decision, ...]]]


def gather() -> list[dict[str, Any]]:
    """The decisions of all ranks, as a receipt has them. Every rank calls it, and gets the same.

    Equal ones are one row, with "ranks" where not all have it. Raises DispatchError, on every rank,
    when two ranks were asked the same and chose different backends.
    """
    mine: _OfRank = (socket.gethostname(), dispatch.questions())
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    refuse_different(found)
    return rows(found)


def refuse_different(found: list[_OfRank]) -> None:
    """found: by rank. Raises DispatchError as `gather`, naming the ranks, hosts and reasons."""
    first: dict[tuple[str, Workload | None], int] = {}
    for rank, (_, questions) in enumerate(found):
        for question, decisions in questions.items():
            other = first.setdefault(question, rank)
            if _served(decisions) != _served(found[other][1][question]):
                told = (_told(number, found[number], question) for number in (other, rank))
                raise DispatchError(
                    f"ranks chose different backends for surface {question[0]!r}: "
                    f"{'; '.join(told)}. "
                    "Their results would differ: repair the package on that host, or name the "
                    "backend in the recipe's [backends]"
                )


def rows(found: list[_OfRank]) -> list[dict[str, Any]]:
    """found: by rank. The distinct decisions, in the order of the first rank that has them."""
    ranks: dict[Decision, list[int]] = {}
    for rank, (_, questions) in enumerate(found):
        for decision in dict.fromkeys(d for decisions in questions.values() for d in decisions):
            ranks.setdefault(decision, []).append(rank)
    return [
        asdict(decision) | ({} if len(having) == len(found) else {"ranks": _ranges(having)})
        for decision, having in ranks.items()
    ]


def _served(decisions: tuple[Decision, ...]) -> set[tuple[str, str]]:
    return {(decision.observed, decision.implementation) for decision in decisions}


def _told(rank: int, found: _OfRank, question: tuple[str, Workload | None]) -> str:
    host, questions = found
    chosen = ", ".join(f"{d.observed} ({d.reason})" for d in questions[question])
    return f"rank {rank} on {host} has {chosen}"


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = (list(run) for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
