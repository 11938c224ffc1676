"""The embedding's gradient in main_grad on a GPU, at NAM56R's sizes: values, the same bits however
often it is repeated, no waiting host, a CUDA graph; and what it takes, printed."""

import pytest
import torch

from megacpp_mcore.kernels.embedding import embedding as definition
from megacpp_mcore.kernels.embedding import triton as kernels
from megacpp_mcore.kernels.embedding.case import KINDS
from megacpp_mcore.kernels.embedding.triton import embedding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

BATCH, SEQ, HIDDEN, VOCAB = 4, 4096, 3584, 65536
REPEATS = 50
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def room():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def drawn(kind, tokens=(BATCH, SEQ), vocab=VOCAB, hidden=HIDDEN, dtype=torch.bfloat16):
    """weight with a random main_grad, ids and the rows' gradient."""
    generator = torch.Generator("cuda").manual_seed(torch.initial_seed() % 2**31)
    how = {"generator": generator, "device": "cuda"}
    weight = torch.randn(vocab, hidden, **how).to(dtype).requires_grad_()
    weight.main_grad = torch.randn(vocab, hidden, **how)
    weight.grad_added_to_main_grad = False
    ids = KINDS[kind](tokens[0] * tokens[1], vocab, generator).view(tokens)
    return weight, ids, torch.randn(tokens[1], tokens[0], hidden, **how).to(dtype)


def poison(hidden):
    """The allocator's free memory is NaN, the workspace's above all."""
    filled = [torch.full((n, hidden), float("nan"), device="cuda") for n in (64, 1024, 4096)]
    del filled


def assert_added(weight, before, ids, dy):
    """In float32: of sums of n terms the root of n epsilons of the largest partial sum, and some;
    rows of no token keep their bits."""
    n = int(torch.bincount(ids.flatten()).max())
    expected = before.double()
    expected.index_add_(0, ids.t().flatten(), dy.double().flatten(0, 1))
    bound = 8 * n**0.5 * EPS * max(1.0, 6 * n**0.5)
    assert (weight.main_grad.double() - expected).abs().max() <= bound
    absent = torch.ones(len(weight), dtype=torch.bool, device="cuda")
    absent[ids.flatten()] = False
    assert torch.equal(weight.main_grad[absent], before[absent])


@pytest.mark.parametrize("kind", KINDS)
def test_at_full_size(kind):
    weight, ids, dy = drawn(kind)
    before = weight.main_grad.clone()
    poison(HIDDEN)
    y = embedding(weight, ids)
    assert torch.equal(y, definition(weight, ids)) and y.is_contiguous()
    y.backward(dy)
    assert weight.grad_added_to_main_grad and weight.grad is not None
    assert_added(weight, before, ids, dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 21, 23), (5, 13, 513), (2, 500, 72)], ids=str)
def test_odd_sizes(kind, dtype, sizes):
    batch, seq, hidden = sizes
    weight, ids, dy = drawn(kind, (batch, seq), 301, hidden, dtype)
    before = weight.main_grad.clone()
    poison(hidden)
    embedding(weight, ids).backward(dy)
    assert_added(weight, before, ids, dy)


@pytest.mark.parametrize("kind", ["uniform", "bytes", "equal"])
def test_the_same_bits_every_time(kind):
    weight, ids, dy = drawn(kind)
    before, found = weight.main_grad.clone(), None
    for _ in range(REPEATS):
        weight.main_grad.copy_(before)
        embedding(weight, ids).backward(dy)
        found = weight.main_grad.clone() if found is None else found
        assert torch.equal(weight.main_grad, found)


def test_the_host_never_waits_and_a_cuda_graph_can_hold_it():
    weight, ids, dy = drawn("bytes", (2, 512), 1000, 264)

    def step():
        weight.grad = None
        embedding(weight, ids).backward(dy)
        embedding(weight, ids.flip(0)).backward(dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    weight.main_grad.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = weight.main_grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):  # other tokens than it was captured with give other sums
        ids.copy_(ids.flip(1))
        dy.copy_(dy.flip(0))
        weight.main_grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (weight.main_grad - expected).abs().max() <= 2**12 * EPS


@pytest.mark.alone
def test_a_long_dimension_is_out_of_reach_of_31_bits():
    """main_grad of more than 2^31 elements."""
    rows = 2**31 // HIDDEN + 1000
    weight = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight.main_grad = torch.zeros(rows, HIDDEN, device="cuda")
    ids = torch.arange(rows - 40, rows, device="cuda").view(1, 40).repeat(1, 3)
    dy = torch.ones(120, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    embedding(weight, ids).backward(dy)
    assert (weight.main_grad[-40:] == 3).all() and not weight.main_grad[:-40].any()


def milliseconds(call):
    """The median of 20 calls."""
    found = []
    for _ in range(22):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return sorted(found[2:])[10]


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_takes(kind):
    """Against Megatron's, whose dense gradient data parallelism adds to main_grad."""
    weight, ids, dy = drawn(kind)

    def ours():
        embedding(weight, ids).backward(dy)
        weight.grad = None

    def megatrons():
        definition(weight, ids).backward(dy)
        weight.main_grad.add_(weight.grad)
        weight.grad = None

    def added():
        kernels._add(weight.main_grad, dy, ids)

    times = {call.__name__: milliseconds(call) for call in (ours, megatrons, added)}
    print(f"{kind}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()))
    assert times["ours"] < times["megatrons"]
