"""Packed documents in attention on a GPU: nothing of one reaches another, to the bit."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megacpp_mcore import dispatch
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

DIMS = {"mla": (6, 6, 128, 64), "gqa": (8, 2, 64, 64)}
# Those whose backward pass adds up in one order where it is asked to.
IN_ONE_ORDER = ("flash_4",)
BACKENDS = [backend.name for backend in REGISTRY["core_attention"].backends]


def built(backend, heads, groups, dqk, dv):
    problem = Workload.of(
        "cuda", "bfloat16", dqk=dqk, dv=dv, heads=heads, context_parallel_size=1, layout="thd"
    )
    if reason := dispatch.verdicts("core_attention", problem)[backend]:
        pytest.skip(reason)
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * dqk, num_attention_heads=heads, num_query_groups=groups,
        kv_channels=dqk, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    decision = dispatch.choose("core_attention", problem, {"core_attention": backend})
    return decision.load()(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        k_channels=dqk, v_channels=dv, pg_collection=SimpleNamespace(tp=None, cp=None),
    )  # fmt: skip


@contextlib.contextmanager
def deterministic(is_asked):
    torch.use_deterministic_algorithms(is_asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("backend", BACKENDS)
# Documents of one tile each, whose gradients are added up in one order; and of several.
@pytest.mark.parametrize("bounds", [[0, 33, 64, 97, 110], [0, 300, 301, 700, 1000]])
def test_another_documents_tokens_change_nothing(backend, dims, bounds):
    heads, groups, dqk, dv = DIMS[dims]
    attend = built(backend, heads, groups, dqk, dv)
    tokens = bounds[-1]
    packed = PackedSeqParams(
        "thd", torch.tensor(bounds, dtype=torch.int32, device="cuda"), max_seqlen_q=400,
        total_tokens=tokens,
    )  # fmt: skip
    sizes = (heads, dqk), (groups, dqk), (groups, dv)
    given = [torch.randn(tokens, *size, device="cuda").bfloat16() for size in sizes]
    direction = torch.randn(tokens, heads * dv, device="cuda").bfloat16()

    def run(inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with deterministic(backend in IN_ONE_ORDER):
            y = attend(*leaves, None, AttnMaskType.causal, packed_seq_params=packed)
            return [y, *torch.autograd.grad(y, leaves, direction)]

    before = run(given)
    start, end = bounds[2:4]
    for x in given:
        x[start:end] += 2.0
    to_the_bit = tokens < 128 or backend in IN_ONE_ORDER
    for i, (a, b) in enumerate(zip(before, run(given), strict=True)):
        for part in (slice(0, start), slice(end, tokens)):
            if i == 0 or to_the_bit:
                assert torch.equal(a[part], b[part])
            else:  # an epsilon for an addition in another order, before the rounding
                bound = torch.finfo(torch.bfloat16).eps * a.abs().max()
                assert (a[part] - b[part]).abs().max() <= bound
        assert not torch.equal(a[start:end], b[start:end])
