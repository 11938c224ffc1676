"""The mamba_ssm_mimo backend of the M block where there is no GPU: what it refuses and hands on."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError, mamba3_scan
from megacpp_mcore.kernels.mamba3 import mamba_ssm_mimo as backend
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.surfaces.support import import_reason

NAM56R = {
    "variant": "mimo", "heads": 56, "groups": 8, "head_dim": 64, "state_dim": 64, "rank": 4,
    "angles": 16, "chunk_size": 64,
}  # fmt: skip
CASE = Mamba3ScanCase.samples()["plain-mimo"]
KERNELS = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo"


@pytest.fixture(autouse=True)
def launchers(monkeypatch):
    """Upstream's modules, each with launchers that say what they were asked for."""
    made = []
    for module, names in backend._KERNELS.items():
        fake = SimpleNamespace()
        for name in names:
            setattr(fake, name, lambda *a, _n=name, **k: made.append((_n, *map(str, a), k)) or made)
        monkeypatch.setitem(sys.modules, f"{backend._PACKAGE}.{module}", fake)
    backend._cache_kernels.cache_clear()
    yield made
    backend._cache_kernels.cache_clear()


class Output(torch.autograd.Function):
    """y; its gradient is as strict as the inputs are."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return strict(gradient)


def strict(x):
    """Upstream's `contiguous()`, then its launchers, which compare strides with a new tensor's."""
    x = x.contiguous()
    assert x.stride() == torch.empty(x.shape).stride(), f"{tuple(x.shape)} with {x.stride()}"
    return x


def upstream(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D, z,
             chunk_size, rotary_dim_divisor, dtype, cu_seqlens=None):  # fmt: skip
    """The kernels' contract as upstream writes it down, on the reference."""
    (batch, seq, rank, groups, state), (heads, dim) = q.shape, v.shape[2:]
    assert k.shape == q.shape and v.shape == z.shape == (batch, seq, heads, dim)
    assert adt.shape == dt.shape == trap.shape == (batch, heads, seq)
    assert q_bias.shape == k_bias.shape == (heads, rank, state) and D.shape == (heads,)
    assert mimo_v.shape == mimo_z.shape == mimo_out.shape == (heads, rank, dim)
    assert angles.shape == (batch, seq, heads, state // rotary_dim_divisor)
    assert {x.dtype for x in (q, k, v, trap, z)} == {dtype} == {torch.bfloat16}
    wide = (adt, dt, q_bias, k_bias, mimo_v, mimo_z, mimo_out, angles, D)
    assert {x.dtype for x in wide} == {torch.float32}
    assert groups in (1, heads), "its backward pass takes no other"
    assert chunk_size * rank == 64 and rotary_dim_divisor in (2, 4)
    if cu_seqlens is None:
        assert seq % chunk_size == 0, "its backward pass takes whole chunks, or documents"
    else:
        assert batch == 1 and cu_seqlens.dtype == torch.int32 and cu_seqlens[-1] == seq
    for tensor in (q, k, v, adt, dt, trap, angles, z, q_bias, k_bias, mimo_v, mimo_z, mimo_out, D):
        strict(tensor)
    adt, dt, trap = (x.transpose(1, 2) for x in (adt, dt, trap))
    y = mamba3_scan(
        q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z, mimo_v=mimo_v, mimo_z=mimo_z,
        mimo_out=mimo_out, chunk_size=chunk_size, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return Output.apply(y)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "why"),
    [
        ("cpu", "bfloat16", {}, "run on cuda only"),
        ("cuda", "float32", {}, "compute in bfloat16, not float32"),
        ("cuda", "bfloat16", {"variant": "siso"}, "variant siso"),
        ("cuda", "bfloat16", {"state_dim": 128}, "state_dim 128"),
        ("cuda", "bfloat16", {"head_dim": 32}, "head_dim 32"),
        ("cuda", "bfloat16", {"rank": 8}, "rank 8"),
        ("cuda", "bfloat16", {"angles": 32}, "32 angles"),
        ("cuda", "bfloat16", {"chunk_size": 16}, "chunk_size 16"),
    ],
)
def test_what_it_cannot_serve_it_says(device, dtype, sizes, why):
    problem = dispatch.Workload.of(device, dtype, **{**NAM56R, **sizes})
    assert why in dispatch.verdicts("mamba3_scan", problem)["mamba_ssm_mimo"]
    with pytest.raises(dispatch.DispatchError, match=why):
        dispatch.choose("mamba3_scan", problem, {"mamba3_scan": "mamba_ssm_mimo"})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Mamba3ScanCase(2, 80, 6, 3, 8, 16, 4, 4, 64), id="groups"),
        pytest.param(Mamba3ScanCase(3, 72, 4, 1, 8, 16, 4, 4, 64), id="one-group-odd-length"),
        pytest.param(Mamba3ScanCase(1, 69, 4, 4, 8, 16, 8, 2, 64), id="group-a-head"),
        pytest.param(Mamba3ScanCase(1, 64, 1, 1, 8, 16, 4, 4, 64), id="one-head"),
    ],
)
@pytest.mark.parametrize("documents", [None, [0, 5, 13], [0, 8, 21]])
def test_the_kernels_get_what_they_ask_for(monkeypatch, case, documents):
    """Outputs and gradients through upstream's contract are the reference's."""
    monkeypatch.setitem(sys.modules, KERNELS, SimpleNamespace(mamba3_mimo=upstream))
    if documents is not None:
        case = Mamba3ScanCase(1, *list(case.sizes.values())[1:])
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    offsets = None if documents is None else torch.tensor(documents)

    def values(scan):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        y = scan(**leaves, cu_seqlens=offsets)
        y.float().square().sum().backward()
        return {"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}

    actual, expected = values(backend.mamba3_scan), values(mamba3_scan)
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype and actual[name].shape == want.shape, name
        distance = (actual[name].double() - want.double()).abs().max() / want.double().abs().max()
        assert distance <= case.tolerance(name, torch.bfloat16), name


def as_megatron_has_them(name, x):
    """The same values as the layer's views of [s, b, h] give them, whose axes of one have strides
    of their own."""
    axes = (2, 3) if name in ("q", "k") else (0, 1)
    if name in ("v", "z", "adt", "dt", "trap", "angles", "q", "k"):
        return x.transpose(*axes).clone(memory_format=torch.contiguous_format).transpose(*axes)
    return x


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Mamba3ScanCase(1, 1, 4, 4, 8, 16, 4, 4, 64), id="one-token"),
        pytest.param(Mamba3ScanCase(3, 1, 4, 2, 8, 16, 4, 4, 64), id="rows-of-one-token"),
        pytest.param(Mamba3ScanCase(1, 64, 4, 1, 8, 16, 4, 4, 64), id="one-row-one-group"),
        pytest.param(Mamba3ScanCase(2, 31, 1, 1, 8, 16, 4, 4, 64), id="one-head"),
    ],
)
def test_axes_of_one_have_the_strides_that_the_launchers_ask_for(monkeypatch, case):
    """TileLang 0.1.8 refuses others, of the gradient, too: on an H200, and here with its launchers
    and tensors said to be on CUDA (`input DA_CS strides[2] expected 1, but got 4`)."""
    monkeypatch.setitem(sys.modules, KERNELS, SimpleNamespace(mamba3_mimo=upstream))
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    viewed = {name: as_megatron_has_them(name, x) for name, x in tensors.items()}
    assert any(x.stride() != torch.empty(x.shape).stride() for x in viewed.values())
    gradient = torch.randn(case.seq, case.batch, case.heads, case.head_dim).bfloat16()
    directions = {"y": gradient.transpose(0, 1)}
    truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64, directions)
    scan = case.bind(backend.mamba3_scan, "cpu", torch.bfloat16)
    actual = parity.run(case, scan, viewed, directions)
    wrong = [str(e) for e in parity.errors(case, actual, truth, torch.bfloat16) if not e.share <= 1]
    assert not wrong, wrong


@pytest.fixture
def asked_anew():
    """Dispatch and what it imports, without what they remember."""
    import_reason.cache_clear()
    dispatch.forget()
    yield dispatch.Workload.of("cuda", "bfloat16", **NAM56R)
    import_reason.cache_clear()
    dispatch.forget()


def test_without_the_package_the_reference_serves_and_says_why(monkeypatch, asked_anew):
    monkeypatch.setitem(sys.modules, KERNELS, None)
    why = dispatch.verdicts("mamba3_scan", asked_anew)["mamba_ssm_mimo"]
    assert why.startswith(f"cannot import {KERNELS}")
    assert dispatch.choose("mamba3_scan", asked_anew).observed == "reference"
    with pytest.raises(dispatch.DispatchError, match="cannot import"):
        dispatch.choose("mamba3_scan", asked_anew, {"mamba3_scan": "mamba_ssm_mimo"})


def test_with_the_package_it_serves(monkeypatch, asked_anew):
    monkeypatch.setitem(sys.modules, KERNELS, SimpleNamespace(mamba3_mimo=upstream))
    assert dispatch.choose("mamba3_scan", asked_anew).observed == "mamba_ssm_mimo"


class Symbol:
    """As TileLang's: made anew for every call, the same as it is written."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def test_a_kernel_is_asked_for_once(launchers):
    backend._cache_kernels()
    backend._cache_kernels()
    forward = sys.modules[f"{backend._PACKAGE}.mamba3_mimo_fwd"]
    for _ in range(2):
        for rank in (2, 4):
            assert forward.mamba_mimo_fwd(Symbol("B"), 64, rank, chunk_size=16) is launchers
    assert launchers == [
        ("mamba_mimo_fwd", "B", "64", rank, {"chunk_size": 16}) for rank in ("2", "4")
    ]


def test_what_upstream_would_round_or_cannot_leave_out_is_refused():
    with pytest.raises(Mamba3InputError, match=r"v is torch.float32"):
        backend.mamba3_scan(**parity.drawn(CASE, torch.float32, "cpu", seed=0))
    tensors = parity.drawn(CASE, torch.bfloat16, "cpu", seed=0)
    with pytest.raises(Mamba3InputError, match="one of them is None"):
        backend.mamba3_scan(**(tensors | {"z": None, "mimo_z": None}))


def test_with_a_state_the_reference_runs():
    tensors = parity.drawn(CASE, torch.bfloat16, "cpu", seed=0)
    for actual, expected in zip(
        backend.mamba3_scan(**tensors, return_final_state=True),
        mamba3_scan(**tensors, chunk_size=64, return_final_state=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
