"""What a resume reads is data: a planted pickle is refused before it runs, wherever it lies."""

import io
import os
import pickle
import random
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from megacpp_mcore.stack import unpickling
from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process


class Planted:
    """Makes the folder `where` as it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self):
        return os.mkdir, (str(self.where),)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    found = Planted(tmp_path / "code ran")
    yield found
    assert not found.where.exists()


@pytest.fixture(autouse=True)
def restricted(monkeypatch):
    """As in a process that loads; the other tests' process is then as it was."""
    from torch.distributed.checkpoint import default_planner, filesystem

    planner = default_planner.DefaultLoadPlanner
    monkeypatch.setattr(filesystem, "pickle", pickle)
    monkeypatch.setattr(planner, "load_bytes", planner.load_bytes)
    unpickling.install()


def saved(folder: Path, value: object) -> Path:
    """A checkpoint with one object in its shards, as Megatron saves the state of each rank."""
    folder.mkdir()
    with quiet(), single_process(1):
        dist_checkpointing.save({"state": ShardedObject("state", value, (1,), (0,))}, str(folder))
    return folder


def load(folder: Path) -> object:
    with quiet(), single_process(1):
        template = {"state": ShardedObject("state", None, (1,), (0,))}
        return dist_checkpointing.load(template, str(folder))["state"]


def test_code_in_the_index_does_not_run(tmp_path, planted):
    folder = saved(tmp_path / "saved", 1)
    (folder / ".metadata").write_bytes(pickle.dumps(planted))
    with pytest.raises(CheckpointException, match="metadata is None"):  # torch logs the rest
        load(folder)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: it names posix\.mkdir"):
        unpickling.read_index(folder)


def test_code_in_a_shard_does_not_run(tmp_path, planted):
    folder = saved(tmp_path / "saved", planted)
    with pytest.raises(CheckpointException, match=r"state/shard_0_1 .* not plain data: .*mkdir"):
        load(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt"])
def test_a_fifo_is_not_waited_for(tmp_path, name):
    folder = saved(tmp_path / "saved", 1)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file"):
        unpickling.read_index(folder)


def test_what_is_refused_is_said_without_torchs_advice_to_run_it(tmp_path, planted):
    folder = saved(tmp_path / "saved", 1)
    torch.save(planted, folder / "common.pt")
    with pytest.raises((Exception, CheckpointException)) as refused:
        load(folder)
    said = unpickling.why(refused.value)
    assert "not plain data" in said and "mkdir" in said and "\n" not in said
    assert "documentation" not in said


def test_the_states_that_megatron_saves_are_loaded(tmp_path):
    from megatron.core.rerun_state_machine import RerunMode, RerunState

    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rerun": {"mode": RerunMode.VALIDATE_RESULTS, "state": RerunState.NOT_RUNNING_YET},
        "extra": io.BytesIO(b"bytes"),
    }
    found = load(saved(tmp_path / "saved", states))
    assert found["random_rng_state"] == states["random_rng_state"]
    assert (found["np_rng_state"][1] == states["np_rng_state"][1]).all()
    assert torch.equal(found["torch_rng_state"], states["torch_rng_state"])
    assert found["rerun"] == states["rerun"] and found["extra"].read() == b"bytes"


def test_code_in_the_extra_state_of_transformer_engine_does_not_run(planted, monkeypatch):
    """Its modules ask `pickle.loads` for what they once gave to `pickle.dumps`."""
    module = types.ModuleType("transformer_engine.pytorch.module.base")
    module.pickle = pickle
    monkeypatch.setitem(sys.modules, module.__name__, module)
    unpickling.install()
    state = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"fp8_checkpoint": True}}
    found = module.pickle.loads(module.pickle.dumps(state))
    assert torch.equal(found.pop("scale_fwd"), torch.ones(3))
    assert found == {"extra_fp8_variables": {"fp8_checkpoint": True}}
    for data in (planted, [torch.ones(1), planted]):
        with pytest.raises(pickle.UnpicklingError, match="Refusing to unpickle"):
            module.pickle.loads(pickle.dumps(data))
    nested = io.BytesIO()
    torch.save(planted, nested)
    call = pickle.dumps(_Call(torch.storage._load_from_bytes, nested.getvalue()))
    with pytest.raises(pickle.UnpicklingError, match=r"(?s)Weights only load failed|Refusing"):
        module.pickle.loads(call)


class _Call:
    def __init__(self, function, *arguments) -> None:
        self.what = function, arguments

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "..", "a/b"])
def test_an_index_names_files_beside_it(tmp_path, name):
    folder = saved(tmp_path / "saved", 1)
    index = unpickling.read_index(folder)
    for entry in index.storage_data.values():
        entry.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="not a file of its folder"):
        unpickling.read_index(folder)


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"storage_data": {}}),
                                     pickle.dumps(torch.Size([1]))])  # fmt: skip
def test_what_is_not_an_index_is_refused_in_one_way(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        unpickling.read_index(tmp_path)


def test_code_in_the_index_cache_of_a_dataset_does_not_run(tmp_path, small, planted):
    from megacpp_mcore.training.cpu.train import _datasets
    from megacpp_mcore.training.data.files import DataError

    _datasets(small, tmp_path / "cache")
    indices = list((tmp_path / "cache").rglob("*.npy"))
    assert indices
    for index in indices:
        numpy.save(index, numpy.array([planted], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="index cache"):
        _datasets(small, tmp_path / "cache")
    for index in indices:
        index.write_bytes(pickle.dumps(planted))
    with pytest.raises(DataError, match="index cache"):
        _datasets(small, tmp_path / "cache")
