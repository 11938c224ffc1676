"""M2RNN in CUDA C++, one way for 16-bit inputs and one for float32; the kernels are in csrc/.

One launch forward and one backward, each with one more where parts are to be added up (forward for
float32 only). The state and what is carried from step to step are float32. Sums over rows, heads
and batch are made in a fixed order: a result does not change from run to run.

16-bit inputs: of h W = h + h (W - 1) the first is float32, the second with h rounded to 11 bits and
W - 1 in two parts of 11, for what W is off by adds up over steps. tanh="approximate" is the GPU's
own instruction, within 2^-16 of the value on Hopper (measured 2^-16.5; PTX promises 2^-11); "exact"
is 1 - 2 / (1 + e^2x), within 2^-20 of 1. So z is off by at most d = sum_i r_i |(W - 1)_ij| plus
2^-16 |z| or 2^-20, r_i being what rounding h_i makes: 2^-11 |h_i|, and no more than 2^-12 where
|h_i| is at most 1. An element of the state, if it was off by e before a step, is off by
f e + (1 - f) (w e + d) after it, w = max_j sum_i |W_ij|, for tanh is nowhere steeper than 1. Where
w < 1 that is never more than d / (1 - w), however many steps there are.

Backwards a state is made again from the last checkpoint, which keeps 11 bits of it: W goes to 11
bits there, tanh is the approximate one whatever `tanh` says, and z is kept to 11 bits; none of it
lasts beyond the next checkpoint. The gradient of the state, dh, is carried in float32. All that is
multiplied is fp16: h, z, W and 1 - f as they are (1 - f rounded up or down by turns, for else it
would be off the same way at every step of a constant f); the others in multiples of a power of two
that is chosen anew for every 8 steps (a unit) of every 16 rows: k, v and dy (of q dy, dy) so that
the largest is near one, and dh, of which the gradient of tanh's argument is made, so that nothing
that becomes of it within the unit overflows. For |dh| before a step is at most f + (1 - f) r times
that after it, r being the largest sum of a row of |W| or 1, and its q dy apart. This growth is
counted up to 2^18 a unit; gradients that truly grow faster come out infinite or NaN. So what fp16
takes off an element of dh is at most 2^-12 of it or, if that is more, 2^-18 of the largest that the
16 rows and their q dy have, and where W lets nothing grow 2^-36 of that (2^-126 at least). Of k, v
and dy it is 2^-12 of an element or 2^-25 of the unit's largest: nothing of a bfloat16 that is not
below 2^-17 of it. Sums are float32, but of dq and dk the parts of heads that share q or k, and of
dv those of every 16 rows, are rounded to the inputs' dtype before they are added up. Eight steps
are summed up at a time: a NaN of one shows in y and in q's, k's and v's gradients of all eight.

float32: all products with both factors in two parts of 11 bits (2^-20 of the sum of absolute
products).
"""

import ctypes
import functools

import torch
from torch import Tensor

from megacpp_mcore.kernels import m2rnn as _public
from megacpp_mcore.kernels.m2rnn.build import library

V_HEAD_DIM = 16
ROWS = 32  # of a state in a block: K is a multiple of it
TILE_ROWS = 16  # of backward's warps, for 16-bit inputs
STEPS = 16  # chunk_size is a multiple of it
Y_STEPS = 32  # whose y is added up at once
# The fast backward keeps the states of a chunk in shared memory: there is no room for more.
CHUNK_SIZES = {"float32": (16, 32, 48, 64), "bfloat16": (16, 32), "float16": (16, 32)}
DTYPES = tuple(CHUNK_SIZES)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers of m2rnn.cu


def m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 32,
    grad_clamp: float | None = None,
    tanh: str = "approximate",
) -> tuple[Tensor, Tensor]:
    """`megacpp_mcore.kernels.m2rnn.m2rnn` on cuda; q, k and v in one of DTYPES.

    K is a multiple of 32, V is 16, chunk_size is one of the dtype's CHUNK_SIZES. With 16-bit inputs
    elements of W and the initial state stay below fp16's 65504. Raises M2RNNInputError for other
    sizes and dtypes, and KernelBuildError when the kernels cannot be built.
    """
    _public.check_inputs(q, k, v, W, f, initial_state, cu_seqlens, chunk_size, grad_clamp, tanh)
    _check_served(q, k, v, chunk_size)
    initial_state = None if initial_state is None else initial_state.float()
    bounds = None if cu_seqlens is None else cu_seqlens.to(device=v.device, dtype=torch.int32)
    y, final_state, _ = _forward(
        q, k, v, W.float(), f.float(), initial_state, bounds, chunk_size, grad_clamp,
        tanh == "exact",
    )  # fmt: skip
    return y, final_state


def sizes_reason(dtype: str, k_dim: int, v_dim: int, chunk_size: int) -> str | None:
    """Why the kernels do not take such a problem, or None. dtype: torch's name, of q, k and v."""
    if dtype not in DTYPES:
        return f"q, k and v are {dtype}; it takes {', '.join(DTYPES)}"
    if k_dim % ROWS:
        return f"K is {k_dim}; it takes multiples of {ROWS}"
    if v_dim != V_HEAD_DIM:
        return f"V is {v_dim}; it takes {V_HEAD_DIM}"
    if chunk_size not in CHUNK_SIZES[dtype]:
        allowed = ", ".join(map(str, CHUNK_SIZES[dtype]))
        return f"chunk_size is {chunk_size}; it takes {allowed} for {dtype}"
    return None


def _check_served(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> None:
    devices = {x.device for x in (q, k, v)}
    if len(devices) > 1 or v.device.type != "cuda":
        raise _public.M2RNNInputError(
            f"q, k and v are on {', '.join(sorted(map(str, devices)))}; the CUDA kernel of M2RNN "
            "takes them on one cuda device"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise _public.M2RNNInputError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; the CUDA kernel of M2RNN takes one "
            "dtype"
        )
    dtype = str(v.dtype).removeprefix("torch.")
    if reason := sizes_reason(dtype, q.shape[-1], v.shape[-1], chunk_size):
        raise _public.M2RNNInputError(f"the CUDA kernel of M2RNN does not serve this: {reason}")


class _Problem(ctypes.Structure):
    """`Problem` of csrc/common.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "W", "f", "initial", "bounds", "first_chunk", "checkpoints",
            "final_state", "y", "y_parts", "y_counts", "carried", "dy", "d_final", "dq", "dk", "dv",
            "dW", "df", "d_initial", "dq_parts", "dk_parts", "dv_parts", "df_parts", "dW_parts",
            "undone",
        )),
        *((f"{name}_{step}", ctypes.c_int64)
          for name in ("q", "k", "v", "f") for step in ("batch", "token", "head")),
        *((name, ctypes.c_int32) for name in (
            "chains", "batch", "tokens", "heads", "q_heads", "k_heads", "k_dim", "stages",
            "groups", "slots", "bundle", "segments",
        )),
        ("clamp", ctypes.c_float),
        ("exact_tanh", ctypes.c_int32),
    ]  # fmt: skip


def _launch(entry: str, sizes: "_Sizes", dtype: torch.dtype, device: torch.device, **tensors):
    """Call `entry` on the current stream; a tensor that is None is a null pointer."""
    problem = _Problem(
        chains=sizes.chains, batch=sizes.batch, tokens=sizes.tokens, heads=sizes.heads,
        q_heads=sizes.q_heads, k_heads=sizes.k_heads, k_dim=sizes.k_dim,
        stages=sizes.chunk // STEPS, groups=sizes.groups, clamp=sizes.clamp, slots=sizes.slots,
        bundle=sizes.bundle, segments=sizes.segments, exact_tanh=sizes.exact_tanh,
    )  # fmt: skip
    for name, x in tensors.items():
        setattr(problem, name, None if x is None else x.data_ptr())
    for name in ("q", "k", "v", "f"):
        for step, stride in zip(("batch", "token", "head"), tensors[name].stride(), strict=False):
            setattr(problem, f"{name}_{step}", stride)
    kernels = _kernels(device.index)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        error = getattr(kernels, entry)(ctypes.byref(problem), _DTYPES[dtype], stream)
    if error:
        raise RuntimeError(f"{entry}: {kernels.m2rnn_error(error).decode()}")


@functools.cache
def _kernels(device: int) -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability(device)
    kernels = library(f"sm_{major}{minor}")
    kernels.m2rnn_error.restype = ctypes.c_char_p
    kernels.m2rnn_problem_size.restype = ctypes.c_int64
    for entry in (kernels.m2rnn_forward, kernels.m2rnn_backward):
        entry.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if kernels.m2rnn_problem_size() != ctypes.sizeof(_Problem):
        raise RuntimeError(
            f"m2rnn.cu's Problem has {kernels.m2rnn_problem_size()} bytes, cuda.py's "
            f"{ctypes.sizeof(_Problem)}"
        )
    return kernels


class _Sizes:
    """What the tensors' shapes say."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor | None,
        chunk_size: int,
        grad_clamp: float | None = None,
        exact_tanh: bool = False,
    ) -> None:
        self.batch, self.tokens, self.heads, _ = v.shape
        self.q_heads, self.k_heads, self.k_dim = q.shape[2], k.shape[2], q.shape[3]
        self.chunk = chunk_size
        self.groups = self.k_dim // ROWS  # blocks that share a head's rows
        self.clamp = 0.0 if grad_clamp is None else grad_clamp
        self.exact_tanh = exact_tanh
        if bounds is None:
            self.chains = self.batch
            self.chunks = self.batch * -(-self.tokens // chunk_size)
        else:
            self.chains = bounds.numel() - 1
            # Without asking the device: every document ends in at most one chunk that is not full.
            self.chunks = self.tokens // chunk_size + self.chains
        self.slots, self.bundle = self.bundles(1), 1
        self.segments = 1

    def bundles(self, heads: int) -> int:
        """Of so many neighbouring heads of a chain's document, or fewer in its last."""
        return self.chains * -(-self.heads // heads)

    def state(self, rows: int) -> tuple[int, int, int, int]:
        return rows, self.heads, self.k_dim, V_HEAD_DIM

    def parts(self, like: Tensor, *width: int, rows: int = ROWS) -> Tensor:
        """Room for one part of every so many rows'."""
        shape = self.k_dim // rows, self.batch, self.tokens, self.heads, *width
        return like.new_empty(shape)

    def key_parts(self, gradient: Tensor) -> Tensor:
        """Room for one part of each head's of q's or k's gradient: itself when none is shared."""
        if gradient.shape[2] == self.heads:
            return gradient
        return gradient.new_empty(self.batch, self.tokens, self.heads, self.k_dim)


def _first_chunks(bounds: Tensor | None, chunk_size: int) -> Tensor | None:
    """Index of each document's first checkpoint."""
    if bounds is None:
        return None
    chunks = (bounds.diff() + chunk_size - 1) // chunk_size
    return (chunks.cumsum(0) - chunks).to(torch.int32)


def _readable(x: Tensor) -> Tensor:
    """x itself when its rows can be read 16 bytes at a time, else a copy."""
    size = x.element_size()
    aligned = x.stride(-1) == 1 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
    return x if aligned and x.data_ptr() % 16 == 0 else x.clone(
        memory_format=torch.contiguous_format
    )  # fmt: skip


def _whole(x: Tensor | None) -> Tensor | None:
    """x contiguous, and readable as `_readable`."""
    return None if x is None else _readable(x.contiguous())


@torch.library.custom_op("megacpp::m2rnn_cuda", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    initial: Tensor | None,
    bounds: Tensor | None,
    chunk_size: int,
    grad_clamp: float | None,
    exact_tanh: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and the state before each chunk (chunks, H, K, V)."""
    sizes = _Sizes(q, k, v, bounds, chunk_size, None, exact_tanh)
    y, final_state, checkpoints = _outputs(v, f, sizes)
    # Zeros: how many of the groups have their parts of 32 steps' y; which states have been carried
    # from one block to another, for each eight rows.
    counts = carried = None
    if v.dtype != torch.float32:
        sizes.slots, sizes.bundle = _at_once(sizes, _processors(q.device))
        if bounds is not None:  # their lengths are not known here: none is cut
            sizes.slots = sizes.bundles(sizes.bundle)
        steps = sizes.batch * sizes.tokens // Y_STEPS + 3 * sizes.chains
        strips = sizes.chains * sizes.k_dim // 8
        zeros = f.new_zeros(steps + strips, sizes.heads, dtype=torch.int32)
        counts, carried = zeros.split((steps, strips))
    _launch(
        "m2rnn_forward", sizes, v.dtype, v.device,
        q=_readable(q), k=_readable(k), v=_readable(v), W=W.contiguous(), f=f,
        initial=_whole(initial), bounds=bounds,
        first_chunk=_first_chunks(bounds, chunk_size), checkpoints=checkpoints,
        final_state=final_state, y=y,
        y_parts=None if sizes.groups == 1 else sizes.parts(f, V_HEAD_DIM),
        y_counts=counts, carried=carried,
    )  # fmt: skip
    return y, final_state, checkpoints


BUNDLE = 3  # heads that a block of forward may have, if they share q and k

# What a step takes in cycles on an H200 with so many blocks of so many heads on a multiprocessor.
_STEP_CYCLES = {(1, 1): 135, (2, 1): 166, (1, BUNDLE): 203}


def _at_once(sizes: _Sizes, processors: int) -> tuple[int, int]:
    """How many bundles of how many heads forward computes at a time, each in as many blocks as it
    has groups.

    More of them on a multiprocessor take longer for a step, fewer take more turns.
    """
    shared = sizes.q_heads == sizes.k_heads == 1

    def cycles(way: tuple[int, int]) -> float:
        blocks, heads = way
        turns = sizes.bundles(heads) * sizes.groups / (blocks * processors)
        return max(1, turns) * _STEP_CYCLES[way]

    ways = [way for way in _STEP_CYCLES if shared or way[1] == 1]
    blocks, heads = min(ways, key=cycles)
    return max(1, min(sizes.bundles(heads), blocks * processors // sizes.groups)), heads


SEGMENTS = 8  # into which backward cuts a chain


def _segments(sizes: _Sizes, processors: int) -> int:
    """Where one ends, its chain goes on on a multiprocessor that has room: all are as busy.

    A chain that has a multiprocessor of its own gains nothing by it.
    """
    return 1 if sizes.chains * sizes.heads * sizes.groups <= processors else SEGMENTS


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _outputs(v: Tensor, f: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    kept = torch.float32 if v.dtype == torch.float32 else torch.float16
    return (
        v.new_empty(v.shape),
        f.new_empty(sizes.state(sizes.chains)),
        f.new_empty(sizes.state(sizes.chunks), dtype=kept),
    )


@_forward.register_fake
def _(q, k, v, W, f, initial, bounds, chunk_size, grad_clamp, exact_tanh):
    return _outputs(v, f, _Sizes(q, k, v, bounds, chunk_size))


@torch.library.custom_op("megacpp::m2rnn_cuda_backward", mutates_args=(), device_types="cuda")
def _backward(
    dy: Tensor | None,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    f: Tensor,
    bounds: Tensor | None,
    checkpoints: Tensor,
    chunk_size: int,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dW, df, d_initial from the gradients of y and of the final state."""
    sizes = _Sizes(q, k, v, bounds, chunk_size, grad_clamp)
    if bounds is None:
        sizes.segments = _segments(sizes, _processors(q.device))
    rows = ROWS if v.dtype == torch.float32 else TILE_ROWS
    dq, dk, dv, dW, df, d_initial = _gradient_outputs(q, k, v, W, f, sizes)
    _launch(
        "m2rnn_backward", sizes, v.dtype, v.device,
        q=_readable(q), k=_readable(k), v=_readable(v), W=W.contiguous(), f=f,
        bounds=bounds, first_chunk=_first_chunks(bounds, chunk_size), checkpoints=checkpoints,
        dy=_whole(dy), d_final=_whole(d_final),
        dq=dq, dk=dk, dv=dv, dW=dW, df=df, d_initial=d_initial,
        dq_parts=sizes.key_parts(dq), dk_parts=sizes.key_parts(dk),
        dv_parts=sizes.parts(v, V_HEAD_DIM, rows=rows), df_parts=sizes.parts(f, rows=rows),
        dW_parts=f.new_empty(sizes.chains * sizes.groups, *W.shape),
        undone=f.new_zeros(sizes.chains * sizes.heads * sizes.groups + 1, dtype=torch.int32),
    )  # fmt: skip
    return dq, dk, dv, dW, df, d_initial


def _gradient_outputs(q, k, v, W, f, sizes: _Sizes) -> tuple[Tensor, ...]:
    gradients = (x.new_empty(x.shape) for x in (q, k, v, W, f))
    return *gradients, f.new_empty(sizes.state(sizes.chains))


@_backward.register_fake
def _(dy, d_final, q, k, v, W, f, bounds, checkpoints, chunk_size, grad_clamp):
    sizes = _Sizes(q, k, v, bounds, chunk_size)
    return _gradient_outputs(q, k, v, W, f, sizes)


def _save(ctx, inputs, output) -> None:
    q, k, v, W, f, initial, bounds, *ctx.options, _ = inputs
    checkpoints = output[2]
    ctx.mark_non_differentiable(checkpoints)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, W, f, bounds, checkpoints)
    ctx.has_initial = initial is not None


def _gradients(ctx, dy, d_final, _):
    *gradients, d_initial = _backward(dy, d_final, *ctx.saved_tensors, *ctx.options)
    return *gradients, d_initial if ctx.has_initial else None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
