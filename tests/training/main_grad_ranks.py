"""What a model's backward passes leave in main_grad, in Megatron's own data-parallel wrapper on the
CPU: with our embedding and head, which add to it themselves, and with those of plain torch."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from gloo_ranks import _without_cuda
from loss_models import SIZES
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import meet, start
from served import anywhere

from megacpp_mcore.kernels import adam, main_grad
from megacpp_mcore.kernels.embedding import triton as embedding
from megacpp_mcore.kernels.linear_cross_entropy import chunk_loop
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet
from megacpp_mcore.training.cpu.step import forward_step

BATCH, SEQ, MICRO_BATCHES = 2, 12, 2
OURS = {"embedding": "triton", "linear_cross_entropy": "chunked"}
PLAIN = {"embedding": "reference", "linear_cross_entropy": "reference"}


@dataclass(frozen=True)
class Model:
    """overrides: of `loss_models.SIZES`. stages: of the pipeline, each a rank."""

    overrides: tuple[str, ...] = ()
    bf16: bool = False
    stages: int = 1


TWO_STAGES = (
    "parallel.pipeline_model_parallel_size=2", "model.pattern=A|A", "model.depth=2",
    "mtp.mtp_num_layers=1", "launch.nproc_per_node=2",
)  # fmt: skip
TIED = "model.untie_embeddings_and_output_weights=false"
MODELS = {
    "one-use": Model(("mtp.mtp_num_layers=0", "mtp.pattern=")),
    "mtp": Model(("mtp.mtp_num_layers=2",)),
    "overlap": Model(("mtp.mtp_num_layers=2", "parallel.overlap_grad_reduce=true")),
    "tied": Model(("mtp.mtp_num_layers=1", TIED)),
    "dropout": Model(("mtp.mtp_num_layers=1", "model.hidden_dropout=0.25")),
    "bf16": Model(("mtp.mtp_num_layers=1",), bf16=True),
    "bf16-overlap": Model(("mtp.mtp_num_layers=1", "parallel.overlap_grad_reduce=true"), bf16=True),
    # MTP's stage has a copy of the embedding, and the gradients of both are added up at the end.
    "stages": Model(TWO_STAGES, stages=2),
    "stages-tied": Model((*TWO_STAGES, TIED), stages=2),
}


def run(folder: Path) -> None:
    """Every model with both kinds of backends; `found` reads what came out."""
    for stages in (1, 2):
        start(_rank, (str(folder), stages), stages)


def found(folder: Path, model: str, kind: str, stage: int = 0) -> dict:
    """Of a stage. main_grad: by parameter's name. handed: of each use in a backward pass, the
    parameter's name and whether autograd got a gradient. zeroed: the weights marked with
    zero_out_wgrad. names: of the state dict. weights: as they were initialised. left: parameters
    with a grad that nobody took."""
    return torch.load(folder / f"{model}-{kind}-{stage}.pt")


def _rank(rank: int, folder: str, stages: int) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    bridges.install()
    _without_cuda()
    adam._CHUNK = adam._BLOCK = 4096
    embedding._TOKENS, embedding._COLUMNS, embedding._PART_COLUMNS = 4, 16, 16
    chunk_loop.chunk_length = lambda tokens, classes: 10
    meet(rank, stages)
    parallel_state.initialize_model_parallel(1, stages)
    for surface, name in OURS.items():  # they run on the CPU, in Triton's interpreter
        REGISTRY[surface] = anywhere(surface, name)
    for name, model in MODELS.items():
        for kind, backends in (("ours", OURS), ("plain", PLAIN)):
            if model.stages == stages:
                path = Path(folder, f"{name}-{kind}-{rank}.pt")
                torch.save(_outcome(model, backends), path)
    torch.distributed.destroy_process_group()


def _outcome(model: Model, backends: dict[str, str]) -> dict:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.training import get_megatron_ddp_config

    from megacpp_mcore.training.gpu.model import MegacppModelBuilder, model_config

    named = [f"backends.{surface}={name}" for surface, name in backends.items()]
    recipe = load_recipe("nam56r-tiny", [*SIZES, *model.overrides, *named])
    os.environ.update(recipe.launch.environment)
    args = megatron_args(lower(recipe).argv)
    if model.bf16:  # no recipe for the CPU can have it
        args.bf16, args.params_dtype = True, torch.bfloat16
        args.accumulate_allreduce_grads_in_fp32 = True
    torch.manual_seed(1)
    with quiet():
        builder = MegacppModelBuilder(model_config(args, recipe))
        (chunk,) = builder.build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(), get_megatron_ddp_config(args),
            mixed_precision_wrapper=Float16Module if model.bf16 else None,
        )  # fmt: skip
    own = chunk.module.module if model.bf16 else chunk.module
    handed, weights = [], {n: p.detach().clone() for n, p in own.named_parameters()}
    _note_what_is_handed_on(handed, {p: n for n, p in own.named_parameters()})
    chunk.zero_grad_buffer()
    _train(chunk, args)
    return {
        "main_grad": {n: p.main_grad.clone() for n, p in own.named_parameters()},
        "handed": handed,
        "zeroed": [n for n, p in own.named_parameters() if getattr(p, "zero_out_wgrad", False)],
        "names": sorted(own.state_dict()), "weights": weights,
        "left": [n for n, p in own.named_parameters() if p.grad is not None],
    }  # fmt: skip


def _note_what_is_handed_on(handed: list, names: dict) -> None:
    from megacpp_mcore.kernels.linear_cross_entropy import chunked

    def noting(weight):
        given = main_grad.handed_on(weight)
        handed.append((names[weight], given is not None))
        return None if given is None else given.fill_(given.sum() * 0 + 7 * (not _zeroed(weight)))

    embedding.handed_on = chunked.handed_on = noting


def _zeroed(weight: torch.Tensor) -> bool:
    return getattr(weight, "zero_out_wgrad", False)


def _train(chunk: torch.nn.Module, args) -> None:
    """One global batch, without an optimizer's step."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(8, (MICRO_BATCHES, BATCH, SEQ + 1), generator=generator)
    batches = [
        {"tokens": t[:, :-1], "labels": t[:, 1:].contiguous(), "loss_mask": torch.ones(BATCH, SEQ),
         "position_ids": torch.arange(SEQ).expand(BATCH, -1)} for t in tokens
    ]  # fmt: skip
    chunk.config.grad_scale_func = lambda total: total * 3.0
    finalize = chunk.config.finalize_model_grads_func or finalize_model_grads
    chunk.config.finalize_model_grads_func = finalize
    chunk.config.no_sync_func = chunk.no_sync if args.overlap_grad_reduce else None
    torch.manual_seed(9)  # of the dropout
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=chunk,
        num_microbatches=MICRO_BATCHES, seq_length=SEQ, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
