"""A model's gradients over steps in Megatron's data-parallel wrapper on the CPU, with the buffers
zeroed by Megatron and by `training.gpu.zeroing`."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import torch
from gloo_ranks import _without_cuda
from loss_models import SIZES
from main_grad_ranks import MICRO_BATCHES, _train
from ranks import meet, start
from served import anywhere

from megacpp_mcore.kernels import main_grad
from megacpp_mcore.layers import experts
from megacpp_mcore.layers.experts import FusedExperts
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet
from megacpp_mcore.training.gpu import zeroing

STEPS = 3
MODEL = ("model.pattern=AE", "model.depth=4", "mtp.pattern=E", "mtp.mtp_num_layers=1",
         "moe.num_experts=5", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=8",
         "moe.moe_shared_expert_intermediate_size=8", "backends.moe_experts=fused_moe")  # fmt: skip
KINDS = ("megatron", "ours", "ours-overlap", "apart", "idle", "local")
# "apart": the experts' weights have a buffer to themselves, as with expert parallelism.
IDLE = "decoder.layers.1."  # of "idle": its experts do not run


def run(folder: Path) -> None:
    start(_rank, (str(folder),), 1)


def found(folder: Path, kind: str) -> dict:
    """main_grad: after each step, name -> tensor. spared: bytes that are not zeroed. experts: names
    of the fused experts' weights. zeroed: elements of the poison that a reset replaced."""
    return torch.load(folder / f"{kind}.pt")


def _rank(rank: int, folder: str) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    bridges.install()
    _without_cuda()
    meet(rank, 1)
    parallel_state.initialize_model_parallel()
    for surface, name in (("moe_experts", "fused_moe"), ("moe_dispatch", "unmoved")):
        REGISTRY[surface] = anywhere(surface, name)
    for kind in KINDS:
        torch.save(_outcome(kind), Path(folder, f"{kind}.pt"))
    torch.distributed.destroy_process_group()


def _outcome(kind: str) -> dict:
    chunk, args = _built(kind)
    own = chunk.module
    names = {p: n for n, p in own.named_parameters()}
    fused = [m for m in own.modules() if isinstance(m, FusedExperts)]
    if kind == "local":
        chunk.config.cuda_graph_impl = kind
    spared = 0 if kind == "megatron" else zeroing.install([chunk])
    if kind == "idle":
        _do_not_run(own, names)
    left, sums = [], []
    for _ in range(STEPS):
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.grad_data.fill_(float("nan"))  # whatever the last step has left
        chunk.zero_grad_buffer()
        left.append({names[p] for p in names if p.main_grad.isnan().any()})
        _train(chunk, args)
        sums.append({n: p.main_grad.clone() for p, n in names.items()})
    return {
        "main_grad": sums, "spared": spared, "left": left,
        "experts": {names[p] for m in fused for p in m.parameters()},
        "bytes": sum(4 * p.numel() for m in fused for p in m.parameters()),
        "buffers": [len(chunk.buffers), len(chunk.expert_parallel_buffers)],
        "due": [names[p] for p in names if main_grad.is_due(p)],
    }  # fmt: skip


def _built(kind: str) -> tuple:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.training import get_megatron_ddp_config

    from megacpp_mcore.training.gpu.model import MegacppModelBuilder, model_config

    overlap = ["parallel.overlap_grad_reduce=true"] if kind == "ours-overlap" else []
    recipe = load_recipe("nam56r-tiny", [*SIZES, *MODEL, *overlap])
    os.environ.update(recipe.launch.environment)
    args = megatron_args(lower(recipe).argv)
    config = model_config(args, recipe)
    config.transformer.gradient_accumulation_fusion = True
    torch.manual_seed(1)
    with quiet(), _weights_apart() if kind == "apart" else contextlib.nullcontext():
        (chunk,) = MegacppModelBuilder(config).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(), get_megatron_ddp_config(args),
            mixed_precision_wrapper=None,
        )  # fmt: skip
    return chunk, args


def _weights_apart() -> contextlib.AbstractContextManager:
    """Experts that are built inside say of their weights what they say with several ranks."""
    plain = experts._Weights.__init__

    def init(self, *args, **kwargs) -> None:
        plain(self, *args, **kwargs)
        self.weight.allreduce = False

    return mock.patch.object(experts._Weights, "__init__", init)


def _do_not_run(model: torch.nn.Module, names: dict) -> None:
    (layer,) = (m for n, m in model.named_modules() if n == IDLE.removesuffix("."))
    layer.forward = lambda hidden_states, **arguments: (hidden_states, None)


__all__ = ["IDLE", "KINDS", "MICRO_BATCHES", "STEPS", "found", "run"]
