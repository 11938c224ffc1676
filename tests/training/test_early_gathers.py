"""All gathers of a step are dispatched before its first forward pass, and each only once.

That the weights are right, test_distributed_training.py holds: its ranks gather early, too.
"""

from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.training.gpu.early_gathers import gather_early


class Group:
    """A bucket group of Megatron's, as far as gathers are concerned."""

    def __init__(self, name: str, dispatched: list[str]) -> None:
        self.name, self.dispatched = name, dispatched
        self.param_gather_dispatched = False
        self.next_param_gather_bucket_group = self

    def start_param_sync(self) -> None:
        assert not self.param_gather_dispatched
        self.param_gather_dispatched = True
        self.dispatched.append(self.name)


class Chunk(torch.nn.Module):
    def __init__(self, overlap: bool = True, distributed: bool = True) -> None:
        super().__init__()
        self.dispatched: list[str] = []
        self.bucket_groups = [Group(name, self.dispatched) for name in "abc"]
        self.expert_parallel_bucket_groups = [Group(name, self.dispatched) for name in "xy"]
        self.remove_forward_pre_hook_handles = {"module": "handle"}
        self.ddp_config = SimpleNamespace(
            overlap_param_gather=overlap, use_distributed_optimizer=distributed
        )

    @property
    def groups(self) -> list[Group]:
        return self.bucket_groups + self.expert_parallel_bucket_groups

    def forward(self) -> list[str]:
        return list(self.dispatched)


def test_all_are_dispatched_before_the_forward_pass_in_its_order():
    chunks = [Chunk(), Chunk()]
    gather_early(chunks)
    for chunk in chunks:
        assert chunk() == ["c", "b", "a", "y", "x"]
        assert chunk() == ["c", "b", "a", "y", "x"]  # a later micro batch
        assert [group.next_param_gather_bucket_group for group in chunk.groups] == [None] * 5
        for group in chunk.groups:  # as the end of the gradients' reduction does
            group.param_gather_dispatched = False
        assert len(chunk()) == 10


def test_what_is_under_way_is_left_alone_and_so_is_a_step_without_overlap():
    chunk = Chunk()
    gather_early([chunk])
    chunk.bucket_groups[1].param_gather_dispatched = True
    assert chunk() == ["c", "a", "y", "x"]
    held = Chunk()
    gather_early([held])
    held.remove_forward_pre_hook_handles = {}  # Megatron gathers by itself: evaluation, saves
    assert held() == []


@pytest.mark.parametrize(("overlap", "distributed"), [(False, True), (True, False)])
def test_other_data_parallelism_is_left_as_it_is(overlap, distributed):
    chunk = Chunk(overlap, distributed)
    gather_early([chunk])
    assert chunk() == []
    assert all(group.next_param_gather_bucket_group is group for group in chunk.groups)
