"""Core attention: admission of every backend, masks and documents, and Megatron's module."""

import contextlib
import itertools
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import admission
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.core_attention import attention, flash_4, sdpa, sdpa_flash, varlen
from megacpp_mcore.layers.core_attention import (
    CoreAttentionByLayout,
    CoreAttentionError,
    CudnnCoreAttention,
    Flash4CoreAttention,
    FlashCoreAttention,
    ReferenceCoreAttention,
    SDPACoreAttention,
)
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training.cpu.megatron_setup import single_process


def stand_in(q, k, v, bounds):
    """What a kernel of packed documents does, by the definition, and what it insists on."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and bounds.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    parts = [
        attention(*(x[start:end].transpose(0, 1)[None] for x in (q, k, v)), scale=1.0)
        for start, end in itertools.pairwise(bounds.tolist())
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


@pytest.fixture(autouse=True)
def varlen_on_a_cpu(monkeypatch):
    """torch's varlen attention is for CUDA only; what is around it runs here all the same."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        assert cu_q is cu_k and max_q == max_k >= (cu_q[1:] - cu_q[:-1]).max()
        assert window_size == (-1, 0)  # causal
        return stand_in(q * scale, k, v, cu_q)

    monkeypatch.setattr(varlen.varlen, "varlen_attn", varlen_attn)


# torch has the flash kernel for a CPU too, so that what surrounds it is tested here.
test_admission = admission.suite("core_attention", beyond_dispatch=("sdpa_flash",))

EPS = torch.finfo(torch.float64).eps


def module(cls, k_channels=16, v_channels=8, **changes):
    fields = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 16, "attention_dropout": 0.0, "use_cpu_initialization": True,
    }  # fmt: skip
    return cls(
        config=TransformerConfig(**(fields | changes)), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self", k_channels=k_channels,
        v_channels=v_channels, pg_collection=SimpleNamespace(),
    )  # fmt: skip


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_the_definition_is_the_formula():
    """One head and one query at a time, in Python's own numbers."""
    q, k, v = draw(1, 2, 5, 3), draw(1, 1, 5, 3) / 2, draw(1, 1, 5, 4)
    y = attention(q, k, v, scale=0.7)
    for head in range(2):
        for i in range(5):
            scores = [0.7 * float(q[0, head, i] @ k[0, 0, j]) for j in range(i + 1)]
            weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
            expected = sum(w * v[0, 0, j] for j, w in enumerate(weights))
            torch.testing.assert_close(y[0, head, i], expected, rtol=0, atol=16 * EPS)


@pytest.mark.parametrize("function", [attention, sdpa, sdpa_flash])
def test_a_token_does_not_see_the_ones_behind_it(function):
    q, k, v = draw(1, 2, 9, 8), draw(1, 2, 9, 8), draw(1, 2, 9, 8)
    before = function(q, k, v, scale=1.0)
    k[:, :, 6:], v[:, :, 6:] = 5.0, -5.0
    after = function(q, k, v, scale=1.0)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


PACKED = pytest.mark.parametrize(
    "cls", [SDPACoreAttention, FlashCoreAttention, ReferenceCoreAttention]
)


@PACKED
def test_packed_documents_are_separate_sequences(cls):
    """An empty document among them, one token, and padding behind the last; gradients too."""
    attend = module(cls)
    bounds = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (draw(13, 4, 16), draw(13, 2, 16), draw(13, 2, 8))]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    y = attend(*leaves, None, packed_seq_params=packed)
    assert y.shape == (13, 32) and y[11:].isfinite().all()
    one_by_one = [
        attend(*(x[start:end].unsqueeze(1) for x in leaves), None).squeeze(1)
        for start, end in ((0, 4), (4, 5), (5, 11))
    ]
    torch.testing.assert_close(y[:11], torch.cat(one_by_one), rtol=0, atol=16 * EPS)
    direction = draw(13, 32)
    direction[11:] = 0
    packed_gradients = torch.autograd.grad(y, leaves, direction)
    gradients = torch.autograd.grad(torch.cat(one_by_one), leaves, direction[:11])
    for actual, expected in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=64 * EPS)


@PACKED
def test_another_documents_tokens_change_nothing(cls):
    """To the bit, in values and in gradients; padding between documents included."""
    attend = module(cls)
    bounds, padded = ([0, 3, 7, 9], [0, 4, 8, 12])
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor(padded, dtype=torch.int32), max_seqlen_q=4,
        total_tokens=12,
    )  # fmt: skip
    given = [draw(12, 4, 16), draw(12, 2, 16), draw(12, 2, 8)]
    direction = draw(12, 32)
    direction[[3, 10, 11]] = 0  # what stands behind a document's tokens has no loss

    def run(inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = attend(*leaves, None, packed_seq_params=packed)
        return [y, *torch.autograd.grad(y, leaves, direction)]

    before = run(given)
    changed = [x.clone() for x in given]
    for x in changed:
        x[4:8] += 3.0  # the middle document
        x[3] = 100.0  # the padding of the first
    for a, b in zip(before, run(changed), strict=True):
        assert torch.equal(a[:3], b[:3]) and torch.equal(a[8:], b[8:])
        assert not torch.equal(a[4:8], b[4:8])


@pytest.mark.parametrize(
    ("changes", "bounds", "longest"),
    [
        ({}, [0, 3, 8], 5),
        ({"total_tokens": None}, [0, 3, 8, 8], 8),
        ({"max_seqlen_q": None}, [0, 3, 8, 8], 8),
        ({"cu_seqlens_q": [0, 3, 7], "total_tokens": 7}, [0, 3, 7, 8], 8),
        ({"cu_seqlens_q_padded": [0, 4, 8]}, [0, 4, 8, 8], 8),
    ],
)
def test_what_a_kernel_is_told_of_the_documents(monkeypatch, changes, bounds, longest):
    """The longest is max_seqlen_q only where that and the end of the last document are sure."""
    told = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        told.append((cu_q.tolist(), max_q))
        return q

    monkeypatch.setattr(varlen.varlen, "varlen_attn", varlen_attn)
    fields = {"cu_seqlens_q": [0, 3, 8], "max_seqlen_q": 5, "total_tokens": 8} | changes
    tensors = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    packed = PackedSeqParams("thd", **tensors)
    module(FlashCoreAttention)(
        draw(8, 4, 16), draw(8, 2, 16), draw(8, 2, 8), None, packed_seq_params=packed
    )
    assert told == [(bounds, longest)]


@pytest.mark.parametrize("cls", [SDPACoreAttention, ReferenceCoreAttention])
def test_dropout_is_for_training_and_keeps_the_mean(cls, monkeypatch):
    """Equal values: what is left of the weights sums to 1 on the mean over many draws."""
    # After recomputation in another test Megatron's tracker is initialized and has no state.
    tracker = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr("megacpp_mcore.layers.core_attention.get_cuda_rng_tracker", lambda: tracker)
    attend = module(cls, attention_dropout=0.25)
    q, k, v = torch.zeros(64, 8, 4, 16), torch.zeros(64, 8, 2, 16), torch.ones(64, 8, 2, 8)
    torch.manual_seed(0)
    y = attend(q, k, v, None)
    # Row i is a mean of i + 1 weights of 1 / 0.75 with chance 0.75: a variance of 1 / (3 (i + 1)).
    heads = 8 * 4
    variance = sum(1 / (3 * (i + 1)) for i in range(64)) / (64**2 * heads)
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(variance)
    assert y.std() > 0.1
    torch.testing.assert_close(attend.eval()(q, k, v, None), torch.ones(64, 8, 32))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_draws_from_the_ranks_own_states(monkeypatch, dropout):
    """Those of Megatron's tracker, in training only."""
    entered = []
    tracker = SimpleNamespace(
        is_initialized=lambda: True,
        fork=lambda: contextlib.nullcontext(entered.append(True)),
    )
    monkeypatch.setattr("megacpp_mcore.layers.core_attention.get_cuda_rng_tracker", lambda: tracker)
    attend = module(SDPACoreAttention, attention_dropout=dropout)
    inputs = draw(3, 1, 4, 16), draw(3, 1, 2, 16), draw(3, 1, 2, 8)
    attend(*inputs, None)
    attend.eval()(*inputs, None)
    assert entered == ([True] if dropout else [])


@pytest.mark.parametrize(
    ("problem", "backend", "reason"),
    [
        ({"dqk": 192, "dv": 128}, "sdpa_cudnn", "dqk 192, dv 128: cuDNN takes multiples of 8"),
        ({"dqk": 100, "dv": 64}, "sdpa_cudnn", "dqk 100"),
        ({"dqk": 100, "dv": 64}, "sdpa_flash", "multiples of 8"),
        ({"dqk": 64, "dv": 128}, "sdpa_flash", "dv 128 is larger than dqk 64"),
        ({"dqk": 320, "dv": 64}, "sdpa_flash", "dqk 320: flash attention takes at most 256"),
        ({"dqk": 128, "dv": 64}, "sdpa_cudnn", None),
        ({"dqk": 192, "dv": 128}, "sdpa_flash", None),
        ({"dqk": 64, "dv": 64, "context_parallel_size": 2}, "sdpa_cudnn", "context_parallel_size"),
        ({"layout": "thd"}, "sdpa_cudnn", "layout thd: cuDNN 9.19's gradients"),
        ({"layout": "thd", "needs": ("dropout",)}, "sdpa_flash", "dropout: it has none"),
        ({"layout": "sbhd", "needs": ("dropout",)}, "sdpa_flash", None),
        ({"layout": "thd", "needs": ("window",)}, "sdpa_flash", "window: it has none"),
        ({"layout": "sbhd", "needs": ("window",)}, "sdpa_flash", "window: it has none"),
        ({"needs": ("window",)}, "sdpa", "window: it has none"),
        ({"needs": ("window", "dropout")}, "reference", None),
        ({"needs": ("deterministic_mode",)}, "sdpa_cudnn", "deterministic_mode"),
        ({"needs": ("softmax_type", "qk_clip")}, "reference", "softmax_type, qk_clip: it has none"),
        ({"dqk": 128, "dv": 64}, "flash_4", "cannot import flash_attn.cute:"),
    ],
)
def test_what_the_kernels_say_they_can_serve(problem, backend, reason):
    dims = {"dqk": 128, "dv": 64, "layout": "sbhd"}
    asked = Workload.of("cuda", "bfloat16", **(dims | problem))
    found = dispatch.verdicts("core_attention", asked)[backend]
    assert found is None if reason is None else reason in found
    if backend not in ("reference", "sdpa"):
        fp32 = dispatch.verdicts("core_attention", Workload.of("cuda", "float32", dqk=64, dv=64))
        assert "not float32" in fp32[backend]


@pytest.fixture
def flash_4_package(monkeypatch):
    """flash_attn.cute.interface by the definition; the addresses that its outputs were given."""
    outputs = []

    def forward(q, k, v, *, softmax_scale, causal, return_lse, out, cu_seqlens_q=None,
                cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        """It takes some a v that is narrower, and returns the sums of exponentials beside y."""
        assert causal and return_lse
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        whole_tiles = q.shape[-1] % 64 == v.shape[-1] % 64 == 0
        is_narrow = whole_tiles and q.shape[-2] == k.shape[-2]
        assert is_narrow or v.shape[-1] == q.shape[-1]
        assert out.shape == (*q.shape[:-1], v.shape[-1])
        assert all(x.stride(-1) == 1 for x in (q, k, v, out))
        out.copy_(exact(q, k, v, softmax_scale, cu_seqlens_q))
        outputs.append(out.data_ptr())
        return out, q.new_zeros(3), None, None, None

    def backward(
        q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic,
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert causal and deterministic and lse.shape == (3,)
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            y = exact(*leaves, softmax_scale, cu_seqlens_q)
        assert torch.equal(y, out)
        return torch.autograd.grad(y, leaves, dout)

    def exact(q, k, v, scale, bounds):
        """`stand_in` of rows or of packed documents."""
        rows = q.shape[:2] if bounds is None else None
        if rows:
            bounds = torch.tensor([rows[1] * i for i in range(rows[0] + 1)], dtype=torch.int32)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        wide = torch.nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        y = stand_in(q * scale, k, wide, bounds)[..., : v.shape[-1]]
        return y.unflatten(0, rows) if rows else y

    fake = ModuleType("flash_attn.cute.interface")
    fake._flash_attn_fwd, fake._flash_attn_bwd = forward, backward
    for name in ("flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, fake)
    return outputs


@pytest.mark.parametrize("groups, dqk, dv", [(2, 16, 8), (4, 16, 8), (4, 128, 64), (2, 128, 64)])
def test_flash_4_gets_what_it_takes(flash_4_package, groups, dqk, dv):
    """Layouts, v's padding and bounds, against the definition's module."""
    sizes = {"num_query_groups": groups, "k_channels": dqk, "v_channels": dv}
    ours, exact = (module(c, **sizes) for c in (Flash4CoreAttention, ReferenceCoreAttention))
    whole = [draw(5, 2, 4, dqk), draw(5, 2, groups, dqk), draw(5, 2, groups, dv)]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32),
        max_seqlen_q=6, total_tokens=10,
    )  # fmt: skip
    for inputs, how in (
        (whole, {}),
        ([x.flatten(0, 1) for x in whole], {"packed_seq_params": packed}),
    ):
        results = []
        for attend in (ours, exact):
            leaves = [x.clone().requires_grad_() for x in inputs]
            y = attend(*leaves, None, **how)
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize(
    "cls", [SDPACoreAttention, CudnnCoreAttention, FlashCoreAttention, Flash4CoreAttention]
)
@pytest.mark.parametrize("shape", [(0, 2), (5, 0), (0,)], ids=["no-tokens", "no-rows", "no-pack"])
def test_no_tokens_are_no_work(flash_4_package, cls, shape):
    """Nothing comes out and gradients are zero; no kernel, and no package, is asked."""
    leaves = [draw(*shape, *x).requires_grad_() for x in ((4, 16), (2, 16), (2, 8))]
    packed = None
    if len(shape) == 1:
        packed = PackedSeqParams("thd", torch.zeros(2, dtype=torch.int32))
    y = module(cls)(*leaves, None, packed_seq_params=packed)
    assert y.shape == (*shape, 32)
    for leaf, gradient in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape


@pytest.fixture
def on_hopper(flash_4_package, monkeypatch):
    """A GPU as far as the `supports` can see, with what `installed.modules` names beside torch."""
    from megacpp_mcore.surfaces import core_attention as core_attention_surface

    installed = SimpleNamespace(modules=("flash_attn",))
    monkeypatch.setattr(
        core_attention_surface, "import_reason",
        lambda name: None if name.startswith(tuple(installed.modules)) else "absent",
    )  # fmt: skip
    monkeypatch.setattr(core_attention_surface, "_flash_4_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield installed
    dispatch.forget()  # what was answered here


@pytest.mark.parametrize(
    "modules, needs, whole, packed",
    [
        (["flash_attn.cute"], (), "flash_4", "flash_4"),
        ([], (), "sdpa_cudnn", "sdpa_flash"),
        (["flash_attn.cute"], ("dropout",), "sdpa_cudnn", "sdpa"),
        (["flash_attn.cute"], ("deterministic_mode",), "flash_4", "flash_4"),
        ([], ("deterministic_mode",), "sdpa", "sdpa"),
        (["flash_attn.cute"], ("window",), "reference", "reference"),
    ],
)
def test_auto_takes_the_fastest_that_serves(on_hopper, modules, needs, whole, packed):
    on_hopper.modules = modules
    for layout, expected in (("sbhd", whole), ("thd", packed)):
        problem = Workload.of("cuda", "bfloat16", dqk=128, dv=64, layout=layout, needs=needs)
        dispatch.forget()
        assert dispatch.choose("core_attention", problem).observed == expected, layout


def test_the_order_is_that_of_the_receipt():
    """`sdpa` is not in it: it takes whatever torch does for a problem, and what others cannot."""
    path = Path(__file__).parents[2] / "examples" / "receipts" / "h200" / "core_attention.json"
    rows = json.loads(path.read_text())["rows"]
    median = {r["backend"]: r["median_ms"] for r in rows if r["phase"] == "forward_backward"}
    order = [backend.name for backend in REGISTRY["core_attention"].backends]
    measured = [median[name] for name in order if name in median and name != "sdpa"]
    assert len(measured) >= 3 and measured == sorted(measured)


@pytest.mark.parametrize("dqk, right", [
    (8, False), (16, False), (24, True), (32, True), (48, False), (64, True), (72, False),
    (96, True), (104, False), (112, False), (128, True), (144, True), (160, True), (256, True),
])  # fmt: skip
def test_version_4_is_refused_where_its_gradients_are_wrong(on_hopper, monkeypatch, dqk, right):
    problem = Workload.of("cuda", "bfloat16", dqk=dqk, dv=8, layout="thd")
    reason = dispatch.verdicts("core_attention", problem)["flash_4"]
    assert reason is None if right else "no multiple of 32" in reason
    if dqk <= 128:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
        dispatch.forget()
        assert dispatch.verdicts("core_attention", problem)["flash_4"] is None


def test_version_4_for_other_gpus_or_of_another_version_says_so(flash_4_package, monkeypatch):
    from megacpp_mcore.surfaces import core_attention as core_attention_surface

    problem = Workload.of("cuda", "bfloat16", dqk=128, dv=64, layout="thd")
    core_attention_surface.import_reason.cache_clear()
    core_attention_surface._flash_4_version.cache_clear()
    try:
        assert "none here to ask" in core_attention_surface.flash_4(problem)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for capability, reason in (
            ((8, 0), "8.0"), ((9, 0), "its version is unknown"),
            ((10, 0), "its version is unknown"), ((12, 0), "12.0"),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
            assert reason in core_attention_surface.flash_4(problem), capability
        versions = {}

        def version(name):
            if name not in versions:
                raise core_attention_surface.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(core_attention_surface.metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        for name, found, reason in (
            ("flash-attn-4", "4.0.0b35", "flash-attn-4 4.0.0b35; exactly 4.0.0b36"),
            ("flash-attn-4", "4.0.0b37", "flash-attn-4 4.0.0b37; exactly 4.0.0b36"),
            ("flash-attn-4", "4.0.0b36", "quack-kernels is not"),
            ("quack-kernels", "0.6.3", "quack-kernels 0.6.3; 0.6.4 or newer"),
            ("quack-kernels", "0.6.4", "nvidia-cutlass-dsl is not"),
            ("nvidia-cutlass-dsl", "4.6.1", "nvidia-cutlass-dsl 4.6.1; 4.6.2 or newer"),
            ("nvidia-cutlass-dsl", "4.6.2", None),
        ):
            versions[name] = found
            core_attention_surface._flash_4_version.cache_clear()
            said = core_attention_surface.flash_4(problem)
            assert said is None if reason is None else reason in said
    finally:
        core_attention_surface.import_reason.cache_clear()
        core_attention_surface._flash_4_version.cache_clear()


def test_version_4_pads_v_only_where_it_must():
    """At 128 and 64 dims, the zeros would be a third more work, and a copy."""
    as_they_are = [(128, 64, False), (192, 128, False), (64, 64, False)]
    padded = [(128, 64, True), (32, 16, False), (64, 32, False), (96, 64, False)]
    assert all(flash_4.narrows(*dims) for dims in as_they_are)
    assert not any(flash_4.narrows(*dims) for dims in padded)


def test_flash_4_writes_its_output_where_the_layer_reads_it(flash_4_package):
    """[s, b, heads * dv] without a copy."""
    q, k, v = (draw(5, 2, 4, d).requires_grad_() for d in (128, 128, 64))
    y = module(Flash4CoreAttention, num_query_groups=4, k_channels=128, v_channels=64)(
        q, k, v, None
    )
    assert y.shape == (5, 2, 256) and y.is_contiguous()
    assert flash_4_package == [y.data_ptr()]


def test_torch_compile_breaks_its_graph_around_version_4_only(flash_4_package):
    """An import or a look-up in a call would break it once more."""
    flash = flash_4.FlashAttention4()
    taken = []

    def keep(graph, inputs):
        taken.append(graph)
        return graph.forward

    def block(q, k, v):
        return flash.whole(q.sin(), k, v, scale=1.0).sin()

    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=keep)
        compiled(*(draw(5, 2, 5, 5) for _ in range(3)))
        torch._dynamo.reset()
    assert len(taken) == 2


def test_the_definitions_window():
    """A query sees itself and as many tokens before it as the window has."""
    q, k, v = draw(1, 1, 9, 4), draw(1, 1, 9, 4), draw(1, 1, 9, 4)
    y = attention(q, k, v, scale=0.5, window=2)
    for i in range(9):
        seen = slice(max(0, i - 2), i + 1)
        weights = (0.5 * q[0, 0, i] @ k[0, 0, seen].T).softmax(-1)
        torch.testing.assert_close(y[0, 0, i], weights @ v[0, 0, seen], rtol=0, atol=16 * EPS)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_window_is_the_layers_own(layer):
    """Every second layer sees all with window_attn_skip_freq 2."""
    from megacpp_mcore.layers.core_attention import window_of

    config = module(ReferenceCoreAttention, window_size=(3, 0), window_attn_skip_freq=2).config
    assert window_of(config, layer) == (3 if layer == 1 else None)


def test_one_row_of_one_token_and_no_rows():
    """cuDNN refuses the one and torch's CUDA path the other; both are defined."""
    from megacpp_mcore.kernels.core_attention import sdpa_cudnn

    q, k, v = draw(2, 4, 1, 8), draw(2, 2, 1, 8), draw(2, 2, 1, 4)
    expected = v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(sdpa_cudnn(q, k, v, scale=1.0), expected, rtol=0, atol=4 * EPS)
    for function in (sdpa, sdpa_cudnn, sdpa_flash):
        empty = [x[:0].requires_grad_() for x in (q, k, v)]
        y = function(*empty, scale=1.0)
        assert y.shape == (0, 4, 1, 4) and y.requires_grad


class TestByLayout:
    def packed(self):
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32)
        )

    def test_each_batch_goes_where_its_layout_is_served(self):
        whole, packed = module(CudnnCoreAttention), module(FlashCoreAttention)
        core = CoreAttentionByLayout(whole.config, whole, packed)
        inputs = draw(5, 4, 16), draw(5, 2, 16), draw(5, 2, 8)
        y = core(*inputs, None, packed_seq_params=self.packed())
        assert torch.equal(y, packed(*inputs, None, packed_seq_params=self.packed()))
        rows = [x.unsqueeze(1)[:1] for x in inputs]
        assert torch.equal(core(*rows, None), whole(*rows, None))
        with single_process(0):
            assert core.takes_narrow_v and core.sharded_state_dict("x.") == {}

    def test_a_layout_that_nothing_serves_is_refused_with_the_reasons(self):
        whole = module(SDPACoreAttention)
        core = CoreAttentionByLayout(whole.config, whole, None, "sdpa: it is Tuesday")
        with pytest.raises(CoreAttentionError, match="packed documents: sdpa: it is Tuesday"):
            core(draw(5, 4, 16), None, None, None, packed_seq_params=self.packed())

    def test_cudnn_by_itself_has_no_packed_documents(self):
        inputs = draw(5, 4, 16), draw(5, 2, 16), draw(5, 2, 8)
        with pytest.raises(CoreAttentionError, match="no kernel for packed documents"):
            module(CudnnCoreAttention)(*inputs, None, packed_seq_params=self.packed())


@pytest.mark.parametrize(
    ("build", "call", "message"),
    [
        ({"context_parallel_size": 2}, {}, "context_parallel_size 2"),
        ({}, {"attn_mask_type": AttnMaskType.no_mask}, "mask 'no_mask' is not supported"),
        ({}, {"attention_bias": torch.zeros(1)}, "attention_bias is not supported"),
        ({}, {"packed_seq_params": PackedSeqParams(qkv_format="bshd")}, "qkv_format 'bshd'"),
        ({}, {"packed_seq_params": PackedSeqParams(qkv_format="thd")}, "cu_seqlens_q missing"),
        ({"window_size": (3, 0)}, {}, "SDPACoreAttention has no sliding window"),
    ],
)
def test_refusals(build, call, message):
    with pytest.raises(MegacppError, match=message):
        module(SDPACoreAttention, **build)(
            draw(3, 1, 4, 16), draw(3, 1, 2, 16), draw(3, 1, 2, 8), None, **call
        )
