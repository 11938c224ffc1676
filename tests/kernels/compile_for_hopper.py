"""Compiles the package's Triton kernels for an H200 on any machine, and prints what each takes of
it: warps, registers of a thread, its bytes of stack (most of it registers spilled to memory), bytes
of shared memory.

    python compile_for_hopper.py [KEY=VALUE ...]     (without TRITON_INTERPRET)

The operators run forward and backward on the CPU at NAM56R's widths, or with other values of its
recipe; a launch compiles and does not run, so every number is garbage and what would read one
(grouped products, the recurrence) is replaced. Last it prints the kernels that the package launches
and nothing here has compiled.
"""

import ast
import bisect
import contextlib
import itertools
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import megacpp_mcore
from megacpp_mcore.kernels import adam, parity
from megacpp_mcore.kernels.case import Case, case_class
from megacpp_mcore.kernels.embedding.triton import embedding
from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED
from megacpp_mcore.kernels.m2rnn import cuda
from megacpp_mcore.kernels.moe_experts.activation import SQUARED_RELU, SWIGLU, swiglu
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed
from megacpp_mcore.kernels.moe_experts.routing import route, rows_of, sum_gradients
from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.backend import load
from megacpp_mcore.surfaces.registry import REGISTRY

ROW = ["schedule.micro_batch_size=1", "model.seq_length=128", "model.vocab_size=1024"]
BACKENDS = {
    "norm": "triton", "mla_rope": "triton", "mla_up": "triton", "mamba3_core": "triton",
    "m2rnn_core": "triton", "linear_cross_entropy": "chunked", "rope_qk": "triton",
    "embedding": "triton", "router_topk": "triton",
}  # fmt: skip
COMPILED: dict[str, list[Any]] = {}


class Hopper:
    """As much of Triton's driver as a launch asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead_of_launching(kernel: str = "") -> None:
    """All kernels, or one alone."""
    driver.set_active(Hopper())
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        if self.__name__ != (kernel or self.__name__):
            return
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        versions = COMPILED.setdefault(f"{self.module}.{self.__name__}", [])
        if compiled not in versions:
            versions.append(compiled)

    JITFunction.run = run


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Tensors say so, as kernels have another form for the interpreter here and there."""
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield


def operator(name: str, backend: str, *overrides: str) -> None:
    """A surface's backend with the sizes of the recipe, forward and backward."""
    operator_of(case_class(name).of(load_recipe("nam56r", [*ROW, *overrides])), backend)


def operator_of(case: Case, backend: str) -> None:
    name = case.surface
    found = {b.name: b for b in REGISTRY[name].backends}[backend]
    bound = case.bind(load(found.implementation), "cpu", torch.bfloat16)
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    shapes = case.reference(**tensors)
    directions = {n: torch.ones_like(y) for n, y in shapes.items()}
    # The head asks cuBLAS for its products.
    with contextlib.nullcontext() if name == "linear_cross_entropy" else as_on_a_gpu():
        parity.run(case, bound, tensors, directions)


def carried_state(*overrides: str) -> None:
    """M's kernels where a row begins with a state and leaves one, which are others of their own."""
    case = case_class("mamba3_core").of(load_recipe("nam56r", [*ROW, *overrides]))
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    names = ("heads", "head_dim", "groups", "state_dim", "angles", "decay", "decay_floor", "eps")
    options = {name: getattr(case, name) for name in names} | {"return_final_state": True}
    function = load("megacpp_mcore.kernels.mamba3_core.triton:mamba3_core")
    with as_on_a_gpu():
        _, state = function(**tensors, **options)
        before = type(state)(*(x.detach().requires_grad_() for x in state))
        y, after = function(**tensors, **options, initial_state=before)
        torch.autograd.backward((y, *after), (torch.ones_like(y), *map(torch.ones_like, after)))


def embedding_into_main_grad() -> None:
    weight = torch.zeros(16, 3584, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(weight.shape)
    embedding(weight, torch.zeros(1, 64, dtype=torch.int64)).sum().backward()


def head_into_main_grad() -> None:
    weight = torch.zeros(1024, 3584, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(weight.shape)
    hidden, labels = torch.zeros(64, 1, 3584).bfloat16(), torch.zeros(64, 1, dtype=torch.int64)
    total, _ = CHUNKED.weighted(hidden, weight, labels, torch.ones(64, 1))
    total.backward()


def recurrence_of_zeros() -> None:
    """R's own kernels are CUDA C++."""

    def forward(q, k, v, W, f, *options):
        return v.new_zeros(*f.shape, v.shape[-1]), None, f.new_zeros(1)

    def backward(dy, d_final, q, k, v, W, f, *options):
        return *(torch.zeros_like(x) for x in (q, k, v, W, f)), None

    cuda.forward, cuda.backward = forward, backward


def experts(activation: str) -> None:
    rows, width, inner, topk = 128, 3584, 896, 4
    gate = 2 if activation == SWIGLU else 1
    x = torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True)
    w1 = torch.empty(16, gate * inner, width, dtype=torch.bfloat16)
    w2 = torch.empty(16, width, inner, dtype=torch.bfloat16)

    def rows_of_zeros(columns):
        return lambda x, w, *rest, **later: w.new_zeros(len(rows_of(x)), w.shape[columns])

    products = SimpleNamespace(
        NAME="none", ALIGN=8, forward=rows_of_zeros(1), input_gradient=rows_of_zeros(2)
    )
    probs = torch.rand(rows, 16, requires_grad=True)
    chosen = probs >= probs.topk(topk).values[:, -1:]
    weights = Experts(w1, w2, products=products, activation=activation)
    h = torch.zeros(rows, 2048, dtype=torch.bfloat16, requires_grad=True)  # a shared expert's
    with as_on_a_gpu():
        addends = torch.zeros_like(x), torch.zeros_like(x)
        experts_routed(x, chosen, probs, weights, topk, *addends).sum().backward()
        swiglu(h).sum().backward()


def gradients_of_a_gate() -> None:
    """What the router's gating product leaves to the sum of the tokens' gradients."""
    tokens, width, experts = 128, 3584, 16
    d_logits, gate = torch.zeros(tokens, experts), torch.zeros(experts, width).bfloat16()
    with as_on_a_gpu():
        fp32_output._bf16_parts(d_logits)
        routing = route(torch.ones(tokens, experts).bool(), d_logits, experts)
        rows, shared = (torch.zeros(n, width).bfloat16() for n in (routing.size, tokens))
        sum_gradients(rows, routing, shared, d_logits, gate)


def update(dtype: torch.dtype | None) -> None:
    parts = [torch.zeros(64) for _ in range(4)]
    weight = None if dtype is None else torch.zeros(64, dtype=dtype)
    hyper = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    adam.adam_(adam.table_of([adam.Shard(*parts, weight)]), torch.ones(()), **hyper)


def printed(code: bytes, program: str, *options: str) -> str:
    """What a program of CUDA's prints of machine code."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [program, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold code."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, at + i * size) for i in range(number)]
    found = []
    for name, _, _, _, start, length in sections:
        if cubin[sections[names][4] + name :].startswith(b".text."):
            found.append(cubin[start : start + length])
    return b"".join(found)


def wrong_descriptors(*cubins: bytes) -> list[tuple[int, str]]:
    """The numbers of the kernels with instructions that add something else than a carry to the
    upper word of an operand's descriptor, as Triton's own ptxas makes them
    (`megacpp_mcore.host.ptxas`), and the instructions.

    That word is a constant, with the kind of swizzle in its two upper bits; a register that it is
    added to must hold zero. All kernels are printed by one nvdisasm, which takes half a second to
    start.
    """
    parts = [instructions(cubin) for cubin in cubins]
    ends = list(itertools.accumulate(map(len, parts)))
    wrong, last, before, seen = [], {}, 0, 0
    for line in printed(b"".join(parts), knobs.nvidia.nvdisasm.path, "-b", "SM90a").splitlines():
        found = re.search(r"/\*([0-9a-f]+)\*/\s+(.*?) ?;", line)
        if not found:
            continue
        seen += 1
        kernel = bisect.bisect_right(ends, int(found[1], 16))
        last, before = last if kernel == before else {}, kernel
        found = re.fullmatch(r"(?:@!?U?P\w+\s+)?(U\S+)\s+(\S+), (.*)", found[2])
        if not found:
            continue
        name, target, operands = found.groups()
        numbers = re.findall(r"-?0x[0-9a-f]+", operands)
        added = re.match(r"UR\d+", operands)
        to_upper_word = name == "UIADD3.X" and added and numbers and (int(numbers[0], 16) >> 30) & 3
        if to_upper_word and last.get(added[0]) != ("UMOV", "URZ"):
            wrong.append((kernel, line.strip()))
        last[target] = name, operands
    assert seen == ends[-1] // 16, "nvdisasm has not printed every instruction"
    return wrong


def resources(kernel: Any) -> str:
    said = printed(kernel.asm["cubin"], knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    found = kernel.metadata
    return f"{found.num_warps:3} {registers:>4} {stack:>5} {found.shared:>7}"


def launched() -> set[str]:
    """MODULE.KERNEL of every kernel that the package launches: `NAME[grid](...)`."""
    root, names, kernels = Path(megacpp_mcore.__file__).parent, set(), {}
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                module = ".".join(("megacpp_mcore", *path.relative_to(root).with_suffix("").parts))
                kernels.setdefault(node.name, []).append(f"{module}.{node.name}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                names.add(ast.unparse(node.func.value).rpartition(".")[2])
    return {kernel for name in names for kernel in kernels.get(name, ())}


def main(*overrides: str) -> None:
    knobs.cache.dir = tempfile.mkdtemp()
    bridges.before_megatron()
    bridges.install()
    compile_instead_of_launching()
    recurrence_of_zeros()
    for name, backend in BACKENDS.items():
        gqa = ["attention.kind=gqa"] if name == "rope_qk" else []
        operator(name, backend, *gqa, *overrides)
    carried_state(*overrides)
    for rank in (2, 4):
        operator(
            "mamba3_scan",
            "triton_mimo",
            "mamba3.variant=mimo",
            f"mamba3.mimo_rank={rank}",
            *overrides,
        )
    for activation in (SWIGLU, SQUARED_RELU):
        experts(activation)
    gradients_of_a_gate()
    for dtype in (torch.bfloat16, None):
        update(dtype)
    embedding_into_main_grad()
    head_into_main_grad()
    for name, versions in sorted(COMPILED.items()):
        for kernel in versions:
            print(resources(kernel), name)
    named = [(name, kernel.asm) for name, versions in COMPILED.items() for kernel in versions]
    named = [(name, asm["cubin"]) for name, asm in named if "wgmma" in asm["ptx"]]
    for number, line in wrong_descriptors(*(cubin for _, cubin in named)):
        sys.exit(f"{named[number][0]} has a wrong descriptor: {line}")
    if missed := sorted(launched() - COMPILED.keys()):
        sys.exit(f"not compiled: {', '.join(missed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
