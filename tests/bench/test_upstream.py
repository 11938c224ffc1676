"""`bench layer --against upstream`: what a block comes from, in its place and with its weights.

mamba-ssm's module is the real one, of `make env`'s copy to patch; its kernels, which need a GPU,
are our reference. XMA and Liger are stand-ins.
"""

import functools
import json
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import small_bench
import torch
from small_bench import quick  # noqa: F401  a fixture

from megacpp_mcore import cli
from megacpp_mcore.bench import layer, load_for_bench, upstream
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.bench.variants import Variant
from megacpp_mcore.kernels.m2rnn import m2rnn
from megacpp_mcore.kernels.mamba3 import mamba3_scan
from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.layers import dispatched, moe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces import support
from megacpp_mcore.training.cpu.megatron_setup import single_process

PATCH_TARGETS = Path(sys.prefix) / "patch-targets"
SMALL = [*small_bench.SMALL, "mamba3.mamba_num_groups=2"]
MIMO = ("--set", "mamba3.variant=mimo", "--set", "mamba3.mimo_rank=2")
PACKED = ("--set", "data.dataloader_inter_document_masking=true")
OTHER = "mamba3_core=reference"
EXPERTS = [
    "--set", "model.seq_length=8",
    "--set", "moe.num_experts=4", "--set", "moe.moe_router_topk=2",
    "--set", "moe.moe_ffn_hidden_size=24", "--set", "moe.moe_shared_expert_intermediate_size=16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def packages_are_looked_for(quick):  # noqa: F811
    support.import_reason.cache_clear()
    yield
    support.import_reason.cache_clear()


def siso(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, chunk_size, Input_States,
         return_final_states, cu_seqlens):  # fmt: skip
    """mamba-ssm's function of that name, by the reference."""
    assert Input_States is None and not return_final_states and Angles.dtype == torch.float32
    adt, dt, trap = (x.transpose(1, 2) for x in (ADT, DT, Trap))
    return mamba3_scan(Q, K, V, adt, dt, trap, Angles, Q_bias, K_bias, D, Z,
                       chunk_size=chunk_size, cu_seqlens=cu_seqlens)  # fmt: skip


def mimo(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z, chunk_size,
         rotary_dim_divisor, dtype, return_state, cu_seqlens):  # fmt: skip
    assert rotary_dim_divisor * Angles.shape[-1] == Q.shape[-1] and chunk_size == 32
    adt, dt, trap = (x.transpose(1, 2) for x in (ADT, DT, Trap))
    return mamba3_scan(Q, K, V, adt, dt, trap, Angles, Q_bias, K_bias, D, Z, mimo_v=MIMO_V,
                       mimo_z=MIMO_Z, mimo_out=MIMO_Out, cu_seqlens=cu_seqlens)  # fmt: skip


def gated_norm(size, eps, **factory):
    return torch.nn.RMSNorm(size, eps=eps, **factory)


def forget_package(name):
    for module in [m for m in sys.modules if f"{m}.".startswith(f"{name}.")]:
        del sys.modules[module]


@pytest.fixture
def mamba3(monkeypatch):
    """mamba-ssm's module `mamba3`, real but for its kernels."""
    if not (PATCH_TARGETS / "mamba_ssm").is_dir():
        pytest.skip("no copy of mamba-ssm: make env")
    bridges.before_megatron()
    import megacpp_mcore.layers.mamba3  # noqa: F401  Megatron, before mamba-ssm can be found

    monkeypatch.syspath_prepend(str(PATCH_TARGETS))
    bridges.import_ops_only("mamba_ssm")
    import mamba_ssm.modules.mamba3 as module

    monkeypatch.setattr(module, "mamba3_siso_combined", siso)
    monkeypatch.setattr(module, "RMSNormGated", gated_norm)
    yield module
    forget_package("mamba_ssm")


@pytest.fixture
def xma(monkeypatch):
    """XMA's function, of which only the name and the arguments are its own."""
    layers = ModuleType("xma.layers.m2rnn")

    def theirs(query, key, value, weight, forget_input, gradient_clipping):
        return m2rnn(query, key, value, weight, forget_input, grad_clamp=gradient_clipping)

    layers.m2rnn = theirs
    for name, module in (("xma", ModuleType("xma")), ("xma.layers", ModuleType("xma.layers")),
                         ("xma.layers.m2rnn", layers)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    return layers


@pytest.fixture
def liger(monkeypatch):
    """Liger's function, of which only the name and the arguments are its own, in a process in which
    the kernels of a GPU serve: in Triton's interpreter."""
    module = ModuleType("liger_kernel.ops.fused_moe")

    def theirs(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32 and top_k_index.shape == top_k_weights.shape
        y = torch.zeros_like(x)
        for expert, (w1, w2) in enumerate(zip(gate_up_proj, down_proj, strict=True)):
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            gate, up = (x @ w1.T).chunk(2, -1)
            y = y + weight.to(x.dtype) * (torch.nn.functional.silu(gate) * up @ w2.T)
        return y

    module.LigerFusedMoEFunction = SimpleNamespace(apply=theirs)
    for name, found in (("liger_kernel", ModuleType("liger_kernel")),
                        ("liger_kernel.ops", ModuleType("liger_kernel.ops")),
                        ("liger_kernel.ops.fused_moe", module)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)  # Megatron's dispatcher makes one
    monkeypatch.setattr(moe, "current_device", lambda: "cuda")
    monkeypatch.setattr(support, "cuda_only", lambda what, workload: None)
    monkeypatch.setenv("MEGACPP_BACKENDS", "moe_experts=fused_moe,norm=reference")
    return module.LigerFusedMoEFunction


def bench(path, letter, *words):
    small = [word for override in SMALL for word in ("--set", override)]
    arguments = ["bench", "layer", letter, "--recipe", "nam56r-tiny", *small, *words]
    status = cli.main([*arguments, "--receipt", str(path)])
    return status, json.loads(path.read_text()) if path.exists() else None


def of_upstream(receipt):
    return next(b for b in receipt["backends"] if b["requested"] == "upstream")


@pytest.mark.parametrize("words", [(), PACKED, MIMO], ids=["rows", "packed", "mimo"])
def test_mamba_ssms_module_in_the_layers_place(words, mamba3, tmp_path, monkeypatch):
    monkeypatch.setattr(mamba3, "mamba3_mimo_combined", mimo)
    calls, forward = [], mamba3.Mamba3.forward

    def counted(self, u, **options):
        calls.append(tuple(u.shape))
        return forward(self, u, **options)

    monkeypatch.setattr(mamba3.Mamba3, "forward", counted)
    own = []
    monkeypatch.setattr(upstream, "own_candidates", own.append)
    against = ["upstream", OTHER if words != MIMO else "mamba3_scan=reference"]
    status, receipt = bench(tmp_path / "m.json", "M", *words, "--against", *against)
    assert status == 0 and receipt["baseline"] == "upstream"
    errors = {row["backend"]: (row["error"], row["tolerance"]) for row in receipt["rows"]}
    assert errors.keys() == {"recipe", *against} and errors["upstream"] == (None, None)
    assert all(0 < errors[name][0] <= errors[name][1] < 1e-4 for name in ("recipe", against[1]))
    assert len(own) == len(calls)  # before each
    assert set(calls) == {(1, 64, 32) if words == PACKED else (2, 32, 32)}
    entry = of_upstream(receipt)
    assert entry["implementation"] == "mamba_ssm.modules.mamba3:Mamba3"
    assert entry["reason"].startswith(f"mamba-ssm {metadata.version('mamba-ssm')}: ")


def test_it_takes_the_baselines_weights(mamba3, tmp_path):
    """Those of the first of `--against`, which are drawn after the recipe's own."""
    status, receipt = bench(tmp_path / "m.json", "M", "--against", OTHER, "upstream")
    assert status == 0 and receipt["baseline"] == OTHER
    error = next(row for row in receipt["rows"] if row["backend"] == "upstream")
    assert 0 < error["error"] <= error["tolerance"]


def test_the_parameters_of_the_recurrence_are_float32_in_a_bf16_model(mamba3):
    recipe = load_for_bench("nam56r-tiny", [*layer_overrides("M"), *SMALL])
    with single_process(recipe.schedule.seed, "cpu"):
        model = layer._Layer("recipe", Variant(recipe), "cpu").model.bfloat16()
        block = upstream.put(upstream.of(recipe), recipe, model)
    dtypes = {name: p.dtype for name, p in block.module.named_parameters()}
    narrow = {"in_proj.weight", "out_proj.weight", "B_norm.weight", "C_norm.weight"}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == narrow
    assert {dtypes[name] for name in dtypes.keys() - narrow} == {torch.float32}


def exchanged(convert):
    """The conversion, but for the biases of B and C."""

    def wrong(config, kind, weights):
        found = convert(config, kind, weights)
        return found | {"B_bias": found["C_bias"], "C_bias": found["B_bias"]}

    return wrong


def rolled(convert):
    """The conversion, but for the order of in_proj's rows."""

    def wrong(config, kind, weights):
        found = convert(config, kind, weights)
        return found | {"in_proj.weight": found["in_proj.weight"].roll(1, 0)}

    return wrong


@pytest.mark.parametrize("against", [("upstream", OTHER), (OTHER, "upstream")], ids=" ".join)
@pytest.mark.parametrize(("name", "change"), [
    ("to_upstream", rolled), ("from_upstream", rolled), ("from_upstream", exchanged),
])  # fmt: skip
def test_a_wrong_conversion_is_refused(
    name, change, against, mamba3, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(upstream, name, change(getattr(upstream, name)))
    status, receipt = bench(tmp_path / "m.json", "M", "--against", *against)
    wrong = [word for word in ("recipe", OTHER) if against[0] == "upstream"] or ["upstream"]
    assert status == 1
    said = capsys.readouterr().err
    for backend in wrong:
        assert f"layer: {backend}: " in said
        row = next(row for row in receipt["rows"] if row["backend"] == backend)
        assert row["error"] > row["tolerance"]


def test_gradients_of_a_first_call_that_tunes_are_dropped(mamba3, tmp_path, monkeypatch):
    """mamba-ssm's tuning adds up gradients over its trials."""
    calls = []

    def tuned(Q, K, V, *args, chunk_size=64, **options):
        calls.append(1)
        factor = 3.0 if len(calls) == 1 else 1.0
        V = V + (factor - 1) * (V - V.detach())
        return siso(Q, K, V, *args, chunk_size=chunk_size, **options)

    monkeypatch.setattr(
        mamba3, "mamba3_siso_combined",
        lambda Q, K, V, **options: tuned(Q, K, V, **options),
    )  # fmt: skip
    assert bench(tmp_path / "m.json", "M", "--against", "upstream")[0] == 0
    assert len(calls) > 1


def test_on_a_gpu_the_kernels_choose_among_their_own_candidates(monkeypatch):
    from megacpp_mcore.kernels.mamba3 import mamba_ssm_ops

    tuner = SimpleNamespace(configs=["pinned"])
    monkeypatch.setattr(mamba_ssm_ops, "_tuners", lambda: {"k": (tuner, ["one", "two"])})
    upstream.own_candidates(SimpleNamespace(is_cuda=False))
    assert tuner.configs == ["pinned"]
    upstream.own_candidates(SimpleNamespace(is_cuda=True))
    assert tuner.configs == ["one", "two"]


def test_code_of_the_package_that_raises_is_no_crash(mamba3, tmp_path, monkeypatch, capsys):
    def broken(**options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(mamba3, "mamba3_siso_combined", broken)
    assert bench(tmp_path / "m.json", "M", "--against", "upstream") == (1, None)
    assert "mamba-ssm: RuntimeError: no kernel image" in capsys.readouterr().err
    assert bench(tmp_path / "m.json", "M", *MIMO, "--against", "upstream") == (1, None)
    assert "TileLang" in capsys.readouterr().err  # its assertion


def test_a_decay_that_it_does_not_have_is_refused(mamba3, tmp_path, capsys):
    words = ("--set", "mamba3.decay=rational", "--against", "upstream")
    assert bench(tmp_path / "m.json", "M", *words) == (2, None)
    assert "mamba-ssm's Mamba3 has 'softplus'" in capsys.readouterr().err


def test_xmas_recurrence(xma, tmp_path):
    against = ["upstream", "m2rnn_core=reference"]
    clamp = ("--set", "m2rnn.grad_clamp=0.001")
    status, receipt = bench(tmp_path / "r.json", "R", *clamp, "--against", *against)
    assert status == 0 and receipt["baseline"] == "upstream"
    assert all(row["error"] is None or row["error"] <= row["tolerance"] for row in receipt["rows"])
    entry = of_upstream(receipt)
    assert entry["implementation"] == "xma.layers.m2rnn:m2rnn"
    assert "of no installed distribution: the recurrence between" in entry["reason"]


def forgets_the_rest(right):
    """The decay the other way round."""
    return lambda forget_input, **others: right(forget_input=1 - forget_input, **others)


def without_clamp(right):
    return lambda gradient_clipping, **others: right(gradient_clipping=None, **others)


@pytest.mark.parametrize("change", [forgets_the_rest, without_clamp])
def test_another_recurrence_is_refused(change, xma, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(xma, "m2rnn", change(xma.m2rnn))
    clamp = ("--set", "m2rnn.grad_clamp=0.001")
    assert bench(tmp_path / "r.json", "R", *clamp, "--against", "upstream")[0] == 1
    assert "layer: recipe: " in capsys.readouterr().err


def test_ligers_experts_in_the_layers_place(liger, tmp_path, monkeypatch):
    right, calls = liger.apply, []
    monkeypatch.setattr(liger, "apply", lambda *args: calls.append(args[0].shape) or right(*args))
    status, receipt = bench(tmp_path / "e.json", "E", *EXPERTS, "--against", "upstream")
    assert status == 0 and receipt["baseline"] == "upstream"
    errors = {row["backend"]: (row["error"], row["tolerance"]) for row in receipt["rows"]}
    assert 0 < errors["recipe"][0] <= errors["recipe"][1] < 1e-4
    assert set(calls) == {(16, 32)}
    served = {entry["surface"]: entry["observed"] for entry in receipt["backends"]}
    assert served["moe_experts"] == "fused_moe" and served["moe_dispatch"] == "unmoved"
    entry = of_upstream(receipt)
    assert entry["implementation"] == "liger_kernel.ops.fused_moe:LigerFusedMoEFunction"
    assert "its fused experts between our router" in entry["reason"]


def test_ligers_experts_where_norm_and_readers_have_one_backward_pass(liger, tmp_path, monkeypatch):
    """Ours take the norm along, with our router's product, which a CPU's recipe does not have."""

    ours, joined, normed = dispatched.DispatchedTopKRouter, [], moe.MegacppMoELayer.normed

    def router(*args, product, **more):
        return ours(*args, product=fp32_output.router_gating, **more)

    def watched(*args):
        found = normed(*args)
        joined.append(found[2] is not None)
        return found

    monkeypatch.setattr(moe.MegacppMoELayer, "normed", watched)
    monkeypatch.setattr(dispatched, "DispatchedTopKRouter", router)
    monkeypatch.setattr(fp32_output, "_check", lambda *args: None)  # float32 is exact, too:
    monkeypatch.setattr(fp32_output, "_bf16_parts", lambda x: torch.cat([x, 0 * x, 0 * x], 1))
    monkeypatch.setenv("MEGACPP_BACKENDS", "moe_experts=fused_moe,norm=triton")
    status, receipt = bench(tmp_path / "r.json", "E", *EXPERTS, "--against", "upstream")
    assert status == 0, receipt
    assert joined and all(joined)
    errors = {row["backend"]: (row["error"], row["tolerance"]) for row in receipt["rows"]}
    assert 0 < errors["recipe"][0] <= errors["recipe"][1] < 1e-4


def swapped_halves(x, w1, w2, index, weights, right):
    return right(x, w1.roll(w1.shape[1] // 2, 1), w2, index, weights)


def unweighted(x, w1, w2, index, weights, right):
    return right(x, w1, w2, index, torch.ones_like(weights))


def shifted_experts(x, w1, w2, index, weights, right):
    return right(x, w1, w2, (index + 1) % len(w1), weights)


def without_the_routers_gradient(x, w1, w2, index, weights, right):
    return right(x, w1, w2, index, weights.detach())


def without_the_tokens_gradient(x, w1, w2, index, weights, right):
    return right(x.detach(), w1, w2, index, weights)


@pytest.mark.parametrize("change", [
    swapped_halves, unweighted, shifted_experts, without_the_routers_gradient,
    without_the_tokens_gradient,
])  # fmt: skip
def test_other_experts_are_refused(change, liger, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(liger, "apply", functools.partial(change, right=liger.apply))
    assert bench(tmp_path / "e.json", "E", *EXPERTS, "--against", "upstream")[0] == 1
    assert "layer: recipe: " in capsys.readouterr().err


def test_experts_that_are_not_on_one_tensor_are_not_compared_with_ligers(
    liger, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MEGACPP_BACKENDS", "moe_experts=reference,norm=reference")
    assert bench(tmp_path / "e.json", "E", *EXPERTS, "--against", "upstream") == (2, None)
    assert "Liger's experts are SwiGLU" in capsys.readouterr().err


@pytest.mark.parametrize(("letter", "words", "message"), [
    ("M", (), "mamba-ssm is not installed: cannot import mamba_ssm.modules.mamba3"),
    ("R", (), "accelerated-model-architectures is not installed: cannot import xma.layers.m2rnn"),
    ("E", (), "liger-kernel is not installed: cannot import liger_kernel.ops.fused_moe"),
    ("A", (), "layer A is from no package; E, M and R are"),
])  # fmt: skip
def test_without_the_package(letter, words, message, tmp_path, monkeypatch, capsys):
    for name in ("mamba_ssm", "xma", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(bridges, "import_ops_only", lambda package: None)
    assert bench(tmp_path / "x.json", letter, *words, "--against", "upstream") == (2, None)
    assert f"--against upstream: {message}" in capsys.readouterr().err


def test_a_package_that_is_broken_is_not_called_absent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "import_reason", lambda module: support.Broken("it is in ruins"))
    assert bench(tmp_path / "x.json", "M", "--against", "upstream") == (2, None)
    said = capsys.readouterr().err
    assert "--against upstream: it is in ruins" in said and "not installed" not in said


def test_packed_documents_are_not_compared_with_xmas(xma, tmp_path, capsys):
    assert bench(tmp_path / "x.json", "R", *PACKED, "--against", "upstream") == (2, None)
    assert "on whole rows only" in capsys.readouterr().err


def test_a_model_has_no_upstream(capsys):
    assert cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--against", "upstream"]) == 2
    assert "not of the form surface=backend" in capsys.readouterr().err
