"""The receipts that the repository carries: each is valid, and says what is claimed of it."""

from pathlib import Path
from statistics import fmean

import pytest

from megacpp_mcore import receipts
from megacpp_mcore.report.comparison import judge_runs, unlike

FOLDER = Path(__file__).resolve().parent.parent / "examples/receipts/h200"
# Three runs of 13 layers over the same 100 batches, from the same weights.
MLA_ROPE = "run-nam56r-quarter-mla_rope"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_receipt_is_valid_and_of_an_h200(path):
    assert "H200" in receipts.read(path)["lane"]["device"]["name"]


def _run(name):
    return receipts.read(FOLDER / f"{MLA_ROPE}-{name}.json")


def test_a_model_learns_with_mla_ropes_kernel_as_it_does_with_the_reference():
    """The kernel's losses are no farther from either reference run than those are from each other.

    Everything else adds up in an order of its own (MoE's and the losses' atomics), so that the
    reference does not repeat itself: the distance of its two runs is what chance does in 100 steps.
    Distance: mean over the steps of |difference|, nats a byte.
    """
    kernel, *references = runs = [_run(n) for n in ("triton", "reference-a", "reference-b")]
    served = [
        {entry["observed"] for entry in run["backends"] if entry["surface"] == "mla_rope"}
        for run in runs
    ]
    assert served == [{"triton"}, {"reference"}, {"reference"}]
    assert not unlike(kernel, references[0]) and not unlike(*references)
    assert all(run["series"]["step"] == [*range(1, 101)] for run in runs)

    def distance(a, b):
        pairs = zip(a["series"]["loss"], b["series"]["loss"], strict=True)
        return fmean(abs(x - y) for x, y in pairs)

    chance = distance(*references)
    assert 0 < chance < 0.05, "the reference's own runs part: the criterion would say nothing"
    for reference in references:
        assert distance(kernel, reference) <= chance
        judgements = [judge_runs(reference, kernel), judge_runs(kernel, reference)]
        assert [judgement.loss.judgement for judgement in judgements] == ["not worse"] * 2
