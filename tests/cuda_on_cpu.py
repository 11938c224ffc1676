"""CUDA C++ of ours, run on a CPU, so that what a kernel computes is tested where there is no GPU.

The source is rewritten where it is no C++: launches, dynamic shared memory and the handful of PTX
instructions; the header beside this has their meaning. Numerics are those of a GPU but for the
products' inner sums (rounded once here, cut by a tensor core) and the approximate functions (exact
here). Time, bank conflicts and memory that is not there are not looked at.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from made_once import made_once

from megacpp_mcore.host.nvcc import find_nvcc

_HEADER = Path(__file__).with_suffix(".h")
_FLAGS = ("-x", "c++", "-O2", "-std=c++17", "-w", "-shared", "-Xcompiler", "-fPIC")
_ASM = re.compile(r'asm(?: volatile)?\((?:[^;"]|"[^"]*")*\);')
_OPERAND = re.compile(r'"[=+]?[fr]"\s*\(((?:[^()]|\([^()]*\))*)\)')


def reason() -> str | None:
    """Why nothing can be run here, or None."""
    if shutil.which("g++") is None:
        return "no g++"
    if find_nvcc() is None:
        return "no nvcc, whose toolkit's headers have the 16-bit types"
    return None


def library(source: Path) -> ctypes.CDLL:
    """`source`, a .cu file with a C interface, compiled for this CPU."""

    def compile_to(target: Path) -> None:
        translated = target.with_suffix(".cpp")
        translated.write_text(translate(source))
        # nvcc, for a C++ file, is g++ with the toolkit's headers.
        command = [find_nvcc(), *_FLAGS, f"-I{_HEADER.parent}", "-o", target, translated]
        subprocess.run(command, check=True)

    return ctypes.CDLL(str(made_once(f"{source.stem}-on-cpu.so", compile_to)))


def translate(source: Path) -> str:
    """The C++ of a .cu file, of its folder's others, and of what they include of their own."""
    seen: set[str] = set()
    units = [source, *sorted(source.parent.glob("*.cu"))]
    text = "\n".join(_with_includes(unit, seen) for unit in units)
    text = re.sub(r"#include <.*?>|#pragma (once|unroll.*)", "", text)
    text = _ASM.sub(lambda match: _instruction(match.group()), text)
    text = text.replace(
        "extern __shared__ __align__(16) char memory[];", "char* memory = cpu::shared;"
    )
    launch = r"(\w+(?:<[^<>;]*>)?)<<<(.*?), (.*?), (.*?), stream>>>\((\w+)\);"
    text = re.sub(launch, r"cpu::launched = cpu::launch(\1, \2, \3, \4, \5);", text)
    text = text.replace("cudaGetLastError()", "cpu::launched")
    text = re.sub(r"cudaFuncSetAttribute\([^;]*\);", "cudaSuccess;", text)
    text = re.sub(r"cudaGetErrorString\([^;]*\);", "cpu::failure.c_str();", text)
    return f'#include "{_HEADER.name}"\n{text}'


def _with_includes(path: Path, seen: set[str]) -> str:
    if path.name in seen:
        return ""
    seen.add(path.name)
    return re.sub(
        r'#include "(.*?)"',
        lambda match: _with_includes(path.parent / match.group(1), seen),
        path.read_text(),
    )


def _instruction(statement: str) -> str:
    operands = _OPERAND.findall(statement)
    instructions = {
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32": "cpu::mma_tf32(c, a, b);",
        "mma.sync.aligned.m16n8k16": "cpu::mma_16<T>(c, a, b0, b1);",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16": "cpu::mma_8<T>(c, a0, a1, b);",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16": "cpu::mma_8<T>(c, a0, a1, b);",
        "movmatrix.sync.aligned.m8n8.trans": "{0} = cpu::movmatrix({1});",
        "ldmatrix.sync.aligned.m8n8.x4.trans": "cpu::ldmatrix<true>(x, from);",
        "ldmatrix.sync.aligned.m8n8.x4.shared": "cpu::ldmatrix<false>(x, from);",
        "st.shared.v4.b32": "cpu::store_words(to + kOffset, x);",
        "ld.shared.v4.b32": "cpu::load_words(x, from + kOffset);",
        "mad.wide.s32": "to = from + static_cast<int64_t>(t) * token;",
        "stmatrix.sync.aligned.m8n8.x4.shared": "cpu::stmatrix(x, to);",
        "ex2.approx.ftz.f32": "{0} = exp2f({1});",
        "lg2.approx.ftz.f32": "{0} = log2f({1});",
        "rcp.approx.ftz.f32": "{0} = 1.f / ({1});",
        "ld.acquire.gpu.global.b32": "x = cpu::acquire(from);",
        "@p ld.global.nc.b32": "if (valid) x = cpu::load(static_cast<const uint32_t*>(from));",
        "@p ld.global.nc.v2.b32": "if (valid) x = cpu::load_pair(from);",
        "prefetch.global.L2": ";",
        "exit;": 'cpu::fail("a thread that ends");',
        "tanh.approx.f32": "{0} = cpu::approximate_tanh({1});",
        "min.NaN.f32 %0, %1, 0f41F00000": "{0} = cpu::least_or_nan({1}, 30.f);",
        "min.NaN.f32 %0, %1, 0f42700000": "{0} = cpu::least_or_nan({1}, 60.f);",
        "min.NaN.f32 t, %1, %2": "{0} = {1} != {1} ? {1} : fminf(fmaxf({1}, {3}), {2});",
        "cvt.rna.tf32.f32": "{0} = cpu::rounded_tf32({1});",
        "bar.sync %0, %1": "cpu::barrier({0}, {1});",
        "bar.arrive %0, %1": "cpu::barrier({0}, {1}, false);",
    }
    for name, meaning in instructions.items():
        if name in statement:
            return meaning.format(*operands)
    raise ValueError(f"no meaning on a CPU for {statement}")
