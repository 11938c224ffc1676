"""The products that cuBLASLt is asked for, by a stand-in that does on the host what it is told."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.kernels.linear_cross_entropy import cublaslt
from megacpp_mcore.kernels.linear_cross_entropy.cublaslt import TILE_128X160, product


class Gpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Library:
    """cuBLASLt, with matrices by columns as its documentation has them.

    algorithms: (tile, split of K) of those that it names, in order. status: what a product returns.
    """

    def __init__(self, algorithms=((24, 1), (TILE_128X160, 1)), status=0):
        self.algorithms, self.status = algorithms, status
        self.objects, self.ran, self.asked = {}, [], 0

    def __getattr__(self, name):
        if name.endswith("Create"):
            return self._create
        assert name.endswith(("SetAttribute", "Destroy")), name
        return self._set if name.endswith("SetAttribute") else lambda of: 0

    def _create(self, of, *values):
        of._obj.value = len(self.objects) + 1
        self.objects[of._obj.value] = [getattr(value, "value", value) for value in values]
        return 0

    def _set(self, of, name, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[of.value].append((name, value._obj.value))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, *rest):
        *_, found, count = rest
        self.asked += 1
        for place, (one, _) in enumerate(zip(found, self.algorithms, strict=False)):
            one.algorithm.data[0] = place
        count._obj.value = len(self.algorithms)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, name, value, size, written):
        value._obj.value = self.algorithms[algorithm._obj.data[0]][name - 1]
        return 0

    def cublasLtMatmul(
        self, handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, *rest
    ):
        turned = dict(self.objects[operation.value][2:])
        first, second = self._at(a, of_a), self._at(b, of_b)
        first = first.t() if turned[3] else first
        second = second.t() if turned[4] else second
        out = self._at(d, of_d)
        kept = beta._obj.value * self._at(c, of_c).float() if beta._obj.value else 0
        out.copy_(alpha._obj.value * first.float() @ second.float() + kept)
        self.ran.append(self.algorithms[algorithm._obj.data[0]])
        return self.status

    def _at(self, address, layout):
        kind, rows, columns, stride = self.objects[layout.value]
        dtype = {0: torch.float32, 14: torch.bfloat16}[kind]
        size = ((columns - 1) * stride + rows) * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (1, stride))


@pytest.fixture
def serve(monkeypatch):
    """Have a Library served; returns it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))

    def serving(**what):
        library = Library(**what)
        monkeypatch.setattr(cublaslt, "_library", lambda: library)
        cublaslt._plan.cache_clear()
        cublaslt._handle.cache_clear()
        return library

    yield serving
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()


def matrix(rows, columns, turned=False, dtype=torch.bfloat16):
    """Whole numbers in a part of a larger matrix; turned: its columns are contiguous."""
    shape = (columns, rows) if turned else (rows, columns)
    whole = torch.randint(-8, 9, (shape[0], shape[1] + 3)).to(dtype)[:, : shape[1]]
    return (whole.t() if turned else whole).as_subclass(Gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_a_product_of_matrices_in_any_order(serve, turned, dtype):
    library = serve()
    a, b, out = matrix(5, 7, turned[0]), matrix(7, 3, turned[1]), matrix(5, 3, dtype=dtype)
    before, expected = out.clone(), a.float() @ b.float()
    assert product(out, a, b, TILE_128X160)
    assert torch.equal(out, expected.to(dtype))
    out.copy_(before)
    assert product(out, a, b, TILE_128X160, accumulate=True)
    assert torch.equal(out, (expected + before.float()).to(dtype))
    assert library.ran == [(TILE_128X160, 1)] * 2 and library.asked == 1


@pytest.mark.parametrize("algorithms", [(), ((24, 1),), ((TILE_128X160, 4),)], ids=str)
def test_what_is_not_named_or_splits_a_sum_is_left_to_torch(serve, algorithms):
    library, out = serve(algorithms=algorithms), matrix(5, 3)
    before = out.clone()
    assert not product(out, matrix(5, 7), matrix(7, 3), TILE_128X160)
    assert torch.equal(out, before) and not library.ran


REFUSED = {
    "float32": lambda: (matrix(5, 3), matrix(5, 7, dtype=torch.float32), matrix(7, 3)),
    "into float16": lambda: (matrix(5, 3, dtype=torch.float16), matrix(5, 7), matrix(7, 3)),
    "long": lambda: (matrix(2, 2), matrix(2, 4097), matrix(4097, 2)),
    "nothing": lambda: (matrix(2, 2), matrix(2, 0), matrix(0, 2)),
    "gaps": lambda: (matrix(2, 2), matrix(2, 8)[:, ::2], matrix(4, 2)),
    "turned": lambda: (matrix(2, 3, turned=True), matrix(2, 4), matrix(4, 3)),
    "cpu": lambda: tuple(torch.ones(2, 2).bfloat16() for _ in range(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_asked_for(serve, name):
    library = serve()
    assert not product(*REFUSED[name](), TILE_128X160)
    assert not library.asked


def test_another_gpu_is_not_asked(serve, monkeypatch):
    library = serve()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not product(matrix(5, 3), matrix(5, 7), matrix(7, 3), TILE_128X160)
    assert not library.asked


def test_without_the_library_nothing_is_done(serve, monkeypatch):
    serve()
    monkeypatch.setattr(cublaslt, "_library", lambda: None)
    assert not product(matrix(5, 3), matrix(5, 7), matrix(7, 3), TILE_128X160)


def test_a_product_that_fails_is_told(serve):
    serve(status=13)
    with pytest.raises(cublaslt.CublasLtError, match="status 13"):
        product(matrix(5, 3), matrix(5, 7), matrix(7, 3), TILE_128X160)
