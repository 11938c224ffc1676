"""What every rank decided: one record for all, and no run of ranks that differ."""

from pathlib import Path

import pytest
import ranks

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import Decision, DispatchError, Workload
from megacpp_mcore.training.gpu import decisions

EXPERTS = Workload.of("cuda", "bfloat16", hidden=64)
TE = Decision("moe_experts", "auto", "te", "first in order", "a:b")
FALLEN = Decision("moe_experts", "auto", "reference", "te: cannot import: libcudart", "c:d")
HEADS = Decision("linear_cross_entropy", "auto", "chunked", "first in order", "e:f")
NORM = Decision("norm", "auto", "te", "first in order", "g:h")


def rank(*asked: tuple[Workload | None, Decision], host: str = "node1"):
    return host, {(decision.surface, workload): (decision,) for workload, decision in asked}


def test_equal_decisions_are_recorded_once_and_others_by_rank():
    stages = [rank((EXPERTS, NORM), (EXPERTS, TE))] * 3
    stages += [rank((EXPERTS, NORM))] * 2 + [rank((EXPERTS, NORM), (EXPERTS, HEADS))]
    stages += [rank((EXPERTS, NORM), (EXPERTS, TE))]
    decisions.refuse_different(stages)  # a stage has what others do not have
    rows = decisions.rows(stages)
    assert [(row["surface"], row.get("ranks")) for row in rows] == [
        ("norm", None), ("moe_experts", "0-2, 6"), ("linear_cross_entropy", "5"),
    ]  # fmt: skip


def test_the_same_question_has_one_answer_on_all_ranks():
    found = [rank((EXPERTS, TE)), rank((EXPERTS, TE)), rank((EXPERTS, FALLEN), host="node2")]
    with pytest.raises(DispatchError, match=(
        r"different backends for surface 'moe_experts': rank 0 on node1 has te \(first in order\); "
        r"rank 2 on node2 has reference \(te: cannot import: libcudart\)\."
    )):  # fmt: skip
        decisions.refuse_different(found)
    other = Workload.of("cuda", "bfloat16", hidden=32)
    decisions.refuse_different([rank((EXPERTS, TE)), rank((other, FALLEN))])  # another question
    same = Decision(TE.surface, TE.requested, TE.observed, "another reason", TE.implementation)
    decisions.refuse_different([rank((EXPERTS, TE)), rank((EXPERTS, same))])


def _gathers(number: int, folder: str) -> None:
    dispatch.record(NORM, EXPERTS)
    if number == 1:
        dispatch.record(HEADS, EXPERTS)
    rows = decisions.gather()
    assert [(row["surface"], row.get("ranks")) for row in rows] == [
        ("norm", None), ("linear_cross_entropy", "1"),
    ]  # fmt: skip
    dispatch.record([TE, FALLEN][number], EXPERTS)
    with pytest.raises(DispatchError, match=r"rank 0 on .* has te .* rank 1 on .* has reference"):
        decisions.gather()
    Path(folder, f"{number}.done").touch()


@pytest.mark.slow
def test_every_rank_gathers_and_every_rank_refuses(tmp_path):
    ranks.run_ranks(_gathers, tmp_path)
    assert len(list(tmp_path.glob("*.done"))) == 2
