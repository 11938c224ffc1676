"""What becomes of the functions that Megatron hands to torch.compile as it is imported."""

import subprocess
from collections.abc import Callable, Iterator

import pytest
import warm

pytestmark = pytest.mark.slow
START = """
import copy, pickle, sys
import torch
from megacpp_mcore.stack import bridges

there, torch.cuda.is_available = torch.cuda.is_available, lambda: {gpu}
bridges.before_megatron()
bridges.before_megatron()
torch.cuda.is_available = there
"""
# Functions as of a module of Megatron's: `outer` calls `inner`, as weighted_swiglu calls swiglu.
MEGATRONS = """
graphs = []

def record(graph, inputs):
    graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call_")])
    return graph

def inner(x):
    return x.sin()

def outer(x):
    return INNER(x).cos()

def other(x):
    return x.tan()

for function in (inner, outer):
    function.__module__ = "megatron.core.fusions.of_a_test"
INNER = torch.compile(inner, backend=record)
OUTER = torch.compile(outer, backend=record)
OTHER = torch.compile(other, backend=record)
x = torch.randn(5)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[bool, str], list[str]]]:
    """Runs START and a script in a process that has imported torch, but not its Inductor."""
    server = warm.Server("dynamo_preload")

    def run(gpu: bool, script: str) -> list[str]:
        done = subprocess.run(
            [server.command, "-c", START.format(gpu=gpu) + script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    yield run
    server.close()


@pytest.mark.parametrize("gpu", [True, False])
def test_megatron_is_imported_without_inductor(run, gpu):
    found = run(gpu, """
import megatron.core, megatron.training
print("torch._inductor.compile_fx" in sys.modules)
""")  # fmt: skip
    assert found == ["False"]


def test_inductor_is_what_megatron_would_import(run):
    """Else the bridge is needless."""
    found = run(True, """
torch.compile = bridges._COMPILE
import megatron.core
print("torch._inductor.compile_fx" in sys.modules)
""")  # fmt: skip
    assert found == ["True"]


def test_megatrons_functions_are_compiled_at_their_first_call(run):
    found = run(True, MEGATRONS + """
print(len(graphs))
compiled, real = [], bridges._COMPILE
bridges._COMPILE = lambda *args, **options: compiled.append(args) or real(*args, **options)
assert torch.equal(INNER(x), x.sin()) and torch.equal(INNER(x), x.sin())
print(len(graphs), len(compiled))
""")  # fmt: skip
    assert found == ["0", "1", "1"]


def test_one_that_calls_another_is_one_graph(run):
    """Without a break, as where torch.compile itself has made both."""
    found = run(True, MEGATRONS + """
assert torch.equal(OUTER(x), x.sin().cos())
print(len(graphs), sum("sin" in step or "cos" in step for step in graphs[0]))
""")  # fmt: skip
    assert found == ["1", "2"]


def test_a_method_is_called_with_its_object(run):
    found = run(True, MEGATRONS + """
def gate(self, x):
    return x * self.by
gate.__module__ = "megatron.core.transformer.of_a_test"
class Layer:
    by = 3
    gate = torch.compile(backend=record)(gate)
assert torch.equal(Layer().gate(x), x * 3)
print(len(graphs))
""")  # fmt: skip
    assert found == ["1"]


def test_a_function_is_copied_and_pickled_as_itself(run):
    """A config has its activation, and Megatron asks whether it is one of its own."""
    found = run(True, """
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.activations import quick_gelu
for function in (bias_gelu, quick_gelu):
    assert copy.deepcopy([function])[0] is function
    assert pickle.loads(pickle.dumps(function)) is function
    print(function.__name__, hasattr(function, "__wrapped__"))
""")  # fmt: skip
    assert found == ["bias_gelu", "True", "quick_gelu", "True"]


def test_other_functions_are_compiled_as_ever(run):
    found = run(True, MEGATRONS + """
print(hasattr(OTHER, "_torchdynamo_orig_callable"), hasattr(INNER, "_torchdynamo_orig_callable"))
module = torch.compile(torch.nn.Linear(2, 2), backend=record)
print(type(module).__name__)
""")  # fmt: skip
    assert found == ["True", "False", "OptimizedModule"]


def test_on_a_cpu_they_stay_as_they_are(run):
    found = run(False, MEGATRONS + """
print(INNER is inner, OTHER is other)
assert torch.equal(OTHER(x), x.tan()) and not graphs  # torch.compile is disabled
""")  # fmt: skip
    assert found == ["True", "False"]
