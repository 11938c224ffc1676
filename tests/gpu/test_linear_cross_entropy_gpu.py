"""linear_cross_entropy on a GPU: contracts, large vocabularies, memory, speed on an H200."""

import random
import subprocess
import sys
from functools import partial

import pytest
import torch
from loss_contract import CONTRACTS, close, per_token, weighted

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.linear_cross_entropy import REFERENCE, chunk_loop, cublaslt
from megacpp_mcore.surfaces import backend as backends
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training.cpu.megatron_setup import single_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
SURFACE = "linear_cross_entropy"
BACKENDS = [backend.name for backend in REGISTRY[SURFACE].backends]
# Megatron's cross entropy subtracts from its softmax in place, again in every backward pass.
BROKEN = {("megatron", "a_second_backward_pass_gives_the_same")}
GIB = 2**30


def load(name, dtype=torch.bfloat16):
    """The backend's Head, or what stands in for it, where dispatch serves the dtype on one GPU."""
    words = str(dtype).removeprefix("torch.")
    problem = Workload.of("cuda", words, tensor_model_parallel_size=1)
    if reason := dispatch.verdicts(SURFACE, problem)[name]:
        pytest.skip(reason)
    (backend,) = (found for found in REGISTRY[SURFACE].backends if found.name == name)
    return backends.load(backend.benched)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_contract(name, contract, dtype, monkeypatch):
    if (name, contract) in BROKEN:
        pytest.skip("Megatron's own gradients change with every backward pass")
    monkeypatch.setattr(chunk_loop, "chunk_length", lambda tokens, classes: 5)
    with single_process(0, "cuda"):
        CONTRACTS[contract](load(name, dtype), "cuda", dtype)


@pytest.mark.parametrize("vocab", [16384, 20001, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_several_blocks(vocab, dtype, monkeypatch):
    monkeypatch.setattr(chunk_loop, "chunk_length", lambda tokens, classes: 128)
    head, tokens, hidden_size = load("chunked", dtype), 300, 72
    tensors = {
        "hidden": torch.randn(tokens, hidden_size, device="cuda").to(dtype),
        "weight": (torch.randn(vocab, hidden_size, device="cuda") * hidden_size**-0.5).to(dtype),
        "labels": torch.randint(vocab, (tokens,), device="cuda"),
    }
    given = torch.rand(tokens, device="cuda")
    for options in (
        {},
        {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.7},
    ):
        truth = per_token(REFERENCE, tensors, torch.float64, given, **options)
        truth += weighted(REFERENCE, tensors, torch.float64, given, by=3.0, **options)
        found = per_token(head, tensors, dtype, given, **options)
        found += weighted(head, tensors, dtype, given, by=3.0, **options)
        for actual, expected in zip(found, truth, strict=True):
            # Sums over the vocabulary: an epsilon of float32 for every term, as `Case.tolerance`.
            close(actual, expected, dtype, largest_logit=6 + vocab / 100)


def test_a_label_out_of_range_stops_the_process():
    code = (
        "import torch\n"
        "from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED\n"
        "hidden, weight = torch.ones(3, 8, device='cuda'), torch.ones(5, 8, device='cuda')\n"
        "labels = torch.tensor([0, LABEL, 4], device='cuda')\n"
        "CHUNKED.per_token(hidden, weight, labels)\n"
        "torch.cuda.synchronize()\n"
    )
    for label, right in ((3, True), (-100, True), (5, False), (-1, False)):
        words = [sys.executable, "-c", code.replace("LABEL", str(label))]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == right, done.stderr
        assert right or "assert" in done.stderr.lower()


def test_the_host_never_waits_and_a_cuda_graph_can_hold_it():
    head = load("chunked")
    hidden = torch.randn(512, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1000, 64, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(1000, (512,), device="cuda")
    weights = torch.rand(512, device="cuda")

    def step():
        total, losses = head.weighted(hidden, weight, labels, weights)
        return (losses, *torch.autograd.grad(0.5 * total, (hidden, weight)))

    def other():
        losses = head.per_token(hidden, weight, labels)
        return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), weights)

    for call in (step, other):
        for _ in range(2):
            expected = call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        for tensor in found:
            tensor.detach().zero_()
        graph.replay()
        torch.cuda.synchronize()
        for actual, wanted in zip(found, expected, strict=True):
            assert torch.equal(actual, wanted)


TURNED = [(0, 0), (0, 1), (1, 0), (1, 1)]
PRODUCTS = [  # (n, k, m), tile, and which of a and b has its columns contiguous; the chunks' own
    *(((32768, 2048, 3584), cublaslt.TILE_128X160, turned) for turned in TURNED),
    ((2048, 3584, 65536), cublaslt.TILE_176X128, (0, 1)),
]


@pytest.mark.skipif(
    torch.cuda.is_available() and "H200" not in torch.cuda.get_device_name(),
    reason="other algorithms are named on another device",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("sizes", "tile", "turned"), PRODUCTS, ids=str)
def test_a_product_is_torchs(sizes, tile, turned, dtype):
    """Of matrices in larger ones; fresh over NaN, and added to what is there."""
    n, k, m = sizes

    def matrix(rows, columns, turn):
        shape = (columns, rows) if turn else (rows, columns)
        whole = torch.randn(shape[0], shape[1] + 64, device="cuda").bfloat16()[:, : shape[1]]
        return whole.t() if turn else whole

    a, b = matrix(n, k, turned[0]), matrix(k, m, turned[1])
    before = torch.randn(n, m, device="cuda").to(dtype)
    expected = a.float() @ b.float()
    spread = 4 * k**0.5 * torch.finfo(dtype).eps + 4 * k * torch.finfo(torch.float32).eps
    for accumulate in (False, True):
        out = before.clone() if accumulate else torch.full_like(before, torch.nan)
        assert cublaslt.product(out, a, b, tile, accumulate=accumulate)
        wanted = expected + before.float() if accumulate else expected
        assert (out.float() - wanted).abs().max() <= spread * 3
        again = before.clone() if accumulate else torch.empty_like(before)
        assert cublaslt.product(again, a, b, tile, accumulate=accumulate)
        assert torch.equal(again, out)


class TestAtNAM56RsSizes:
    """Issue 8's targets, on an H200: times in turns, in random order, each from an idle device."""

    ROUNDS = 40

    @pytest.fixture(autouse=True)
    def an_h200(self):
        if "H200" not in torch.cuda.get_device_name():
            pytest.skip("times and targets are an H200's")
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()

    @staticmethod
    def inputs(tokens, hidden_size, vocab):
        hidden = torch.randn(tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden_size, device="cuda") * hidden_size**-0.5
        labels = torch.randint(vocab, (tokens,), device="cuda")
        return hidden, weight.bfloat16().requires_grad_(), labels

    @staticmethod
    def floor(tokens, hidden_size, vocab):
        """As many operations as 6 T h V, in the large matrix products of `bench.clock`."""
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        out, flops = torch.empty_like(a), 6 * tokens * hidden_size * vocab
        count = round(flops / (2 * 8192**3))

        def products():
            for _ in range(count):
                torch.mm(a, b, out=out)

        return products, flops / (count * 2 * 8192**3)

    def times(self, calls):
        """Medians in ms."""
        found = {name: [] for name in calls}
        for _ in range(2):
            for call in calls.values():
                call()
        order = random.Random(0)
        for _ in range(self.ROUNDS):
            for name in order.sample(sorted(calls), len(calls)):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(10_000_000)  # the host gets ahead
                start.record()
                calls[name]()
                end.record()
                torch.cuda.synchronize()
                found[name].append(start.elapsed_time(end))
        return {name: sorted(times)[len(times) // 2] for name, times in found.items()}

    @pytest.mark.alone
    def test_time_against_ligers_and_the_floor(self):
        sizes = 16384, 3584, 65536
        hidden, weight, labels = self.inputs(*sizes)
        even = torch.full((sizes[0],), 1 / sizes[0], device="cuda")
        head = load("chunked")
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Liger,
        )

        gradients = partial(torch.autograd.grad, inputs=(hidden, weight))
        products, share = self.floor(*sizes)
        found = self.times({
            "chunked": lambda: gradients(head.weighted(hidden, weight, labels, even)[0]),
            "liger": lambda: gradients(Liger.apply(hidden, weight, labels)[0]),  # its mean
            "floor": products,
        })  # fmt: skip
        floor = found["floor"] * share
        print(f"\n{sizes}: chunked {found['chunked']:.2f} ms, Liger's mean {found['liger']:.2f}, "
              f"floor {floor:.2f}")  # fmt: skip
        assert found["chunked"] <= 0.90 * found["liger"]
        assert found["chunked"] <= 1.10 * floor

    @pytest.mark.alone
    def test_time_with_a_large_vocabulary(self):
        sizes = 8192, 4096, 131072
        hidden, weight, labels = self.inputs(*sizes)
        even = torch.full((sizes[0],), 1 / sizes[0], device="cuda")
        head = load("chunked")
        products, share = self.floor(*sizes)
        found = self.times({
            "chunked": lambda: torch.autograd.grad(
                head.weighted(hidden, weight, labels, even)[0], (hidden, weight)
            ),
            "floor": products,
        })  # fmt: skip
        print(f"\n{sizes}: chunked {found['chunked']:.2f} ms, floor {found['floor'] * share:.2f}")
        assert found["chunked"] <= 1.15 * found["floor"] * share

    @pytest.mark.parametrize("form", ["weighted", "per_token"])
    def test_memory(self, form):
        hidden, weight, labels = self.inputs(16384, 3584, 65536)
        even = torch.full((16384,), 1 / 16384, device="cuda")
        head = load("chunked")

        def call():
            output = (
                head.weighted(hidden, weight, labels, even)[0]
                if form == "weighted"
                else (head.per_token(hidden, weight, labels) * even).sum()
            )
            return torch.autograd.grad(output, (hidden, weight))

        gradients = sum(x.numel() * x.element_size() for x in call())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        above = (torch.cuda.max_memory_allocated() - before - gradients) / GIB
        print(f"\n{form}: {above:.3f} GiB above inputs and gradients")
        assert above <= 0.7
