"""Requested, observed and the reason; what it costs; what the registry promises."""

import json
import subprocess
import sys
import timeit
from dataclasses import asdict
from importlib import resources
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from megacpp_mcore import dispatch, patching
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, load
from megacpp_mcore.surfaces.core_attention import te_attention
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import Broken, OfMachine, Unbuildable, always, import_reason
from megacpp_mcore.surfaces.workload import Workload

bridges.before_megatron()

CPU = Workload.of("cpu", "float32", dim=64)


def small_heads_only(problem):
    return f"dim {problem.size('dim')}; at most 32" if problem.size("dim") > 32 else None


def never(problem):
    return "cannot serve at all"


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def toy(monkeypatch):
    """A surface of four: the first never serves, the second depends on the problem."""
    backends = (
        Backend("broken", "json:dumps", never),
        Backend("fast", "json:loads", small_heads_only),
        Backend("slow", "json:load", always),
        Backend(REFERENCE, "json:dump", always),
    )
    monkeypatch.setitem(REGISTRY, "toy", Surface("toy", backends, lambda recipe, device: CPU))
    return "toy"


class TestChoice:
    def test_auto_passes_an_opt_in_backend_over_and_its_name_takes_it(self, monkeypatch):
        backends = (
            Backend("bold", "json:loads", always, opt_in=True),
            Backend(REFERENCE, "json:dump", always),
        )
        monkeypatch.setitem(REGISTRY, "toy", Surface("toy", backends, lambda recipe, device: CPU))
        decision = dispatch.choose("toy", CPU)
        assert decision.observed == REFERENCE
        assert decision.reason == "bold: serves only where it is named"
        assert dispatch.choose("toy", CPU, {"toy": "bold"}).observed == "bold"

    @pytest.mark.parametrize("why_not", [None, Broken("two versions"), Unbuildable("no nvcc")])
    @pytest.mark.parametrize("strict", [False, True])
    def test_what_a_workload_lets_auto_pass_over_need_not_be_built_and_its_name_says_so(
        self, monkeypatch, why_not, strict
    ):
        backends = (
            Backend("bold", "json:loads", lambda _: why_not, opt_in=small_heads_only),
            Backend(REFERENCE, "json:dump", always),
        )
        monkeypatch.setitem(REGISTRY, "toy", Surface("toy", backends, lambda recipe, device: CPU))
        dispatch.strict(strict)
        decision = dispatch.choose("toy", CPU)
        assert (decision.observed, decision.reason) == (REFERENCE, "bold: dim 64; at most 32")
        if why_not:
            with pytest.raises(DispatchError, match=f"cannot serve: {why_not}"):
                dispatch.choose("toy", CPU, {"toy": "bold"})
            return
        named = dispatch.choose("toy", CPU, {"toy": "bold"})
        assert (named.requested, named.observed) == ("bold", "bold")
        assert named.reason == (
            "named in the recipe's [backends]; auto passes it over: dim 64; at most 32"
        )
        narrow = Workload.of("cpu", "float32", dim=16)
        assert dispatch.choose("toy", narrow).observed == "bold"
        reason = dispatch.choose("toy", narrow, {"toy": "bold"}).reason
        assert reason == "named in the recipe's [backends]"

    def test_auto_takes_the_first_that_can_and_says_why_not_the_ones_before(self, toy):
        decision = dispatch.decide(toy, CPU)
        assert (decision.requested, decision.observed) == ("auto", "slow")
        assert decision.reason == "broken: cannot serve at all; fast: dim 64; at most 32"
        assert dispatch.decide(toy, Workload.of("cpu", "float32", dim=16)).observed == "fast"

    def test_a_name_in_the_recipe_serves(self, toy):
        decision = dispatch.decide(toy, CPU, {toy: REFERENCE, "norm": "te"})
        assert (decision.requested, decision.observed) == (REFERENCE, REFERENCE)
        assert decision.reason == "named in the recipe's [backends]"
        assert decision.load() is json.dump

    def test_the_environment_goes_before_the_recipe(self, toy, monkeypatch):
        monkeypatch.setenv("MEGACPP_BACKENDS", f" {toy} = slow , norm=auto,")
        decision = dispatch.decide(toy, CPU, {toy: REFERENCE})
        assert (decision.observed, decision.reason) == ("slow", "named in MEGACPP_BACKENDS")
        monkeypatch.setenv("MEGACPP_BACKENDS", f"{toy}=auto")
        assert dispatch.decide(toy, CPU, {toy: REFERENCE}).requested == "auto"

    def test_a_named_backend_that_cannot_serve_raises_with_every_reason(self, toy, monkeypatch):
        with pytest.raises(DispatchError) as caught:
            dispatch.decide(toy, CPU, {toy: "fast"})
        for part in (
            "'fast' is named for surface 'toy' in the recipe's [backends] and cannot serve: dim 64",
            "broken: cannot serve at all", "slow: can serve", "reference: can serve",
        ):  # fmt: skip
            assert part in str(caught.value)
        monkeypatch.setenv("MEGACPP_BACKENDS", "toy=broken")
        with pytest.raises(DispatchError, match="in MEGACPP_BACKENDS and cannot serve"):
            dispatch.decide(toy, CPU)
        assert dispatch.decisions() == ()

    def test_auto_with_nothing_that_serves_raises_with_every_reason(self):
        problem = Workload.of("cpu", "bfloat16", context_parallel_size=2)
        with pytest.raises(DispatchError) as caught:
            dispatch.decide("core_attention", problem)
        assert "no backend of surface 'core_attention' can serve" in str(caught.value)
        for name in dispatch.choices("core_attention")[1:]:
            assert f"{name}: " in str(caught.value)

    @pytest.mark.parametrize(
        ("requests", "message"),
        [
            ({"toys": "slow"}, "[backends]: unknown surface 'toys'; the surfaces are linear, "),
            ({"toy": "fastest"}, "unknown backend 'fastest' of surface 'toy'; choose auto, broken"),
        ],
    )
    def test_an_unknown_name_is_refused_wherever_it_stands(self, toy, requests, message):
        with pytest.raises(DispatchError) as caught:
            dispatch.decide("norm", CPU, requests)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("norm", "'norm' is not of the form surface=backend"),
            ("norm=", "'norm=' is not of the form surface=backend"),
            ("=te", "'=te' is not of the form surface=backend"),
            ("norm=te,linear=te,norm=auto", "surface 'norm' is given twice"),
            ("norms=te", "MEGACPP_BACKENDS: unknown surface 'norms'"),
            ("norm=te2", "MEGACPP_BACKENDS: unknown backend 'te2' of surface 'norm'"),
        ],
    )
    def test_an_environment_that_cannot_be_read_stops_every_decision(
        self, text, message, monkeypatch
    ):
        monkeypatch.setenv("MEGACPP_BACKENDS", text)
        with pytest.raises(DispatchError) as caught:
            dispatch.decide("linear", CPU)
        assert message in str(caught.value)

    def test_an_unknown_surface_is_refused(self):
        for ask in (dispatch.decide, dispatch.choose, dispatch.verdicts):
            with pytest.raises(DispatchError, match="unknown surface 'attention'"):
                ask("attention", CPU)


class TestRecord:
    def test_decisions_are_recorded_once_in_order(self, toy):
        for problem in (CPU, Workload.of("cpu", "float32", dim=65), CPU):
            dispatch.decide(toy, problem, {toy: "slow"})
        dispatch.decide(toy, CPU)
        dispatch.choose(toy, CPU, {toy: REFERENCE})
        assert [(d.requested, d.observed) for d in dispatch.decisions()] == [
            ("slow", "slow"),
            ("auto", "slow"),
        ]

    def test_a_decision_is_what_a_receipt_takes(self, toy):
        path = resources.files("megacpp_mcore.receipts") / "receipt.schema.json"
        definitions = json.loads(path.read_text())["$defs"]
        schema = {"$ref": "#/$defs/backend", "$defs": definitions}
        jsonschema.validate(asdict(dispatch.decide(toy, CPU)), schema)

    def test_rank_0_prints_each_distinct_decision_once(self, toy, monkeypatch, capsys):
        """With its reason where that is asked for; else in a short line."""
        dispatch.decide(toy, CPU)
        assert capsys.readouterr().err == "megacpp: backend of toy: slow\n"
        dispatch.begin()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv(dispatch.VERBOSE, "1")
        for _ in range(3):
            dispatch.decide(toy, CPU)
        dispatch.decide(toy, CPU, {toy: "slow"})
        out, err = capsys.readouterr()
        assert err.splitlines() == [
            "megacpp: backend of toy: slow (requested auto; broken: cannot serve at all; "
            "fast: dim 64; at most 32)",
            "megacpp: backend of toy: slow (requested slow; named in the recipe's [backends])",
        ]
        assert out == ""

    def test_a_run_says_all_of_them_in_one_line(self, toy, monkeypatch, capsys):
        dispatch.begin(say_each=False)
        dispatch.decide(toy, CPU)
        dispatch.decide(toy, CPU, {toy: "slow"})
        assert capsys.readouterr().err == ""
        assert dispatch.summary() == "megacpp: backends slow: toy (why: -v, or the receipt)"
        monkeypatch.setenv(dispatch.VERBOSE, "1")
        dispatch.begin(say_each=False)
        dispatch.decide(toy, CPU)
        assert "fast: dim 64; at most 32" in capsys.readouterr().err
        assert dispatch.summary() == "megacpp: backends slow: toy"

    @pytest.mark.parametrize(
        ("why_not", "role", "opt_in", "is_said"),
        [
            (OfMachine("no module of that name"), "chosen", False, True),
            (OfMachine("no module of that name"), "vendor", False, False),
            ("dim 64; at most 32", "chosen", False, False),
            (Broken("two versions"), "vendor", False, True),
            (Broken("two versions"), "vendor", True, False),
        ],
    )
    def test_a_run_says_why_auto_fell_past_what_its_user_expects(
        self, monkeypatch, capsys, why_not, role, opt_in, is_said
    ):
        backends = (
            Backend("fast", "json:loads", lambda _: why_not, role=role, opt_in=opt_in),
            Backend("slow", "json:load", always),
            Backend("late", "json:dump", lambda _: OfMachine("absent"), role="chosen"),
        )
        monkeypatch.setitem(REGISTRY, "toy", Surface("toy", backends, lambda recipe, device: CPU))
        dispatch.begin(say_each=False)
        reason = dispatch.decide("toy", CPU).reason
        line = f"megacpp: backend of toy: slow (requested auto; {reason})\n"
        assert capsys.readouterr().err == (line if is_said else "")
        dispatch.begin(say_each=False)
        dispatch.decide("toy", CPU, {"toy": "slow"})
        assert capsys.readouterr().err == ""

    def test_other_ranks_record_and_print_nothing(self, toy, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "3")
        dispatch.decide(toy, CPU)
        assert capsys.readouterr() == ("", "")
        assert len(dispatch.decisions()) == 1

    def test_a_run_begins_without_the_record_of_an_earlier_one(self, toy, capsys):
        dispatch.decide(toy, CPU)
        dispatch.begin()
        assert dispatch.decisions() == () and dispatch.questions() == {}
        decision = dispatch.decide(toy, CPU)
        assert dispatch.questions() == {(toy, CPU): (decision,)}
        assert capsys.readouterr().err.count("backend of toy") == 2

    def test_asking_is_not_deciding(self, toy, capsys):
        dispatch.choose(toy, CPU)
        assert dispatch.verdicts(toy, CPU) == {
            "broken": "cannot serve at all", "fast": "dim 64; at most 32",
            "slow": None, REFERENCE: None,
        }  # fmt: skip
        assert dispatch.decisions() == ()
        assert capsys.readouterr().err == ""


class TestCost:
    def test_a_cached_decision_takes_less_than_20_microseconds(self, monkeypatch):
        monkeypatch.setenv("MEGACPP_BACKENDS", "norm=reference,core_attention=auto")
        sizes = {"dqk": 128, "dv": 64, "heads": 56, "context_parallel_size": 1}
        problem = Workload.of("cpu", "bfloat16", **sizes)
        requests = {"linear": "auto", "core_attention": "sdpa"}

        def one():
            dispatch.decide("core_attention", problem, requests)

        one()
        # The fastest of many short rounds: what the work costs, not what else the machine does.
        assert min(timeit.repeat(one, number=200, repeat=50)) / 200 < 20e-6

    def test_neither_torch_nor_an_optional_package_is_imported(self):
        code = (
            "import sys, megacpp_mcore.dispatch, megacpp_mcore.catalog\n"
            "import megacpp_mcore.surfaces.registry\n"
            "from megacpp_mcore.surfaces.workload import Workload\n"
            "megacpp_mcore.dispatch.decide('linear', Workload.of('cpu', 'any'))\n"
            "heavy = {'torch', 'numpy', 'triton', 'megatron', 'transformer_engine', 'liger_kernel',"
            " 'mamba_ssm', 'deep_ep'}\n"
            "print(sorted(heavy & set(sys.modules)))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr

    @pytest.mark.slow
    def test_a_compiled_module_that_holds_a_dispatched_op_is_one_graph(self, monkeypatch):
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scan = dispatch.decide("mamba3_scan", CPU).load()
                self.project = torch.nn.Linear(4, 4)

            def forward(self, v, **arguments):
                return self.project(self.scan(v=self.project(v), chunk_size=4, **arguments))

        def decide_in_a_step(*arguments):
            raise AssertionError("dispatch was asked in a step")

        shapes = {
            "v": (1, 6, 2, 4), "q": (1, 6, 1, 4), "k": (1, 6, 1, 4), "adt": (1, 6, 2),
            "dt": (1, 6, 2), "trap": (1, 6, 2), "angles": (1, 6, 1, 1), "q_bias": (2, 4),
            "k_bias": (2, 4),
        }  # fmt: skip
        inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
        inputs |= {"adt": -inputs["adt"].abs(), "dt": inputs["dt"].abs()}
        block, graphs = Block(), []
        monkeypatch.setattr(dispatch, "decide", decide_in_a_step)
        monkeypatch.setattr(dispatch, "choose", decide_in_a_step)

        def keep(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        expected = block(**inputs)
        with torch._dynamo.config.patch(disable=False):  # the CPU lane turns it off
            torch._dynamo.reset()
            observed = torch.compile(block, backend=keep)(**inputs)
        assert len(graphs) == 1
        torch.testing.assert_close(observed, expected, rtol=0, atol=0)


class TestOptionalPackages:
    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("import nothing_of_that_name", "ModuleNotFoundError: No module named"),
            ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1"),
            ("assert False, 'NCCL 2.28.9, need 2.30.4'", "AssertionError: NCCL 2.28.9"),
            ("import os; os.no_such_symbol", "AttributeError: module 'os'"),
            ("raise SystemExit(1)", "SystemExit: 1"),
        ],
    )
    def test_any_failure_of_an_import_is_a_reason(self, line, found, tmp_path, monkeypatch):
        name = f"optional_{abs(hash(line))}"
        (tmp_path / f"{name}.py").write_text(line + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        reason = import_reason(name)
        assert reason.startswith(f"cannot import {name}: {found}")

    @pytest.mark.parametrize(
        ("line", "broken"),
        [
            ("import optional_x.nothing", False),  # an older release without that module
            ("import nothing_of_that_name", True),  # its own dependency is missing
            ("raise OSError('libcuda.so.1: cannot open')", True),
        ],
    )
    def test_a_strict_run_does_not_fall_past_a_broken_package(
        self, line, broken, toy, tmp_path, monkeypatch
    ):
        name = f"optional_{abs(hash(line))}"
        (tmp_path / name).mkdir()
        text = line.replace("optional_x", name) + "\n"
        (tmp_path / name / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        module = f"{name}.nothing" if "optional_x" in line else name
        backends = (Backend("package", "json:dumps", lambda problem: import_reason(module)),
                    Backend(REFERENCE, "json:dump", always))  # fmt: skip
        monkeypatch.setitem(REGISTRY, toy, Surface(toy, backends, lambda recipe, device: CPU))
        assert dispatch.choose(toy, CPU).observed == REFERENCE
        dispatch.strict(True)
        assert dispatch.choose(toy, CPU, {toy: REFERENCE}).observed == REFERENCE
        if broken:
            with pytest.raises(DispatchError, match=r"strict: backend 'package' of .*broken"):
                dispatch.choose(toy, CPU)
        else:
            assert dispatch.choose(toy, CPU).observed == REFERENCE

    def test_an_absent_package_is_not_broken(self, monkeypatch):
        assert not isinstance(import_reason("nothing_of_that_name.at_all"), Broken)

    def test_an_import_is_tried_once(self, tmp_path, monkeypatch):
        (tmp_path / "tried.py").write_text("open(__file__ + '.log', 'a').write('x')\n1 / 0\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert import_reason("tried") == import_reason("tried")
        assert (tmp_path / "tried.py.log").read_text() == "x"

    @pytest.mark.parametrize(
        ("cudnn", "reason"),
        [(92200, None), (92500, None), (91900, "cuDNN 91900 at run time"), (None, "cuDNN None")],
    )
    def test_te_attention_asks_for_the_cudnn_that_its_backward_pass_needs(
        self, cudnn, reason, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "transformer_engine", torch)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", torch)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        import_reason.cache_clear()
        try:
            found = te_attention(Workload.of("cuda", "bfloat16", dqk=128, dv=64))
        finally:
            import_reason.cache_clear()
        assert found is None if reason is None else found.startswith(reason)


class TestPatches:
    def test_megatrons_mla_serves_tensor_parallelism_with_its_patch_only(self, monkeypatch):
        problem = Workload.of("cpu", "float32", tensor_model_parallel_size=2)
        requests = {"mla_rope": "megatron"}
        monkeypatch.setattr(patching, "applied", lambda package: frozenset())
        with pytest.raises(dispatch.DispatchError, match="apply --only mla-k-pos-gradient"):
            dispatch.choose("mla_rope", problem, requests)
        monkeypatch.setattr(patching, "applied", lambda package: {"mla-k-pos-gradient"})
        dispatch.forget()
        assert dispatch.choose("mla_rope", problem, requests).observed == "megatron"


class TestRegistry:
    @pytest.mark.parametrize("surface", REGISTRY.values(), ids=lambda surface: surface.name)
    def test_reference_is_last_serves_on_any_device_and_loads(self, surface):
        names = [backend.name for backend in surface.backends]
        assert len(set(names)) == len(names) and "auto" not in names
        assert names[-1] == REFERENCE
        for device in ("cpu", "cuda"):
            decision = dispatch.choose(
                surface.name, Workload.of(device, "float16"), {surface.name: REFERENCE}
            )
            assert decision.load() is not None

    def test_what_a_layer_leaves_to_megatron_names_megatrons_class(self):
        """The class that the layer's own inherits from; a bench calls the stand-in."""
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from megacpp_mcore.layers.attention import SelfAttention
        from megacpp_mcore.layers.embedding import GatheredEmbedding
        from megacpp_mcore.layers.mla import MLASelfAttention
        from megacpp_mcore.layers.router import DispatchedTopKRouter

        bases = {
            backend.implementation: load(backend.implementation)
            for surface in REGISTRY.values()
            for backend in surface.backends
            if backend.stand_in
        }
        ours = {
            "mla_rope": MLASelfAttention, "rope_qk": SelfAttention,
            "router_gating": DispatchedTopKRouter, "router_topk": DispatchedTopKRouter,
            "embedding": GatheredEmbedding,
        }  # fmt: skip
        assert len(bases) == 5
        for name, layer in ours.items():
            (backend,) = [b for b in REGISTRY[name].backends if b.stand_in]
            assert (
                issubclass(layer, bases[backend.implementation])
                and layer is not bases[backend.implementation]
            )
        (heads,) = [b for b in REGISTRY["linear_cross_entropy"].backends if b.stand_in]
        assert bases[heads.implementation] is HybridModel
        assert all(load(b.benched) for s in REGISTRY.values() for b in s.backends if b.stand_in)

    def test_the_fallback_forced_by_environment_gives_the_same_attention(self, monkeypatch):
        """The output and the gradients of q, k, v, with grouped queries and dqk != dv."""
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.enums import AttnMaskType

        seq, batch, heads, groups, dqk, dv = 37, 2, 6, 3, 10, 7
        config = TransformerConfig(
            num_layers=1, hidden_size=60, num_attention_heads=heads, attention_dropout=0.0,
            use_cpu_initialization=True,
        )  # fmt: skip
        shapes = [(seq, batch, heads, dqk), (seq, batch, groups, dqk), (seq, batch, groups, dv)]
        qkv = [torch.randn(s, dtype=torch.float64) for s in shapes]
        grad = torch.randn(seq, batch, heads * dv, dtype=torch.float64)

        def run(forced):
            monkeypatch.setenv("MEGACPP_BACKENDS", forced)
            problem = Workload.of("cpu", "float64", dqk=dqk, dv=dv, heads=heads)
            decision = dispatch.decide("core_attention", problem)
            attention = decision.load()(
                config=config, layer_number=1, attn_mask_type=AttnMaskType.causal,
                attention_type="self", k_channels=dqk, v_channels=dv,
                pg_collection=SimpleNamespace(),
            )  # fmt: skip
            leaves = [x.clone().requires_grad_() for x in qkv]
            out = attention(*leaves, None)
            out.backward(grad)
            return decision.observed, [out.detach(), *(leaf.grad for leaf in leaves)]

        first, served = run("")
        second, fallback = run("core_attention=reference")
        assert (first, second) == ("sdpa", REFERENCE)
        # Sums of at most seq * group terms, whose partial sums stay below seq * group * dqk.
        atol = seq * (heads // groups) * dqk * torch.finfo(torch.float64).eps
        for a, b in zip(served, fallback, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)
