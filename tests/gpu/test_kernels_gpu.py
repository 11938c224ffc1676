"""The admission suite on a GPU: `pytest -m gpu tests/gpu`."""

import admission
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

test_norm = admission.suite("norm", "cuda")
test_router_gating = admission.suite("router_gating", "cuda")
test_router_topk = admission.suite("router_topk", "cuda")
test_moe_experts = admission.suite("moe_experts", "cuda")
test_core_attention = admission.suite("core_attention", "cuda")
test_rope_qk = admission.suite("rope_qk", "cuda")
test_mla_rope = admission.suite("mla_rope", "cuda")
test_mla_up = admission.suite("mla_up", "cuda")
test_mamba3_core = admission.suite("mamba3_core", "cuda")
test_mamba3_scan = admission.suite("mamba3_scan", "cuda")
test_m2rnn_core = admission.suite("m2rnn_core", "cuda")
test_m2rnn = admission.suite("m2rnn", "cuda")
test_embedding = admission.suite("embedding", "cuda")
test_linear_cross_entropy = admission.suite("linear_cross_entropy", "cuda")


@pytest.fixture(autouse=True)
def many_sizes():
    """A suite has more sizes, dtypes and strides than torch.compile makes graphs for."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
