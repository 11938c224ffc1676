"""A model of one block in bf16 with one backend forced, held against the same model in fp32."""

import functools
import os
import re
from collections.abc import Iterator

import pytest
import torch

from megacpp_mcore.kernels.mamba3.case import WALKS
from megacpp_mcore.layers.mamba3 import Mamba3Mixer
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process

_SIZES = [
    "model.hidden_size=64", "model.ffn_hidden_size=64", "model.num_attention_heads=4",
    "model.seq_length=96", "attention.q_lora_rank=16", "attention.kv_lora_rank=16",
    "attention.qk_head_dim=16", "attention.qk_pos_emb_head_dim=16", "attention.v_head_dim=16",
    "moe.moe_ffn_hidden_size=32", "moe.moe_shared_expert_intermediate_size=32",
    "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=64", "mamba3.mamba_state_dim=64",
    "mamba3.mamba_num_groups=2", "mamba3.chunk_size=64", "m2rnn.k_head_dim=64",
    "m2rnn.v_head_dim=16", "m2rnn.num_heads=2",
    "mtp.mtp_num_layers=0", "mtp.pattern=",
    # Every expert takes every token: a choice that rounding turns over is no error of a kernel.
    "moe.moe_router_topk=4",
]  # fmt: skip
_ON_GPU = [
    "launch.device=cuda", "launch.distributed_backend=nccl", "launch.use_cpu_initialization=false",
    "model.transformer_impl=transformer_engine", "moe.moe_token_dispatcher_type=alltoall",
    "moe.moe_grouped_gemm=true", "moe.moe_router_fusion=true",
]  # fmt: skip
# Surfaces of layers, and backends of variants, that the recipe as it is does not have.
_OTHERS = {
    "rope_qk": ("attention.kind=gqa", "attention.num_query_groups=2"),
    # A bf16 product on a GPU takes experts in multiples of 8; all of them are chosen again.
    "router_gating": ("moe.num_experts=8", "moe.moe_router_topk=8"),
    "mamba_ssm_mimo": ("mamba3.variant=mimo",),
    "triton_mimo": ("mamba3.variant=mimo",),
}
# Triton's interpreter takes milliseconds a program, and RoPE's kernels have one a token: 24 tokens
# a row make them cross many programs; other lengths are the samples' of the surface's case.
_ON_CPU = {surface: ["model.seq_length=24"] for surface in ("mla_rope", "rope_qk")}
_ENVIRONMENT = ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
# Roundings to bf16 from a weight to the loss, and from there to its gradient: some 16 operations in
# the block, another 16 in the embedding, the head and the loss, each way.
_ROUNDINGS = 64
# A rounding turns a vector by up to half an epsilon; n of them, independent, by the root of n times
# that; and the cosine of so small an angle is 1 - angle^2 / 2.
_ROUNDED = torch.finfo(torch.bfloat16).eps / 2
# Parameters whose gradient adds up a rounding of every later token besides: a token's angle and
# step turn the q and k of all of them. As many as `mamba3.case.random_walk_bound` has, squared.
# What in_proj passes back to the norm and the embedding has these rows' gradients in it.
_ADDED_UP = (
    "in_proj.weight[angle]", "in_proj.weight[dt]", "mixer.dt_bias", "layers.0.norm.weight",
    "embedding.word_embeddings.weight",
)  # fmt: skip


def least_cosine(name: str, values: int, turned: int = 0) -> float:
    """Of tensor `name` of so many values: the fewer, the further chance takes their mean square, by
    three standard deviations of it. turned: tokens of a row, in a Mamba-3 block."""
    roundings = _ROUNDINGS + (WALKS**2 * turned if name.endswith(_ADDED_UP) else 0)
    return 1 - roundings * _ROUNDED**2 * (1 + 3 * (2 / values) ** 0.5) / 2


def cosines(surface: str, backend: str, device: str) -> Iterator[tuple[str, float, float]]:
    """(block and name, cosine, the least allowed) of the losses and of every parameter's gradient,
    block by block; of Mamba-3's in_proj in its parts.

    The head, which no letter stands for, has an attention layer before it.
    """
    for block in REGISTRY[surface].blocks or "A":
        others = _OTHERS.get(surface, ()) + _OTHERS.get(backend, ())
        truth = _truth(surface, block, others, device)
        found = values(surface, backend, block, others, device, torch.bfloat16)
        for name, cosine, least in judged(found, truth):
            yield f"{block}: {name}", cosine, least


def judged(
    found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Of every tensor its name, its cosine and the least allowed."""
    assert truth.keys() == found.keys()
    turned = truth["losses"].shape[1] if any("[angle]" in name for name in truth) else 0
    for name, expected in truth.items():
        yield name, _cosine(found[name], expected), least_cosine(name, expected.numel(), turned)


@functools.cache
def _truth(
    surface: str, block: str, others: tuple[str, ...], device: str
) -> dict[str, torch.Tensor]:
    return values(surface, REFERENCE, block, others, device, torch.float32)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return (a @ b / (a.norm() * b.norm())).item()


def values(
    surface: str,
    backend: str,
    block: str,
    others: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    seed: int = 7,
) -> dict[str, torch.Tensor]:
    """Losses and gradients by Megatron's names, each expert's weights and in_proj's parts apart."""
    sizes = [f"model.pattern={block}", "model.depth=1", *_SIZES, *others]
    sizes += _ON_GPU if device == "cuda" else _ON_CPU.get(surface, [])
    recipe = load_recipe("nam56r-tiny", sizes)
    with pytest.MonkeyPatch.context() as patch:
        for name in _ENVIRONMENT:
            patch.delenv(name, raising=False)
        patch.setenv("MEGACPP_BACKENDS", f"{surface}={backend}")
        try:
            return _train_once(recipe, device, dtype, seed)
        finally:
            for name in _ENVIRONMENT:  # what Megatron's launch variables were set to
                os.environ.pop(name, None)


def _train_once(
    recipe: Recipe, device: str, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    args = megatron_args(lower(recipe).argv)
    args.bf16, args.params_dtype = dtype == torch.bfloat16, dtype
    with single_process(1, device):
        model = build_model(args, recipe).to(dtype)
        weights = _by_megatrons_names(dict(model.named_parameters()))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in sorted(weights):
                value = torch.randn(weights[name].shape, generator=generator)
                is_scale = weights[name].dim() == 1
                value = (1 + value / 8) if is_scale else value * value.shape[-1] ** -0.5
                weights[name].copy_(value.bfloat16())
        tokens = torch.randint(256, (2, recipe.model.seq_length + 1), generator=generator)
        tokens = tokens.to(device)
        positions = torch.arange(recipe.model.seq_length, device=device).expand(2, -1)
        losses = model(
            input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None,
            labels=tokens[:, 1:].contiguous(), loss_mask=torch.ones_like(positions).float(),
        )  # fmt: skip
        losses.float().mean().backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients = {n: g.detach().cpu() for n, g in _by_megatrons_names(named).items()}
        return {"losses": losses.detach().cpu(), **_in_parts(model, gradients)}


def _in_parts(
    model: torch.nn.Module, gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The rows of Mamba-3's in_proj by their part; not of the padding, whose gradient is zero."""
    found = dict(gradients)
    for place, module in model.named_modules():
        name = f"{place}.in_proj.weight"
        if not isinstance(module, Mamba3Mixer) or name not in found:
            continue
        rows = found.pop(name)
        parts = rows.split([*module.sections["in_proj.weight"].values(), module.layout.padding])
        names = module.sections["in_proj.weight"]
        found |= {f"{name}[{part}]": x for part, x in zip(names, parts, strict=False)}
    return found


def _by_megatrons_names(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SequentialMLP's names for all: TE numbers its experts' weights, ours are one tensor."""
    found = {}
    for name, tensor in named.items():
        expert = re.fullmatch(r"(.*\.experts)\.(linear_fc[12]\.weight)(\d*)", name)
        if expert is None:
            found[name] = tensor
        elif expert[3]:
            found[f"{expert[1]}.local_experts.{expert[3]}.{expert[2]}"] = tensor
        else:
            for i, part in enumerate(tensor):
                found[f"{expert[1]}.local_experts.{i}.{expert[2]}"] = part
    return found
