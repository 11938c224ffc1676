"""NAM56R in plain torch: reads an exported folder and computes logits.

`megacpp export` copies this file into the folder of the weights. It needs torch and nothing else:

    model = load("FOLDER")                      # float32 on the CPU
    logits, states = model(tokens)              # tokens (batch, seq) -> (batch, seq, vocabulary)
    logits, states = model(next_tokens, states) # goes on from there

It computes the definitions; a recurrence takes one token after another. The logits are those of the
exported model to float32 rounding. Weights of MTP (`mtp.*`) are not used here.
"""

import json
import math
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of M, R and the router: never in 16 bits.
FLOAT32 = ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "W", "A_log")


def load(folder, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "NAM56R":
    """The model of an exported folder. Raises ValueError when a weight is missing or unknown."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if config.get("format") != "megacpp-nam56r-1":
        raise ValueError(f"{folder} has format {config.get('format')!r}, not megacpp-nam56r-1")
    with torch.device("meta"):
        model = NAM56R(config)
    weights = read_safetensors(Path(folder) / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} is not of its config: {error}") from error
    for name, parameter in model.named_parameters():
        narrow = name.rpartition(".")[2] not in FLOAT32 and not name.endswith("router.bias")
        kept = dtype if narrow else torch.promote_types(dtype, torch.float32)
        parameter.data = parameter.data.to(device, kept)
    return model.eval().requires_grad_(False)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file: 8 bytes of length, a JSON header of that length, the tensors' bytes."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)[8 + length :]
    return {
        name: data[slice(*entry["data_offsets"])].clone().view(DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
    }  # fmt: skip


class Weights(nn.Module):
    """Parameters by name, of the given shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class NAM56R(nn.Module):
    """config: the folder's config.json. States are a list with an entry a layer."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config
        sizes = config["padded_vocab_size"], config["hidden_size"]
        self.embedding = nn.Embedding(*sizes)
        self.layers = nn.ModuleList(Layer(kind, config) for kind in config["layers"])
        self.final_norm = norm(config)
        if not config["tied"]:
            self.lm_head = nn.Linear(sizes[1], sizes[0], bias=False)

    def forward(self, tokens: Tensor, states: list | None = None) -> tuple[Tensor, list]:
        """tokens (b, s) -> logits (b, s, padded vocabulary) and the states behind the last token.
        Ids from config["vocab_size"] on pad the embedding and mean nothing."""
        states = states or [None] * (len(self.layers) + 1)
        position = states[-1] or 0
        x = self.embedding(tokens)
        states = [*states[:-1], position + tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x, states[number] = layer(x, states[number], position)
        weight = self.embedding.weight if self.config["tied"] else self.lm_head.weight
        return F.linear(self.final_norm(x), weight), states


class Layer(nn.Module):
    """x + block(norm(x))."""

    def __init__(self, kind: str, config: dict) -> None:
        super().__init__()
        self.kind, self.norm = kind, norm(config)
        self.add_module(kind, BLOCKS[kind](config))

    def forward(self, x: Tensor, state, position: int):
        y, after = self.get_submodule(self.kind)(self.norm(x), state, position)
        return x + y, after


def norm(config: dict, size: int | None = None) -> nn.Module:
    return nn.RMSNorm(size or config["hidden_size"], eps=config["norm_eps"])


def linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention; the last query stands at the last key. q (b, s, h, d), k, v (b, t, g, d)
    with h % g == 0 -> (b, s, h * dv). Scores and softmax in float32."""
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * scale
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2)


def rope(x: Tensor, rotary: dict, position: int, neighbours: bool) -> Tensor:
    """Rotate the first pairs of x (b, s, h, d): (2i, 2i + 1), which end up half of them apart, or
    (i, i + n)."""
    frequencies = torch.tensor(rotary["frequencies"], dtype=torch.float32, device=x.device)
    places = torch.arange(position, position + x.shape[1], device=x.device)
    angles = (places.float()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos() * rotary["scale"], angles.sin() * rotary["scale"]
    rotated, rest = wide(x[..., : 2 * len(frequencies)]), x[..., 2 * len(frequencies) :]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if neighbours else rotated.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


class LatentAttention(nn.Module):
    """Multi-latent attention (DeepSeek-V2, 2.1). State: latents and rotated keys so far."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.c = c = config["attention"]
        hidden, heads = config["hidden_size"], c["heads"]
        q = heads * (c["qk_head_dim"] + c["qk_pos_emb_head_dim"])
        if c["q_lora_rank"] is None:
            self.q = linear(hidden, q)
        else:
            self.q_down, self.q_up = linear(hidden, c["q_lora_rank"]), linear(c["q_lora_rank"], q)
        self.kv_down = linear(hidden, c["kv_lora_rank"] + c["qk_pos_emb_head_dim"])
        self.kv_up = linear(c["kv_lora_rank"], heads * (c["qk_head_dim"] + c["v_head_dim"]))
        if c["norms"]:
            self.kv_norm = norm(config, c["kv_lora_rank"])
            if c["q_lora_rank"] is not None:
                self.q_norm = norm(config, c["q_lora_rank"])
        self.out = linear(heads * c["v_head_dim"], hidden)

    def forward(self, x: Tensor, state, position: int):
        c, heads, rotary = self.c, self.c["heads"], self.c["qk_pos_emb_head_dim"]
        if c["q_lora_rank"] is None:
            q = self.q(x)
        else:
            q = self.q_down(x)
            q = self.q_up(self.q_norm(q) if c["norms"] else q)
        q, q_rotary = q.unflatten(-1, (heads, -1)).split((c["qk_head_dim"], rotary), dim=-1)
        latent, k_rotary = self.kv_down(x).split((c["kv_lora_rank"], rotary), dim=-1)
        latent = self.kv_norm(latent) if c["norms"] else latent
        q = torch.cat((q, rope(q_rotary, c["rope"], position, neighbours=True)), dim=-1)
        k_rotary = rope(k_rotary.unsqueeze(2), c["rope"], position, neighbours=True)
        if state is not None:
            latent, k_rotary = torch.cat((state[0], latent), 1), torch.cat((state[1], k_rotary), 1)
        kv = self.kv_up(latent).unflatten(-1, (heads, -1))
        k_nope, v = kv.split((c["qk_head_dim"], c["v_head_dim"]), dim=-1)
        k = torch.cat((k_nope, k_rotary.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return self.out(attend(q, k, v, c["softmax_scale"]).to(x.dtype)), (latent, k_rotary)


class GroupedAttention(nn.Module):
    """Grouped-query attention. State: keys and values so far."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.c = c = config["attention"]
        hidden, dim = config["hidden_size"], c["head_dim"]
        self.q = linear(hidden, c["heads"] * dim)
        self.k, self.v = linear(hidden, c["groups"] * dim), linear(hidden, c["groups"] * dim)
        if c["norms"]:
            self.q_norm, self.k_norm = norm(config, dim), norm(config, dim)
        self.out = linear(c["heads"] * dim, hidden)

    def forward(self, x: Tensor, state, position: int):
        c = self.c
        q, k, v = (part(x).unflatten(-1, (-1, c["head_dim"])) for part in (self.q, self.k, self.v))
        if c["norms"]:
            q, k = self.q_norm(q), self.k_norm(k)
        if c["rope"] is not None:
            q, k = (rope(part, c["rope"], position, neighbours=False) for part in (q, k))
        if state is not None:
            k, v = torch.cat((state[0], k), 1), torch.cat((state[1], v), 1)
        return self.out(attend(q, k, v, c["softmax_scale"]).to(x.dtype)), (k, v)


def activation(name: str, x: Tensor) -> Tensor:
    if name == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.relu(x).square()


class MLP(nn.Module):
    """up, or gate and up in one product, then down."""

    def __init__(self, config: dict, size: int | None = None) -> None:
        super().__init__()
        self.kind = config["activation"]
        size = size or config["ffn_hidden_size"]
        self.up = linear(config["hidden_size"], size * (2 if self.kind == "swiglu" else 1))
        self.down = linear(size, config["hidden_size"])

    def forward(self, x: Tensor, state=None, position: int = 0):
        return self.down(activation(self.kind, self.up(x))), None


class MoE(nn.Module):
    """top_k experts a token, and a shared one. The router's bias chooses, and does not weigh."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.c, self.kind = (c := config["moe"]), config["activation"]
        hidden, size, count = config["hidden_size"], c["ffn_hidden_size"], c["experts"]
        rows = size * (2 if self.kind == "swiglu" else 1)
        bias = {"bias": (count,)} if c["bias"] else {}
        self.router = Weights(weight=(count, hidden), **bias)
        self.experts = Weights(up=(count, rows, hidden), down=(count, hidden, size))
        if c["shared_size"]:
            self.shared = MLP(config, c["shared_size"])
        if c["shared_gate"]:
            self.shared_gate = linear(hidden, 1)

    def forward(self, x: Tensor, state=None, position: int = 0):
        c, flat = self.c, x.flatten(0, 1)
        chosen, weights = self.route(flat)
        y = torch.zeros_like(flat)
        for expert in range(c["experts"]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            inner = activation(self.kind, F.linear(flat[token], self.experts.up[expert]))
            out = F.linear(inner * weights[token, slot, None].to(x.dtype),
                           self.experts.down[expert])  # fmt: skip
            y.index_add_(0, token, out)
        y = y.view_as(x)
        if c["shared_size"]:
            shared, _ = self.shared(x)
            y = y + (shared * self.shared_gate(x).sigmoid() if c["shared_gate"] else shared)
        return y, None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (t, hidden) -> experts (t, top_k) and their weights."""
        c, dtype = self.c, torch.float64 if self.c["router_dtype"] == "fp64" else torch.float32
        logits = F.linear(x.to(dtype), self.router.weight.to(dtype))
        if c["score"] == "softmax":
            scores = logits.softmax(-1) if c["pre_softmax"] else logits
            weights, chosen = scores.topk(c["top_k"])
            weights = weights if c["pre_softmax"] else weights.softmax(-1)
        else:
            scores = logits.sigmoid() if c["score"] == "sigmoid" else F.softplus(logits).sqrt()
            chosen = (scores + self.router.bias if c["bias"] else scores).topk(c["top_k"])[1]
            weights = scores.gather(1, chosen)
            if c["top_k"] > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * (c["scaling"] or 1.0)


class Mamba3(Weights):
    """Mamba-3. State: angles, the matrix, the last key and the last value.
        theta_t = theta_{t-1} + pi tanh(angle_t) dt_t
        S_t = exp(A_t dt_t) (S_{t-1} + (1 - lam_t) dt_t v_{t-1} k_{t-1}^T) + lam_t dt_t v_t k_t^T
        y_t = (S_t q_t + D v_t) silu(z_t)
    q, k: C, B after norm, bias and a rotation by theta. in_proj's rows: z, x, B, C, dt, A, trap,
    angle. Rank R (mimo): v^r = v mimo_x[r], z^r = z mimo_z[r], and y is summed with mimo_o[r]."""

    def __init__(self, config: dict) -> None:
        c = config["mamba3"]
        heads, n, inner = c["heads"], c["state_dim"], c["heads"] * c["head_dim"]
        ranks = (c["rank"],) if c["mimo"] else ()
        mimo = dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), (heads, *ranks, c["head_dim"]))
        biases = dict.fromkeys(("B_bias", "C_bias"), (heads, *ranks, n))
        super().__init__(dt_bias=(heads,), D=(heads,), **biases, **(mimo if c["mimo"] else {}))
        group_rows = c["groups"] * c["rank"] * n
        self.c, self.rows = c, (inner, inner, *[group_rows] * 2, *[heads] * 3, c["angles"])
        self.in_proj = linear(config["hidden_size"], sum(self.rows))
        self.B_norm, self.C_norm = (nn.RMSNorm(n, eps=1e-5) for _ in range(2))
        self.out_proj = linear(inner, config["hidden_size"])

    def forward(self, x: Tensor, state, position: int):
        c = self.c
        z, v, B, C, dt, A, trap, angle = map(wide, self.in_proj(x).split(self.rows, dim=-1))
        z, v = (part.unflatten(-1, (c["heads"], 1, -1)) for part in (z, v))  # (b, s, h, 1, P)
        if c["mimo"]:
            v, z = v * self.mimo_x, z * self.mimo_z
        dt = F.softplus(dt + self.dt_bias)
        if c["decay"] == "softplus":
            A = -F.softplus(A).clamp(min=c["decay_floor"])
        else:
            A = -(A.clamp(min=0) + 1 / (1 - A.clamp(max=0))).clamp(min=c["decay_floor"])
        keys = [self.heads(B, self.B_norm, self.B_bias), self.heads(C, self.C_norm, self.C_bias)]
        turn = (math.pi * angle.tanh()).unsqueeze(2) * dt.unsqueeze(-1)  # (b, s, h, pairs)
        if state is None:
            S = v.new_zeros(x.shape[0], c["heads"], c["head_dim"], c["state_dim"])
            first = (torch.zeros_like(part[:, 0]) for part in (turn, keys[0], v))
            state = next(first), S, *first
        theta, S, k_last, v_last = state
        outputs = []
        for t in range(x.shape[1]):
            theta = (theta + turn[:, t]) % (2 * math.pi)
            k, q = (self.rotate(part[:, t], theta) for part in keys)
            before = torch.einsum("bhrp,bhrn->bhpn", v_last, k_last)
            now = torch.einsum("bhrp,bhrn->bhpn", v[:, t], k)
            step, own = dt[:, t], trap[:, t].sigmoid()
            S = S + ((1 - own) * step)[..., None, None] * before
            S = (A[:, t] * step).exp()[..., None, None] * S + (own * step)[..., None, None] * now
            outputs.append(torch.einsum("bhpn,bhrn->bhrp", S, q))
            k_last, v_last = k, v[:, t]
        y = (torch.stack(outputs, 1) + self.D[:, None, None] * v) * F.silu(z)
        y = (y * self.mimo_o).sum(3) if c["mimo"] else y.squeeze(3)
        return self.out_proj(y.flatten(2).to(x.dtype)), (theta, S, k_last, v_last)

    def heads(self, x: Tensor, norm: nn.Module, bias: Tensor) -> Tensor:
        """(b, s, groups * R * N) -> (b, s, heads, R, N): normalised, for each head, biased."""
        c = self.c
        x = x.unflatten(-1, (c["groups"], c["rank"], c["state_dim"]))
        x = F.rms_norm(x, (c["state_dim"],), wide(norm.weight), norm.eps)
        x = x.repeat_interleave(c["heads"] // c["groups"], dim=2)
        return x + (bias if c["mimo"] else bias.unsqueeze(1))

    def rotate(self, x: Tensor, theta: Tensor) -> Tensor:
        """The pairs of x (b, h, R, N) by theta (b, h, n): (2i, 2i + 1), in MIMO (i, i + N/2)."""
        cos, sin = theta.cos().unsqueeze(2), theta.sin().unsqueeze(2)
        n, mimo = theta.shape[-1], self.c["mimo"]
        a, b = x.chunk(2, dim=-1) if mimo else (x[..., 0::2], x[..., 1::2])
        new_a = torch.cat((a[..., :n] * cos - b[..., :n] * sin, a[..., n:]), -1)
        new_b = torch.cat((a[..., :n] * sin + b[..., :n] * cos, b[..., n:]), -1)
        rotated = new_a, new_b
        return torch.cat(rotated, -1) if mimo else torch.stack(rotated, -1).flatten(-2)


class M2RNN(Weights):
    """M2RNN. State: the convolution's last inputs, and the matrix h (b, heads, K, V).
        q, k, v = silu(convolution(q, k, v)); q and k are shared by all heads
        f_t = exp(-exp(A_log) softplus(f + dt_bias))
        h_t = f_t h_{t-1} + (1 - f_t) tanh(h_{t-1} W + k_t v_t^T)
        y_t = q_t^T h_t;   out = RMSNorm((y + D v) silu(gate))
    in_proj's rows: q, k, v, gate, f."""

    def __init__(self, config: dict) -> None:
        c = config["m2rnn"]
        heads, v_dim, values = c["heads"], c["v_dim"], c["heads"] * c["v_dim"]
        super().__init__(W=(heads, v_dim, v_dim), A_log=(heads,), dt_bias=(heads,), D=(values,))
        self.c, self.rows = c, (2 * c["k_dim"] + values, values, heads)
        self.in_proj = linear(config["hidden_size"], sum(self.rows))
        self.conv = Weights(weight=(self.rows[0], 1, c["kernel"]), bias=(self.rows[0],))
        self.norm = nn.RMSNorm(values, eps=config["norm_eps"])
        self.out_proj = linear(values, config["hidden_size"])

    def forward(self, x: Tensor, state, position: int):
        c = self.c
        qkv, gate, f = self.in_proj(x).split(self.rows, dim=-1)
        before = c["kernel"] - 1
        tail = qkv.new_zeros(x.shape[0], before, qkv.shape[-1]) if state is None else state[0]
        inputs = torch.cat((tail, qkv), 1)
        mixed = F.conv1d(wide(inputs).mT, wide(self.conv.weight), wide(self.conv.bias),
                         groups=inputs.shape[-1]).mT  # fmt: skip
        q, k, v = wide(F.silu(mixed).to(x.dtype)).split(
            (c["k_dim"], c["k_dim"], c["heads"] * c["v_dim"]), dim=-1
        )
        v = v.unflatten(-1, (c["heads"], -1))
        f = torch.exp(-self.A_log.exp() * F.softplus(wide(f) + self.dt_bias))
        h = state[1] if state is not None else v.new_zeros(
            x.shape[0], c["heads"], c["k_dim"], c["v_dim"])  # fmt: skip
        outputs = []
        for t in range(x.shape[1]):
            new = torch.tanh(h @ self.W + k[:, t, None, :, None] * v[:, t, :, None, :])
            keep = f[:, t, :, None, None]
            h = keep * h + (1 - keep) * new
            outputs.append((q[:, t, None, :, None] * h).sum(-2))
        y = (torch.stack(outputs, 1).flatten(2) + self.D * v.flatten(2)) * F.silu(wide(gate))
        y = F.rms_norm(y, y.shape[-1:], wide(self.norm.weight), self.norm.eps).to(x.dtype)
        return self.out_proj(y), (inputs[:, inputs.shape[1] - before :], h)


BLOCKS = {"attention": LatentAttention, "gqa": GroupedAttention, "moe": MoE, "mlp": MLP,
          "mamba3": Mamba3, "m2rnn": M2RNN}  # fmt: skip
