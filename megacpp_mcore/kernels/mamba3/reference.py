"""Mamba-3 in plain torch: token by token, which is the definition, and in parallel in chunks.

Per head, with S in R^{P x N}, a_t = A_t dt_t <= 0 and lam_t = sigmoid(trap_t):

    theta_t = theta_{t-1} + pi tanh(angle_t) dt_t   (mod 2 pi)
    q_t, k_t = RoPE(q_t + q_bias, theta_t), RoPE(k_t + k_bias, theta_t)
    S_t = exp(a_t) (S_{t-1} + (1 - lam_t) dt_t v_{t-1} k_{t-1}^T) + lam_t dt_t v_t k_t^T
    y_t = (S_t q_t + D v_t) * silu(z_t)

MIMO of rank R: v^r = v * mimo_v[r], z^r = z * mimo_z[r]; the products v^r k^r^T are summed over r,
and y = sum_r y^r * mimo_out[r]. Source: the Mamba-3 paper and state-spaces/mamba's public module.

Both functions compute in float32 (float64 for float64 inputs) throughout, for every input dtype.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_mcore.kernels.mamba3.inputs import Mamba3Inputs, Mamba3State

_TWO_PI = 2 * math.pi


def mamba3_sequential(
    inputs: Mamba3Inputs, initial_state: Mamba3State | None = None
) -> tuple[Tensor, Mamba3State]:
    """The recurrence, one token after another; the reference of all other implementations.

    Returns y (B, S, H, P) and the state after the last token.
    """
    state = inputs.state_in(initial_state)
    outputs = []
    for t in range(inputs.v.shape[1]):
        if inputs.document is not None and t and inputs.document[t] != inputs.document[t - 1]:
            state = inputs.zero_state()
        y, state = advance(inputs, t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1).to(inputs.output_dtype), inputs.state_out(state)


def advance(inputs: Mamba3Inputs, t: int, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
    """Token t of `inputs` on top of `state` (k as (B, R, H, N)): y (B, H, P) and the next state."""
    dt, lam = inputs.dt[:, t], torch.sigmoid(inputs.trap[:, t])
    decay = torch.exp(inputs.adt[:, t])
    rotation = math.pi * torch.tanh(inputs.angles[:, t]) * dt.unsqueeze(-1)
    angle = torch.remainder(state.angle + rotation, _TWO_PI)
    cos, sin = (x.unsqueeze(1) for x in _cos_sin(angle, inputs.angle_dtype))
    q = rotate(per_head(inputs.q[:, t], inputs.q_bias), cos, sin, inputs.is_mimo)
    k = rotate(per_head(inputs.k[:, t], inputs.k_bias), cos, sin, inputs.is_mimo)
    v = inputs.v[:, t]
    value, last_value = _up(v, inputs.mimo_v), _up(state.v, inputs.mimo_v)

    before = torch.einsum("bhrp,brhn->bhpn", last_value, state.k)
    now = torch.einsum("bhrp,brhn->bhpn", value, k)
    ssm = _on_state(decay) * (state.ssm + _on_state((1 - lam) * dt) * before)
    ssm = ssm + _on_state(lam * dt) * now
    y = torch.einsum("bhpn,brhn->bhrp", ssm, q)
    z = None if inputs.z is None else _up(inputs.z[:, t], inputs.mimo_z)
    y = _output(y, value, z, inputs.D, inputs.mimo_out)
    return y, Mamba3State(angle, ssm, k, v)


def mamba3_chunked(
    inputs: Mamba3Inputs, chunk_size: int, initial_state: Mamba3State | None = None
) -> tuple[Tensor, Mamba3State]:
    """The same function with all chunks at once: quadratic inside a chunk, one state a chunk.

    Step t + 1 adds (1 - lam_{t+1}) dt_{t+1} v_t k_t^T before it decays the state, so that term can
    be added at step t instead. What remains is a decayed sum in which key s has the weight
    lam_s dt_s + (1 - lam_{s+1}) dt_{s+1} for every later query, and lam_s dt_s for its own. The
    state that a chunk passes on therefore includes the next step's term.

    chunk_size: any length; the last chunk may be short. Returns y (B, S, H, P) and the state after
    the last token; with documents that state is not valid, as angles accumulate across them.
    """
    batch, seq, heads, head_dim = inputs.v.shape
    state = inputs.state_in(initial_state)
    size = min(chunk_size, seq)
    chunks = -(-seq // size)

    def split(x: Tensor) -> Tensor:
        """(B, S, H, ...) -> (B, H, chunks, size, ...); padded with zeros (dt = 0)."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, chunks * size - seq))
        return x.unflatten(1, (chunks, size)).movedim(3, 1)

    lam, dt = torch.sigmoid(inputs.trap), inputs.dt
    own = lam * dt
    ahead = (1 - lam) * dt
    to_later = own + F.pad(ahead[:, 1:], (0, 0, 0, 1))
    decays = _ChunkDecays(split(inputs.adt), inputs.document)

    angle = angles_of(split(inputs.angles), split(dt), state.angle)
    cos, sin = (x.unsqueeze(4) for x in _cos_sin(angle, inputs.angle_dtype))
    q, k = (
        rotate(split(per_head(x, bias).transpose(2, 3)), cos, sin, inputs.is_mimo)
        for x, bias in ((inputs.q, inputs.q_bias), (inputs.k, inputs.k_bias))
    )  # (B, H, chunks, size, R, N)
    last = (seq - 1) % size
    final_k = k[:, :, -1, last].transpose(1, 2)
    value = _up(inputs.v, inputs.mimo_v)
    q, k, v = (x.flatten(3, 4) for x in (q, k, split(value)))  # (B, H, chunks, size * R, N or P)

    weight = decays.inside * split(to_later).unsqueeze(-2) + torch.diag_embed(split(own))
    y = _weighted(q @ k.mT, weight) @ v
    chunk_state = (v * _rows(decays.to_end * split(to_later), v)).mT @ k

    ssm = state.ssm + _on_state(ahead[:, 0]) * torch.einsum(
        "bhrp,brhn->bhpn", _up(state.v, inputs.mimo_v), state.k
    )
    entering = []
    for chunk in range(chunks):
        entering.append(ssm)
        ssm = _on_state(decays.across[:, :, chunk]) * ssm + chunk_state[:, :, chunk]
    y = y + (q * _rows(decays.from_start, q)) @ torch.stack(entering, dim=2).mT

    y = y.reshape(batch, heads, chunks * size, -1, head_dim)[:, :, :seq].transpose(1, 2)
    z = None if inputs.z is None else _up(inputs.z, inputs.mimo_z)
    y = _output(y, value, z, inputs.D, inputs.mimo_out).to(inputs.output_dtype)
    final = Mamba3State(angle[:, :, -1, last], ssm, final_k, inputs.v[:, -1])
    return y, inputs.state_out(final)


class _ChunkDecays:
    """exp of the sums of a = adt (B, H, chunks, size) over parts of a chunk, zero across documents.

    inside: (..., t, s): from after s to t, for s < t only. from_start: from the chunk's start to t.
    to_end: from after s to the end. across: the whole chunk. Each is the exp of a sum of a's <= 0.
    """

    def __init__(self, adt: Tensor, document: Tensor | None) -> None:
        chunks, size = adt.shape[-2:]
        later = torch.ones(size, size, dtype=torch.bool, device=adt.device).triu(1)
        # (..., s, t). Each part is summed separately: the difference of two sums from the chunk's
        # start would lose a weak decay after a strong one, and overflow where s > t.
        inside = adt.unsqueeze(-2).masked_fill(~later, 0).cumsum(-1)
        from_start = adt.cumsum(-1)
        to_end = inside[..., -1]
        across = from_start[..., -1]
        if document is not None:
            document = F.pad(document, (0, chunks * size - len(document)), value=-1)
            document = document.view(chunks, size)
            before = torch.cat((document[:1, 0], document[:-1, -1]))
            later = later & (document.unsqueeze(-1) == document.unsqueeze(-2))
            from_start = from_start.masked_fill(document != before.unsqueeze(-1), -math.inf)
            to_end = to_end.masked_fill(document != document[:, -1:], -math.inf)
            across = across.masked_fill(document[:, -1] != before, -math.inf)
        self.inside = inside.masked_fill(~later, -math.inf).exp().mT
        self.from_start, self.to_end, self.across = from_start.exp(), to_end.exp(), across.exp()


def angles_of(angles: Tensor, dt: Tensor, start: Tensor) -> Tensor:
    """theta (B, H, chunks, size, A), radians in [0, 2 pi), from `start` (B, H, A) on.

    Chunk totals are summed in float64 and reduced: one float32 sum over S tokens would drift.
    """
    local = (math.pi * torch.tanh(angles) * dt.unsqueeze(-1)).cumsum(3)
    totals = F.pad(local[:, :, :-1, -1].double(), (0, 0, 1, 0))
    offset = torch.remainder(totals.cumsum(2) + start.unsqueeze(2), _TWO_PI).to(local.dtype)
    return torch.remainder(local + offset.unsqueeze(3), _TWO_PI)


def _cos_sin(angle: Tensor, rounded_to: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Of angles rounded to a dtype, if any, which gradients pass unchanged."""
    if rounded_to is not None:
        angle = angle + (angle.detach().to(rounded_to).to(angle.dtype) - angle.detach())
    return torch.cos(angle), torch.sin(angle)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """RoPE of the first A = cos.shape[-1] pairs of x (..., N); other pairs are unchanged.

    A pair is (2i, 2i + 1), or (i, i + N/2) with `halves`: the SISO and the MIMO convention.
    """
    shape = (2, -1) if halves else (-1, 2)
    pair_dim = -2 if halves else -1
    first, second = x.unflatten(-1, shape).unbind(pair_dim)
    rotated = cos.shape[-1]
    a, b = first[..., :rotated], second[..., :rotated]
    first = torch.cat((a * cos - b * sin, first[..., rotated:]), dim=-1)
    second = torch.cat((a * sin + b * cos, second[..., rotated:]), dim=-1)
    return torch.stack((first, second), dim=pair_dim).flatten(-2)


def per_head(x: Tensor, bias: Tensor) -> Tensor:
    """(..., R, G, N) + bias (R, H, N) -> (..., R, H, N): head h reads group h // (H / G)."""
    bias = bias.unflatten(1, (x.shape[-2], -1))
    return (x.unsqueeze(-2) + bias).flatten(-3, -2)


def _up(x: Tensor, projection: Tensor | None) -> Tensor:
    """x (..., H, P) * projection (H, R, P) -> (..., H, R, P); R = 1 without a projection."""
    x = x.unsqueeze(-2)
    return x if projection is None else x * projection


def _output(
    y: Tensor, value: Tensor, z: Tensor | None, D: Tensor | None, mimo_out: Tensor | None
) -> Tensor:
    """Skip, gate and the sum over ranks: y, value, z (..., H, R, P) -> (..., H, P)."""
    if D is not None:
        y = y + D[:, None, None] * value
    if z is not None:
        y = y * F.silu(z)
    return y.squeeze(-2) if mimo_out is None else (y * mimo_out).sum(-2)


def _weighted(scores: Tensor, weight: Tensor) -> Tensor:
    """scores (..., C * R, C * R) times weight (..., C, C), one weight for R x R scores."""
    size = weight.shape[-1]
    if scores.shape[-1] == size:
        return scores * weight
    blocks = scores.unflatten(-1, (size, -1)).unflatten(-3, (size, -1))
    return (blocks * weight[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def _rows(weight: Tensor, x: Tensor) -> Tensor:
    """weight (..., C) as a column for x (..., C * R, ...): one value for R rows."""
    return weight.repeat_interleave(x.shape[-2] // weight.shape[-1], dim=-1).unsqueeze(-1)


def _on_state(x: Tensor) -> Tensor:
    """(B, H) -> (B, H, 1, 1)."""
    return x[..., None, None]
