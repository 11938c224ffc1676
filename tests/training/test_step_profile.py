"""A step's profile: what is summed, and how it comes into the receipt."""

import re
from pathlib import Path

import pytest
import receipt_samples as samples

from megacpp_mcore import cli, kernels, receipts
from megacpp_mcore.receipts.kernel_families import OTHER, family
from megacpp_mcore.training.gpu import step_profile
from megacpp_mcore.training.gpu.step_profile import Span, StepProfile, summary

MS = 1_000_000
SPANS = [  # in the order of their ends, as a profiler may give them
    Span("gemm", 10 * MS, 14 * MS),
    Span("ncclDevKernel_AllGather", 12 * MS, 17 * MS),  # 3 ms alone
    Span("Memcpy DtoD", 20 * MS, 21 * MS),
    Span("gemm", 19 * MS, 24 * MS),  # around the copy
    Span("gemm", 24 * MS, 25 * MS),
]


def test_a_step_is_summed_by_name_and_what_overlaps_counts_once():
    found = summary(SPANS)
    assert found == {
        "span_ms": 15.0, "busy_ms": 13.0, "compute_ms": 10.0,
        "kernels": [
            {"name": "gemm", "launches": 3, "ms": 10.0},
            {"name": "ncclDevKernel_AllGather", "launches": 1, "ms": 5.0},
            {"name": "Memcpy DtoD", "launches": 1, "ms": 1.0},
        ],
    }  # fmt: skip


def test_names_are_cut_and_no_kernel_is_a_profile_too():
    long = "f<" + "x" * 5_000
    assert [k["name"] for k in summary([Span(long, 0, 1)])["kernels"]] == [long[:200]]
    assert summary([]) == {"span_ms": 0.0, "busy_ms": 0.0, "compute_ms": 0.0, "kernels": []}


def test_one_step_is_recorded_and_the_others_are_called(monkeypatch):
    monkeypatch.setattr(step_profile, "recorded", lambda call: (call(), SPANS))
    profile = StepProfile(2)
    assert [profile.run(step, lambda step=step: -step) for step in (1, 2, 3)] == [-1, -2, -3]
    assert profile.found == {"step": 2} | summary(SPANS)
    monkeypatch.setattr(step_profile, "recorded", None)
    assert StepProfile(None).run(2, lambda: 7) == 7


def test_a_resumed_run_keeps_the_profile_of_a_step_that_it_keeps(tmp_path):
    path = tmp_path / "a.json"
    run = samples.start(path)
    for step in (1, 2, 3):
        run.step(step, tokens=8, ms=1.0, loss=1.0)
    run.profile({"step": 2} | summary(SPANS))
    run.write("interrupted", "the test says so")
    for at, kept in ((2, True), (1, False)):
        again = samples.start(tmp_path / "b.json")
        again.resume(receipts.read(path), at, 8 * at)
        assert ("profile" in again.write()) is kept


def test_show_has_the_longest_kernels(tmp_path, capsys):
    path = tmp_path / "a.json"
    run = samples.start(path)
    run.step(1, tokens=8, ms=1.0, loss=1.0)
    many = [Span(f"kernel{n}", n * MS, n * MS + n) for n in range(1, 40)]
    run.profile({"step": 1} | summary(many))
    run.write("complete")
    assert cli.main(["report", "show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "profile   step 1: 39 kernels in 38.0 ms, 0.0 with one running" in said
    assert "kernel39" in said and "kernel20" in said and "kernel19" not in said
    assert "and 19 more (-v)" in said
    assert cli.main(["report", "show", "-v", str(path)]) == 0
    said = capsys.readouterr().out
    assert "kernel19" in said and "more (-v)" not in said


@pytest.mark.parametrize(("kernel", "kind"), [
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "exchange between GPUs"),
    ("mamba3_scan_backward", "Mamba-3"),
    ("rms_norm_backward", "norms"),
    ("multi_tensor_apply_kernel<transformer_engine::L2NormFunctor<float>>", "optimizer"),
    ("moe_combine", "experts' routing, activation and sums"),
    ("mla_up_forward", "MLA's up-projections and RoPE"),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "other products"),
    ("Memcpy DtoD (Device -> Device)", "copies and fills"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::Add>", OTHER),
])  # fmt: skip
def test_a_kernel_has_a_kind(kernel, kind):
    assert family(kernel) == kind


def test_each_kernel_of_ours_in_cuda_has_a_kind():
    texts = [path.read_text() for path in Path(kernels.__file__).parent.glob("*/csrc/*.cu*")]
    texts = [text for text in texts if "__global__" in text]
    spaces = {re.search(r"^namespace (\w+)", text, re.M)[1] for text in texts}
    assert {"m2rnn", "grouped", "tokens"} <= spaces
    kinds = {space: family(f"void {space}::kernel({space}::Problem)") for space in spaces}
    assert OTHER not in kinds.values(), kinds


def test_the_cpu_has_no_kernels_to_list(capsys):
    assert cli.main(["train", "nam56r-tiny", "--profile", "3"]) == 2
    assert "--profile needs --gpus N" in capsys.readouterr().err
