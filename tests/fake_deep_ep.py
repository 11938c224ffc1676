"""DeepEP v1.2.1's Buffer on gloo: its signatures, its checks, its order of arrival, its handle.

As `deep_ep/buffer.py` and the checks of `csrc/deep_ep.cpp` at tag v1.2.1 have them, for the kernels
within a host. Beyond them it takes float32, in which a test can see a wrong sum. `calls` counts.
"""

import collections
import inspect
import itertools
import sys
from types import ModuleType

import torch
import torch.distributed as dist

calls: collections.Counter = collections.Counter()


class Config:
    def __init__(
        self, num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256,
        num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256,
    ):  # fmt: skip
        self.num_sms, self.recv = num_sms, num_max_nvl_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return self.num_sms // 2 * num_ranks * self.recv * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        raise RuntimeError("Failed: Assertion error csrc/config.hpp: NVSHMEM is disable")


class EventHandle:
    def current_stream_wait(self):
        calls["waits"] += 1


class EventOverlap:
    def __init__(self, event=None, extra_tensors=None):
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self):
        assert self.event is not None
        self.event.current_stream_wait()


class Buffer:
    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
        num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        explicitly_destroy=False, comm=None,
    ):  # fmt: skip
        calls["buffers"] += 1
        self.group, self.group_size = group, group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy, self.runtime = explicitly_destroy, object()

    def destroy(self):
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        calls["destroyed"] += 1
        self.runtime = None

    @staticmethod
    def is_sm90_compiled():
        return True

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(Buffer.num_sms, {2: 24, 4: 6, 8: 6}[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks):
        return Config(Buffer.num_sms, {2: 10, 4: 9, 8: 4}[num_ranks])

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert self.runtime is not None
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        local = num_experts // self.group_size
        rank_of = torch.where(topk_idx < 0, -1, topk_idx // local)
        goes = torch.stack([(rank_of == r).any(1) for r in range(self.group_size)], 1)
        each = torch.stack([(topk_idx == e).sum() for e in range(num_experts)]).int()
        return goes.sum(0).int(), None, each, goes.contiguous(), self._event(async_finish)

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
        is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
        expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        calls["dispatch"] += 1
        self._check(x)
        rank, ranks = self.group.rank(), self.group_size
        goes = is_token_in_rank if handle is None else handle[4]
        places = [goes[:, r].nonzero()[:, 0] for r in range(ranks)]
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            found = self._exchange([x[at] for at in places])
            received = x.new_full((handle[3].shape[0], x.shape[1]), torch.nan)
            received[: sum(map(len, found))] = torch.cat(found)
            return received, None, None, None, None, self._event(async_finish)
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        local = num_tokens_per_expert.shape[0] // ranks
        found = self._exchange([(x[at], topk_idx[at], topk_weights[at], at) for at in places])
        tokens, chosen, weights, sources = (torch.cat(part) for part in zip(*found, strict=True))
        here = (chosen >= rank * local) & (chosen < (rank + 1) * local)
        chosen = torch.where(here, chosen - rank * local, -1)
        weights = torch.where(here, weights, 0.0)
        counts = [int((chosen == e).sum()) for e in range(local)]
        if num_worst_tokens:
            rows = num_worst_tokens - len(tokens)
            tokens = torch.cat([tokens, tokens.new_full((rows, x.shape[1]), torch.nan)])
            chosen = torch.cat([chosen, chosen.new_full((rows, chosen.shape[1]), -1)])
            weights = torch.cat([weights, weights.new_full((rows, chosen.shape[1]), torch.nan)])
            sources, counts = torch.cat([sources, sources.new_zeros(rows)]), []
        of_ranks = torch.tensor([len(part[0]) for part in found])
        handle = (of_ranks, None, None, sources.int(), goes, None)
        return tokens, chosen, weights, counts, handle, self._event(async_finish)

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        calls["combine"] += 1
        self._check(x)
        of_ranks, _, _, sources, goes, _ = handle
        assert len(x) == len(sources)
        if topk_weights is not None:
            assert topk_weights.is_contiguous() and topk_weights.dtype == torch.float32
        starts = [0, *of_ranks.cumsum(0).tolist()]
        parts = []
        for start, end in itertools.pairwise(starts):
            more = None if topk_weights is None else topk_weights[start:end]
            parts.append((x[start:end], sources[start:end], more))
        sums = torch.zeros(goes.shape[0], x.shape[1])
        columns = 0 if topk_weights is None else topk_weights.shape[1]
        weights = torch.zeros(goes.shape[0], columns)
        for rows, at, more in self._exchange(parts):
            sums.index_add_(0, at, rows.float())
            if more is not None:
                weights.index_add_(0, at, more)
        for one in bias if isinstance(bias, tuple) else (bias,):
            sums += 0 if one is None else one.float()
        weights = None if topk_weights is None else weights
        return sums.to(x.dtype), weights, self._event(async_finish)

    def _check(self, x):
        assert self.runtime is not None, "destroyed"
        assert x.dim() == 2 and x.is_contiguous() and (x.shape[1] * x.element_size()) % 32 == 0
        assert x.dtype in (torch.bfloat16, torch.float32)

    def _exchange(self, parts):
        """What every rank has for this one, by rank."""
        found = [None] * self.group_size
        dist.all_gather_object(found, parts, group=self.group)
        return [of_rank[self.group.rank()] for of_rank in found]

    def _event(self, is_async):
        return EventOverlap(EventHandle() if is_async else None)


def install(lacking: tuple[str, ...] = (), **more) -> ModuleType:
    """deep_ep and deep_ep.utils in sys.modules, without the names `lacking`."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, package.Config, package.__path__ = Buffer, Config, []
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap
    for name in lacking:
        for module in (package, utils):
            module.__dict__.pop(name, None)
    package.__dict__.update(more)
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = package, utils
    return package


def without_argument(name: str, argument: str) -> type:
    """A Buffer one of whose methods does not take `argument`."""

    class Older(Buffer):
        pass

    signature = inspect.signature(getattr(Buffer, name))
    kept = [p for p in signature.parameters.values() if p.name != argument]

    def method(self, *arguments, **named):
        raise AssertionError("never called")

    method.__signature__ = signature.replace(parameters=kept)
    setattr(Older, name, method)
    return Older
