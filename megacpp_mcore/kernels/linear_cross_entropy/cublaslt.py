"""Matrix products by an algorithm of cuBLASLt that torch does not choose.

torch runs the first algorithm that the library's heuristics return. For inner sums as short as
these (the tokens of a chunk, or hidden's width) that is on an H200 a "cooperative" kernel: two
groups of warps share a tile, and no products run while they store it. Another of the eight that the
heuristics return has a smaller tile for each group (a "ping-pong" kernel in CUTLASS's words), so
that one group stores while the other multiplies. It needs 0.90 of the time for the weight's
gradient and 0.96 for the logits, with bit-identical results.

The library is the one that torch has loaded; its C interface and constants are those of cublasLt.h.
Drop this file when torch chooses that algorithm itself.
"""

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError

TILE_128X160, TILE_176X128 = 29, 201  # CUBLASLT_MATMUL_TILE_*
MAX_SUM = 4096  # inner dimension; in longer sums the cost of storing a tile hardly counts
_CAPABILITY = (9, 0)
_REQUESTED = 8
_WORKSPACE_BYTES = 2**20

_TYPES = {torch.float32: 0, torch.bfloat16: 14}  # CUDA_R_*
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4  # CUBLASLT_MATMUL_DESC_*
_MAX_WORKSPACE_BYTES, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_*: of A, B, C, D
_TILE, _SPLIT_K = 1, 2  # CUBLASLT_ALGO_CONFIG_*


class CublasLtError(MegacppError):
    """A call of cuBLASLt that failed."""

    exit_status = 1


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _HeuristicResult(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm), ("workspace_bytes", c_size_t), ("state", c_int),
        ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


class _Matrix(NamedTuple):
    """A matrix as the library describes it: column-major, stride between columns. transposed: it is
    the transpose of the product's operand. alignment: of its address in bytes, 256 at most."""

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int
    transposed: bool
    alignment: int


class _Plan(NamedTuple):
    library: ctypes.CDLL
    handle: c_void_p
    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    found: _HeuristicResult


def product(out: Tensor, a: Tensor, b: Tensor, tile: int, *, accumulate: bool = False) -> bool:
    """out = a b, or with `accumulate` out += a b, by the library's algorithm with that tile.

    out: (n, m), bf16 or float32, rows contiguous. a: (n, k), b: (k, m), bf16, rows or columns
    contiguous. Sums are in float32, in an order that does not change from call to call.

    Returns False without doing anything where that is not known to be fast (another device or
    dtype, sums of more than MAX_SUM) or where the heuristics do not return the algorithm. Raises
    CublasLtError when a call fails.
    """
    if not out.is_cuda or not a.numel() or not b.numel() or a.shape[1] > MAX_SUM:
        return False
    if {a.dtype, b.dtype} != {torch.bfloat16} or out.dtype not in _TYPES:
        return False
    if torch.cuda.get_device_capability(out.device) != _CAPABILITY:
        return False
    matrices = [_matrix(x) for x in (b, a, out)]  # out^T = b^T a^T, as the library is column-major
    if None in matrices or matrices[2].transposed:
        return False
    with torch.cuda.device(out.device):
        plan = _plan(out.device.index, tile, *matrices)
        if plan is None:
            return False
        _run(plan, out, a, b, accumulate)
    return True


def _matrix(x: Tensor) -> _Matrix | None:
    (rows, columns), (down, right) = x.shape, x.stride()
    alignment = min(256, x.data_ptr() & -x.data_ptr())
    if right == 1 and down >= columns:
        return _Matrix(x.dtype, columns, rows, down, False, alignment)
    if down == 1 and right >= rows:
        return _Matrix(x.dtype, rows, columns, right, True, alignment)
    return None


def _run(plan: _Plan, out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    size = plan.found.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
    of_b, of_a, of_out = plan.layouts
    at_out = c_void_p(out.data_ptr())
    _check(plan.library.cublasLtMatmul(
        plan.handle, plan.operation, byref(c_float(1)), c_void_p(b.data_ptr()), of_b,
        c_void_p(a.data_ptr()), of_a, byref(c_float(accumulate)), at_out, of_out, at_out, of_out,
        byref(plan.found.algorithm), c_void_p(workspace.data_ptr() if size else None),
        c_size_t(size), c_void_p(torch.cuda.current_stream().cuda_stream),
    ))  # fmt: skip


@functools.cache
def _plan(device: int, tile: int, first: _Matrix, second: _Matrix, out: _Matrix) -> _Plan | None:
    """The plan for the current device, which is `device`; None without that algorithm."""
    library = _library()
    if library is None:
        return None
    handle, operation, preference = _handle(device), c_void_p(), c_void_p()
    _check(
        library.cublasLtMatmulDescCreate(byref(operation), _COMPUTE_FLOAT32, _TYPES[torch.float32])
    )
    for name, matrix in ((_TRANSPOSE_A, first), (_TRANSPOSE_B, second)):
        _set(library.cublasLtMatmulDescSetAttribute, operation, name, c_int32(matrix.transposed))
    layouts = tuple(c_void_p() for _ in range(3))
    for layout, matrix in zip(layouts, (first, second, out), strict=True):
        _check(library.cublasLtMatrixLayoutCreate(
            byref(layout), _TYPES[matrix.dtype], c_uint64(matrix.rows), c_uint64(matrix.columns),
            c_int64(matrix.stride),
        ))  # fmt: skip
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    prefer = library.cublasLtMatmulPreferenceSetAttribute
    _set(prefer, preference, _MAX_WORKSPACE_BYTES, c_uint64(_WORKSPACE_BYTES))
    for name, matrix in zip(_ALIGNMENTS, (first, second, out, out), strict=True):
        _set(prefer, preference, name, c_uint32(matrix.alignment))
    found, count = (_HeuristicResult * _REQUESTED)(), c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, *layouts, layouts[2], preference, _REQUESTED, found, byref(count)
    )
    # status is not 0 for sizes that the library does not serve at all
    usable = [one for one in found[: count.value] if one.state == status == 0]
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    for one in usable:
        if (_configured(library, one, _TILE), _configured(library, one, _SPLIT_K)) == (tile, 1):
            return _Plan(library, handle, operation, layouts, one)
    return None


@functools.cache
def _handle(device: int) -> c_void_p:
    """The library's handle for the current device, which is `device`."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)))
    return handle


@functools.cache
def _library() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


def _configured(library: ctypes.CDLL, found: _HeuristicResult, name: int) -> int:
    value = c_int32()
    _check(library.cublasLtMatmulAlgoConfigGetAttribute(
        byref(found.algorithm), name, byref(value), c_size_t(4), None
    ))  # fmt: skip
    return value.value


def _set(setter: ctypes._CFuncPtr, of: c_void_p, name: int, value: ctypes._SimpleCData) -> None:
    _check(setter(of, name, byref(value), c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise CublasLtError(
            f"cuBLASLt returned status {status}; see cublasStatus_t in cublas_api.h"
        )
