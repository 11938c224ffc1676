"""The experts' products in CUDA C++ for Hopper (csrc/), with torch_products' interface.

bf16, sums in float32, in a fixed order. Every expert's rows start at a multiple of ALIGN, and those
that pad an expert's are zero. A weight gradient is written or added to a float32 tensor as it is
stored.

Tokens are gathered as they are loaded, also for weight gradients: no product makes or needs a
sorted copy of them. A product gathers its first operand only, so that fc1's weight gradient is that
of its transpose, transposed as it is stored.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.readers import MOST_GATES
from megacpp_mcore.kernels.moe_experts.routing import Gathered, Routing

NAME = "hopper"
ALIGN = 64
MOST_EXPERTS = 256
LIBRARY = nvcc.Library(
    Path(__file__).parent / "csrc" / "grouped.cu", instead="moe_experts=grouped_mm", feature="a"
)
# As in grouped.cuh.
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _WIDE_WEIGHT_GRADIENT, _ADDED_WEIGHT_GRADIENT = range(
    5
)
_TILES = (256, 224)  # columns
# NCCL sums over the ranks of a host with so many blocks, each of which needs a multiprocessor: with
# all of them taken, the exchange waits for the product's end. On two H200s 16 were too few.
_EXCHANGE_BLOCKS = 24
# As in norm.cu and tokens.cu; in the latter, with shared memory for two tokens at least.
_MOST_COLUMNS = 480 * 8
_TWO_TOKENS_BYTES = 226 * 1024
_TOKENS = 8  # of a tile of norm.cu


class HopperProductError(MegacppError):
    """A product that CUDA refused to launch."""

    exit_status = 1


def reason(dtype: torch.dtype, experts: int) -> str | None:
    """Why these products cannot serve `experts` local experts of `dtype` here, or None."""
    if dtype != torch.bfloat16:
        return f"they multiply bfloat16, not {dtype}"
    if experts > MOST_EXPERTS:
        return f"{experts} local experts: they take up to {MOST_EXPERTS}"
    return LIBRARY.reason()


def forward(x: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    size, n = len(x), w.shape[1]
    x, source = _rows_and_source(x)
    out = x.new_empty(size, n)
    _launch(_FORWARD, x, w, out, ends, rows=size, n=n, k=x.shape[1], source=source)
    return out


def input_gradient(dy: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    size, (_, k, n) = len(dy), w.shape
    dy, source = _rows_and_source(dy)
    out = dy.new_empty(size, n)
    _launch(_INPUT_GRADIENT, dy, w, out, ends, rows=size, n=n, k=k, source=source)
    return out


def weight_gradient(
    dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor, during_exchange: bool = False
) -> Tensor:
    """As of torch_products. One of dy and x is Gathered."""
    rows, columns = (y.tokens if isinstance(y, Gathered) else y for y in (dy, x))
    out = rows.new_empty(ends.shape[0], rows.shape[1], columns.shape[1])
    _launch_of_weights(_WEIGHT_GRADIENT, dy, x, out, ends, during_exchange)
    return out


def add_weight_gradient(
    total: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor, overwrite: bool,
    during_exchange: bool = False,
) -> None:  # fmt: skip
    """As of torch_products; in one pass where total is float32, contiguous and aligned."""
    if total.dtype != torch.float32 or not total.is_contiguous() or total.data_ptr() % 16:
        torch_products.store(total, weight_gradient(dy, x, ends, during_exchange), overwrite)
        return
    kind = _WIDE_WEIGHT_GRADIENT if overwrite else _ADDED_WEIGHT_GRADIENT
    _launch_of_weights(kind, dy, x, total, ends, during_exchange)


def norm_and_logits(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As of torch_products, in one pass where norm.cu takes the shapes."""
    x, weight, gate = (y.contiguous() for y in (x, weight, gate))
    tokens, width = x.shape[:-1].numel(), x.shape[-1]
    if not tokens or not _in_one_pass(width, gate, x, weight):
        return torch_products.norm_and_logits(x, weight, eps, gate)
    new, experts = functools.partial(x.new_empty, dtype=torch.float32), gate.shape[0]
    normed, rstd, logits = torch.empty_like(x), new(tokens), new(tokens, experts)
    blocks = min(-(-tokens // _TOKENS), _multiprocessors(x))
    _call(
        "norm_and_logits", x, weight, gate, normed, rstd, logits, eps, tokens, width, experts,
        blocks,
    )  # fmt: skip
    return normed, rstd, logits


def _in_one_pass(width: int, gate: Tensor, *tensors: Tensor | None) -> bool:
    """Whether norm.cu and tokens.cu take the columns, the experts and the tensors, if any."""
    read = [y for y in (gate, *tensors) if y is not None]
    aligned = all(y.dtype == torch.bfloat16 and y.data_ptr() % 16 == 0 for y in read)
    return width % 8 == 0 and width <= _MOST_COLUMNS and gate.shape[0] <= MOST_GATES and aligned


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def tokens_gradient(
    d_rows: Tensor, routing: Routing, d_shared: Tensor | None, d_logits: Tensor, gate: Tensor,
    x: Tensor, d_residual: Tensor, weight: Tensor, rstd: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As of torch_products, in one pass where tokens.cu takes the shapes: the tokens' gradient
    is not rounded in between."""
    (tokens, width), topk = x.shape, routing.topk
    d_shared = None if d_shared is None else d_shared.contiguous()
    d_logits, gate, x, d_residual = (y.contiguous() for y in (d_logits, gate, x, d_residual))
    fits = tokens and 2 * (topk + 3) * 2 * width <= _TWO_TOKENS_BYTES
    if not fits or not _in_one_pass(width, gate, d_rows, d_shared, x, d_residual, weight):
        return torch_products.tokens_gradient(
            d_rows, routing, d_shared, d_logits, gate, x, d_residual, weight, rstd
        )
    blocks = min(tokens, _multiprocessors(x))
    dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
    partial = x.new_empty(blocks, width, dtype=torch.float32)
    _call(
        "tokens_gradient", d_rows, routing.rows, d_shared, d_logits, gate, x, d_residual, weight,
        rstd, dx, partial, d_weight, tokens, width, gate.shape[0], topk, blocks,
    )  # fmt: skip
    return dx, d_weight


def _rows_and_source(x: Tensor | Gathered) -> tuple[Tensor, Tensor | None]:
    """What a product reads for its first operand, and where the rows of x are among those of it;
    None where they are these."""
    return (x.tokens.contiguous(), x.routing.token) if isinstance(x, Gathered) else (x, None)


def _launch_of_weights(
    kind: int, dy: Tensor | Gathered, x: Tensor | Gathered, out: Tensor, ends: Tensor,
    during_exchange: bool,
) -> None:  # fmt: skip
    transposed, experts = isinstance(x, Gathered), ends.shape[0]
    gathered, rows = (x, dy) if transposed else (dy, x)
    tokens, source = _rows_and_source(gathered)
    parts = [(0, experts, 0)]
    if during_exchange:
        half = -(-experts // 2)
        parts = [(0, half, _EXCHANGE_BLOCKS), *([(half, experts, 0)] if half < experts else [])]
    for first, end, idle in parts:
        _launch(
            kind, tokens, rows, out, ends, rows=len(rows), m=tokens.shape[1], n=rows.shape[1],
            source=source, transposed=transposed, first=first, end=end, idle=idle,
        )  # fmt: skip


def _tile(columns: int) -> int:
    """Columns of a block's tile: those of which the fewest are beyond the matrix."""
    return min(_TILES, key=lambda width: -(-columns // width) * width)


def _launch(
    kind: int, a: Tensor, b: Tensor, c: Tensor, ends: Tensor, *, rows: int,
    n: int, k: int = 0, m: int = 0, source: Tensor | None = None, transposed: bool = False,
    first: int = 0, end: int | None = None, idle: int = 0,
) -> None:  # fmt: skip
    """C of the kind's product of A and B. rows: of A, which `source` gathers. transposed: C holds
    the product's transpose. first, end: the experts whose products they are. idle: multiprocessors
    that are not used."""
    end = ends.shape[0] if end is None else end
    _call(
        "grouped_product", kind, _tile(n), transposed, a, source, b, c, ends, rows, first, end,
        idle, m, n, k,
    )  # fmt: skip


def _call(name: str, *arguments: float | Tensor | None) -> None:
    """A function of grouped.cu: numbers, and tensors, all on one device, by their addresses."""
    kernels = _kernels()
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    plain = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    with torch.cuda.device(tensors[0].device):
        error = getattr(kernels, name)(*plain, torch.cuda.current_stream().cuda_stream)
    if error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise HopperProductError(f"{name} of {shapes}: {kernels.grouped_error(error).decode()}")


@functools.cache
def _kernels() -> ctypes.CDLL:
    found = LIBRARY.load("sm_90a")
    found.grouped_error.restype = ctypes.c_char_p
    number, pointer, rows = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    found.grouped_product.argtypes = (
        *(number,) * 3, *(pointer,) * 5, rows, *(number,) * 6, pointer,
    )  # fmt: skip
    found.norm_and_logits.argtypes = (
        *(pointer,) * 6, ctypes.c_float, *(number,) * 4, pointer,
    )  # fmt: skip
    found.tokens_gradient.argtypes = (*(pointer,) * 12, *(number,) * 5, pointer)
    return found
