"""What an out-of-memory error's report says, on a model whose sizes are known."""

import gc
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megacpp_mcore.training.gpu import memory
from megacpp_mcore.training.gpu.memory import (
    MemoryWatch,
    is_out_of_memory,
    report,
    unfinished_report,
)

GIB = 2**30


class Mixer(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))


class Layer(torch.nn.Module):
    """keeps: bytes its forward pass holds on to."""

    def __init__(self, number: int, size: int, keeps: int, meter: list[int]) -> None:
        super().__init__()
        self.layer_number, self.mixer = number, Mixer(size)
        self.keeps, self.meter = keeps, meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter[0] += self.keeps
        return x


class Model(torch.nn.Module):
    def __init__(self, meter: list[int]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.layers = torch.nn.ModuleList(Layer(n, 100, 3 * GIB, meter) for n in (1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_every_consumer_is_measured_once():
    meter = [0]
    model = Model(meter)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    watch = MemoryWatch([model], optimizer, allocated=lambda: meter[0])
    for _ in range(3):  # only the first micro batch counts
        model(torch.zeros(1))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    parameters[0].main_grad = torch.zeros(1000)
    optimizer.step()
    found = watch.measure()
    numbers = 10 * 4 + 2 * 100
    assert found.parameters == 4 * numbers
    assert found.modules == {"Mixer": 4 * 200, "embedding": 4 * 40}
    assert found.gradients == 4 * (numbers + 1000)
    assert found.optimizer == 4 * (2 * numbers + len(parameters))  # two moments, and the steps
    assert found.layers == {"Mixer": 2} and found.kept == {"Mixer": 6 * GIB}
    assert watch.measure() == found  # measuring adds nothing up


def test_the_report_names_the_largest_first():
    meter = [0]
    model = Model(meter)
    watch = MemoryWatch([model], torch.optim.SGD(model.parameters()), allocated=lambda: meter[0])
    model(torch.zeros(1))
    found = watch.measure()
    found.parameters, found.gradients, found.optimizer = 10 * GIB, 20 * GIB, 60 * GIB
    stats = {"allocated_bytes.all.current": 130 * GIB, "allocated_bytes.all.peak": 135 * GIB,
             "reserved_bytes.all.current": 138 * GIB}  # fmt: skip
    lines = report(found, stats, total=140 * GIB, rank=3).splitlines()
    assert lines[0] == (
        "GPU memory of rank 3: 140.00 GiB on the device, 130.00 GiB in use, 135.00 GiB at most, "
        "8.00 GiB reserved by torch but free"
    )
    names = ("optimizer states", "other", "gradients", "parameters")
    assert all(name in line for name, line in zip(names, lines[1:5], strict=True))
    assert "40.00 GiB  other" in lines[2]
    assert "Mixer 2 x 3.00 GiB" in lines[5]


def test_the_report_names_graphs_where_there_are_any():
    stats = {"allocated_bytes.all.current": GIB}
    none, *some = (
        report(memory.Memory(), stats, total=GIB, rank=0, captured=captured).splitlines()
        for captured in (None, 0, 3 * GIB)
    )
    for lines, size in zip(some, ("0.00 GiB", "3.00 GiB"), strict=True):
        assert [line for line in lines if line not in none] == [lines[-2]]
        assert lines[-2].startswith(f"  CUDA graphs hold {size}")
        assert "launch.cuda_graph_impl=none" in lines[-2] and lines[-1] == none[-1]


def test_a_quantised_parameter_is_what_it_wraps():
    model = Model([0])
    model.layers[0].mixer.weight._data = torch.zeros(100, dtype=torch.uint8)
    watch = MemoryWatch([model], torch.optim.SGD(model.parameters()), allocated=lambda: 0)
    assert watch.measure().parameters == 4 * (10 * 4 + 100) + 100


def test_a_chain_of_megatrons_optimizers():
    class One:
        def __init__(self, inner):
            self.optimizer = inner

    model = Model([0])
    main = [torch.nn.Parameter(p.detach().double()) for p in model.parameters()]
    chain = SimpleNamespace(chained_optimizers=[One(None), One(torch.optim.SGD(main))])
    watch = MemoryWatch([model], chain, allocated=lambda: 0)
    assert watch.measure().optimizer == 8 * (10 * 4 + 2 * 100)


@pytest.mark.slow
def test_what_is_there_of_a_model_that_is_not_finished():
    """On the CPU, where other tests' tensors are, too: by classes that only this one has."""

    class Half(Mixer):
        pass

    class Doubled(Half):
        pass

    halves, doubled = [Half(2**18) for _ in range(3)], Doubled(2**22)
    view = halves[0].weight.detach()  # the same storage
    found = memory._live_tensors("cpu")
    assert found["parameters of Half"] == 3 * 4 * 2**18
    assert found["parameters of Doubled"] == 4 * 2**22
    del doubled
    others = "buffers, main parameters, states, others"
    assert "parameters of Doubled" not in memory._live_tensors("cpu")
    gc.collect()  # what other tests have left
    before, more = memory._live_tensors("cpu")[others], torch.zeros(2**20)
    with FakeTensorMode():
        fake = torch.zeros(2**21)  # as torch.compile keeps many, which say that they are on a GPU
    sparse = torch.ones(2**20).to_sparse()
    assert abs(memory._live_tensors("cpu")[others] - before - 4 * 2**20) < 2**20
    assert fake.numel() == 2 * sparse.numel()
    assert len(halves) == 3 and len(view) == 2**18 and len(more)


def test_the_report_of_a_model_that_is_not_finished(monkeypatch):
    found = Counter({"parameters of MoELayer": 3 * GIB, "parameters of Mixer": 5 * GIB})
    monkeypatch.setattr(memory, "_live_tensors", lambda device: found)
    first, *rows, last = unfinished_report(
        {"allocated_bytes.all.current": GIB}, total=2 * GIB, rank=1
    ).splitlines()
    assert first.startswith(
        "GPU memory of rank 1 while the model was being built: 2.00 GiB on the device"
    )
    assert [row.split()[0] for row in rows] == ["5.00", "3.00"]
    assert rows[0].endswith("parameters of Mixer") and "use_distributed_optimizer" in last


def test_errors_of_no_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("a size mismatch"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))
