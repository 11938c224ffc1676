"""A small HybridModel trained once: its gradients, and what it keeps for the backward pass."""

import os
import weakref

import pytest
import torch

from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process

_NAMES = ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK")

# Of any pattern, with mixers that a GPU's kernels take.
GPU_SIZES = [
    "model.hidden_size=128", "model.ffn_hidden_size=128", "model.num_attention_heads=4",
    "model.seq_length=128", "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=64",
    "mamba3.mamba_state_dim=64", "mamba3.mamba_num_groups=2", "mamba3.chunk_size=64",
    "m2rnn.k_head_dim=64", "m2rnn.v_head_dim=16", "m2rnn.num_heads=5", "mtp.mtp_num_layers=0",
    "mtp.pattern=", "precision.bf16=true", "moe.moe_grouped_gemm=true", "launch.device=cuda",
    "launch.distributed_backend=nccl", "launch.use_cpu_initialization=false",
    "model.transformer_impl=transformer_engine", "moe.moe_token_dispatcher_type=alltoall",
]  # fmt: skip


class _Saved:
    """A tensor that a graph holds for its backward pass, alive as long as that needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


Kept = tuple[dict[str, torch.Tensor], int]


def train_once(recipe: Recipe, device: str = "cpu", modules: list[str] | None = None) -> Kept:
    """(losses and gradients by name, bytes kept for the backward pass beside the parameters).

    modules: Megatron's --recompute-modules, which a recipe for the CPU may not have.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.delenv(name, raising=False)
        try:
            return _train_once(recipe, device, modules)
        finally:
            for name in _NAMES:  # what Megatron's launch variables were set to
                os.environ.pop(name, None)


def _train_once(recipe: Recipe, device: str, modules: list[str] | None) -> Kept:
    args = megatron_args(lower(recipe).argv)
    if modules:
        args.recompute_granularity, args.recompute_modules = "selective", modules
    with single_process(recipe.schedule.seed, device):
        model = build_model(args, recipe)
        if args.bf16:
            model = model.bfloat16()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = weakref.WeakSet()

        def pack(tensor: torch.Tensor) -> _Saved:
            saved = _Saved(tensor)
            if tensor.untyped_storage().data_ptr() not in own:
                kept.add(saved)
            return saved

        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(256, (2, recipe.model.seq_length + 1), generator=generator)
        tokens = tokens.to(device)
        positions = torch.arange(recipe.model.seq_length, device=device).expand(2, -1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            losses = model(
                input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None,
                labels=tokens[:, 1:].contiguous(), loss_mask=torch.ones_like(positions).float(),
            )  # fmt: skip
        # Counted now: what is discarded to be recomputed has given its storage back since.
        storages = (saved.tensor.untyped_storage() for saved in kept)
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        losses.float().mean().backward()
        found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return {"losses": losses.detach().cpu(), **found}, size
