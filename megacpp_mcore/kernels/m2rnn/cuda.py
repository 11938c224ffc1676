"""M2RNN in CUDA C++: one pair of kernels for 16-bit inputs and one for float32, in csrc/.

Each pass is one launch, plus one that sums partial results (in the forward pass for float32 only).
The state and its gradient are float32, and every sum has a fixed order: results do not change from
run to run. docs/m2rnn-kernels.md derives the error bounds and describes the layout. In short:

- float32: products are exact to 2^-20 of the sum of their absolute terms.
- 16-bit, forward: for W with column sums of |W| below 1 the error of the state is bounded however
  many steps there are.
- 16-bit, backward: states are recomputed from fp16 checkpoints. Gradients of the state that grow by
  more than 2^18 within 8 steps become infinite or NaN.
- 16-bit: a NaN in one step shows in y and in the gradients of q, k and v of 8 steps.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels import m2rnn as _public
from megacpp_mcore.kernels.m2rnn import schedule
from megacpp_mcore.kernels.m2rnn.launch import launch
from megacpp_mcore.kernels.m2rnn.schedule import ROWS, V_HEAD_DIM, Sizes

TILE_ROWS = 16  # rows of a warp of the backward kernel, for 16-bit inputs
Y_STEPS = 32  # steps whose y is summed at once, for 16-bit inputs
# The 16-bit backward kernel keeps the states of a chunk in shared memory, which limits the chunk.
CHUNK_SIZES = {"float32": (16, 32, 48, 64), "bfloat16": (16, 32), "float16": (16, 32)}
DTYPES = tuple(CHUNK_SIZES)


def m2rnn(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, *, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, chunk_size: int = 32, grad_clamp: float | None = None,
    tanh: str = "approximate",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`megacpp_mcore.kernels.m2rnn.m2rnn` on cuda; q, k and v in one of DTYPES.

    K is a multiple of 32, V is 16, chunk_size is one of the dtype's CHUNK_SIZES. With 16-bit inputs
    elements of W and the initial state stay below fp16's 65504. Raises M2RNNInputError for other
    sizes and dtypes, and KernelBuildError when the kernels cannot be built.
    """
    _public.check_inputs(q, k, v, W, f, initial_state, cu_seqlens, chunk_size, grad_clamp, tanh)
    _check_served(q, k, v, chunk_size)
    initial_state = None if initial_state is None else initial_state.float()
    bounds = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=v.device, dtype=torch.int32).contiguous()
    y, final_state, _ = forward(
        q, k, v, W.float(), f.float(), initial_state, bounds, chunk_size, grad_clamp,
        tanh == "exact",
    )  # fmt: skip
    return y, final_state


def sizes_reason(dtype: str, k_dim: int, v_dim: int, chunk_size: int) -> str | None:
    """Why the kernels do not take these sizes, or None. dtype: of q, k and v, by torch's name."""
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


def _contiguous(x: Tensor | None) -> Tensor | None:
    """x contiguous, and aligned as in `_readable`."""
    return None if x is None else _readable(x.contiguous())


@torch.library.custom_op("megacpp::m2rnn_cuda", mutates_args=(), device_types="cuda")
def forward(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, initial: Tensor | None,
    bounds: Tensor | None, chunk_size: int, grad_clamp: float | None, exact_tanh: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the final state, and the state before each chunk (chunks, H, K, V)."""
    sizes = Sizes(q, k, v, bounds, chunk_size, None, exact_tanh)
    y, final_state, checkpoints = _outputs(v, f, sizes)
    # Zeroed flags: how many row blocks have written their part of each Y_STEPS steps' y, and which
    # states (of every eight rows) one block has left for the next to continue from; at the end, how
    # many blocks have started.
    y_counts = state_ready = None
    if v.dtype != torch.float32:
        sizes.slots, sizes.bundle = schedule.forward_schedule(
            sizes, schedule.multiprocessors(q.device)
        )
        if bounds is not None:  # documents' lengths are only known on the device: cut none
            sizes.slots = sizes.bundles(sizes.bundle)
        steps = sizes.batch * sizes.tokens // Y_STEPS + 3 * sizes.chains
        strips = sizes.chains * sizes.k_dim // 8
        zeros = f.new_zeros((steps + strips) * sizes.heads + 1, dtype=torch.int32)
        y_counts, state_ready = zeros.split((steps * sizes.heads, strips * sizes.heads + 1))
    launch(
        "m2rnn_forward", sizes, v.dtype, v.device,
        q=_readable(q), k=_readable(k), v=_readable(v), W=W.contiguous(), f=f,
        initial=_contiguous(initial), bounds=bounds,
        first_chunk=_first_chunks(bounds, chunk_size), checkpoints=checkpoints,
        final_state=final_state, y=y,
        y_parts=None if sizes.row_blocks == 1 else sizes.parts(f, V_HEAD_DIM),
        y_counts=y_counts, state_ready=state_ready,
    )  # fmt: skip
    return y, final_state, checkpoints


def _outputs(v: Tensor, f: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    checkpoint_dtype = torch.float32 if v.dtype == torch.float32 else torch.float16
    return (
        v.new_empty(v.shape),
        f.new_empty(sizes.state(sizes.chains)),
        f.new_empty(sizes.state(sizes.chunks), dtype=checkpoint_dtype),
    )


@forward.register_fake
def _(q, k, v, W, f, initial, bounds, chunk_size, grad_clamp, exact_tanh):
    return _outputs(v, f, Sizes(q, k, v, bounds, chunk_size))


@torch.library.custom_op("megacpp::m2rnn_cuda_backward", mutates_args=(), device_types="cuda")
def backward(
    dy: Tensor | None, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, W: Tensor,
    f: Tensor, bounds: Tensor | None, checkpoints: Tensor, chunk_size: int,
    grad_clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dW, df, d_initial from the gradients of y and of the final state."""
    sizes = Sizes(q, k, v, bounds, chunk_size, grad_clamp)
    if bounds is None:
        sizes.segments = schedule.backward_segments(sizes, schedule.multiprocessors(q.device))
    rows = ROWS if v.dtype == torch.float32 else TILE_ROWS
    dq, dk, dv, dW, df, d_initial = _gradient_outputs(q, k, v, W, f, sizes)
    launch(
        "m2rnn_backward", sizes, v.dtype, v.device,
        q=_readable(q), k=_readable(k), v=_readable(v), W=W.contiguous(), f=f,
        bounds=bounds, first_chunk=_first_chunks(bounds, chunk_size), checkpoints=checkpoints,
        dy=_contiguous(dy), d_final=_contiguous(d_final),
        dq=dq, dk=dk, dv=dv, dW=dW, df=df, d_initial=d_initial,
        dq_parts=sizes.key_parts(dq), dk_parts=sizes.key_parts(dk),
        dv_parts=sizes.parts(v, V_HEAD_DIM, rows=rows), df_parts=sizes.parts(f, rows=rows),
        dW_parts=f.new_empty(sizes.chains * sizes.row_blocks, *W.shape),
        segments_done=f.new_zeros(
            sizes.chains * sizes.heads * sizes.row_blocks + 1, dtype=torch.int32
        ),
    )  # fmt: skip
    return dq, dk, dv, dW, df, d_initial


def _gradient_outputs(q, k, v, W, f, sizes: Sizes) -> tuple[Tensor, ...]:
    gradients = (x.new_empty(x.shape) for x in (q, k, v, W, f))
    return *gradients, f.new_empty(sizes.state(sizes.chains))


@backward.register_fake
def _(dy, d_final, q, k, v, W, f, bounds, checkpoints, chunk_size, grad_clamp):
    sizes = Sizes(q, k, v, bounds, chunk_size)
    return _gradient_outputs(q, k, v, W, f, sizes)


def _save(ctx, inputs, output) -> None:
    q, k, v, W, f, initial, bounds, *ctx.options, _ = inputs
    checkpoints = output[2]
    ctx.mark_non_differentiable(checkpoints)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, W, f, bounds, checkpoints)
    ctx.has_initial = initial is not None


def _gradients(ctx, dy, d_final, _):
    *gradients, d_initial = backward(dy, d_final, *ctx.saved_tensors, *ctx.options)
    return *gradients, d_initial if ctx.has_initial else None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_save)
