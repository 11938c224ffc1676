"""MLA's RoPE at NAM56R's full size: how close, and how near to a copy's speed."""

from statistics import median

import pytest
import torch

from megacpp_mcore.bench.clock import clock_for, interleave, measure_rates
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mla_rope import triton
from megacpp_mcore.kernels.mla_rope.case import MLARopeCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

NAM56R = {"batch": 4, "seq": 4096, "heads": 56, "plain": 64, "pos": 64, "v": 64, "rotary": 64}
LEAST_SHARE = 0.8  # of what a copy moves a second
MOST_FOR_DOCUMENTS = 1.1  # eight a row, of the time of whole rows


@pytest.mark.parametrize("documents", [0, 8])
def test_float32_to_a_hundred_thousandth(documents):
    case = MLARopeCase(**NAM56R, documents=documents)
    tensors = parity.drawn(case, torch.float32, "cuda", seed=3)
    truth = parity.truth_of(case, tensors, torch.float32, torch.float64)
    values = parity.run(case, case.bind(triton.mla_rope, "cuda", torch.float32), tensors,
                        truth.directions)  # fmt: skip
    for error in parity.errors(case, values, truth, torch.float32):
        assert error.error <= min(1e-5, error.tolerance), error


@pytest.mark.alone
def test_it_moves_at_a_copys_pace():
    clock = clock_for("cuda")
    calls, moved = {}, {}
    for documents in (0, 8):
        case = MLARopeCase(**NAM56R, documents=documents)
        tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=4)
        leaves = {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}
        call = case.bind(triton.mla_rope, "cuda", torch.bfloat16).call
        outputs = list(call(**leaves).values())
        inputs = [leaves[name] for name in case.inputs]
        along = [torch.randn_like(y) for y in outputs]

        def forward(turn, call=call, leaves=leaves):
            return call(**leaves)

        def backward(turn, outputs=outputs, inputs=inputs, along=along):
            return torch.autograd.grad(outputs, inputs, along, retain_graph=True)

        calls |= {("forward", documents): forward, ("backward", documents): backward}
        moved[documents] = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    rates = measure_rates(clock, torch.bfloat16)
    times = {name: median(taken.ms) for name, taken in interleave(clock, calls, 4.0).items()}
    for (phase, documents), milliseconds in times.items():
        share = moved[documents] / milliseconds * 1000 / rates.bytes_per_s
        assert share >= LEAST_SHARE, f"{phase}, {documents} documents: {share:.2f} of {rates}"
    for phase in ("forward", "backward"):
        assert times[phase, 8] <= MOST_FOR_DOCUMENTS * times[phase, 0], times
