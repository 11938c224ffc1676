"""The receipt of a run on GPUs: which rank keeps it, and what is in it before the first step."""

from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.training import get_args

from megacpp_mcore import receipts
from megacpp_mcore.hybrid import flops
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.receipts.run import RunReceipt, Work
from megacpp_mcore.surfaces import embedding, linear, linear_cross_entropy
from megacpp_mcore.surfaces.support import TE
from megacpp_mcore.training.gpu.rank_setup import Launch


def keeps_the_receipt() -> bool:
    """Whether this rank does: the first of those that have the loss, rank 0 without pipelines."""
    return (
        mpu.is_pipeline_last_stage(ignore_virtual=True)
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def new_receipt(
    path: Path, launch: Launch, goodput: Goodput, backends: list[dict[str, Any]]
) -> RunReceipt:
    """The receipt of a run whose model is built and loaded, resumed from the one at `path` where
    the run is. backends: of all ranks. The folder is created."""
    args, recipe = get_args(), launch.recipe
    lane_here = lane()
    cost = flops.training_flops(recipe, mamba2=launch.yardstick)
    receipt = RunReceipt(
        path,
        recipe=receipts.recipe_entry(launch.name, recipe.to_dict()),
        topology={
            "world_size": args.world_size,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "ep": args.expert_model_parallel_size,
            "cp": args.context_parallel_size,
            "dp": args.data_parallel_size,
        },
        plan=receipts.plan_entry(recipe.plan),
        backends=backends,
        environment=launch.environment,
        lane=lane_here,
        goodput=goodput,
        work=_work(cost, lane_here["device"]["name"]),
    )
    if args.iteration and path.exists():
        tokens = args.iteration * args.global_batch_size * args.seq_length
        receipt.resume(receipts.read(path), args.iteration, tokens)
    if args.dataloader_inter_document_masking:
        receipt.note("FLOPs leave out the core of attention: its pairs depend on the documents")
    fused = args.gradient_accumulation_fusion
    if note := who_adds_weight_gradients(fused, backends, launch.yardstick):
        receipt.note(note)
    if args.world_size > 1:
        receipt.note(f"peak memory, parameters and times are those of rank {args.rank}")
    if launch.yardstick:
        receipt.note(
            "the yardstick: Megatron's own model and blocks, Mamba-2 in the M slot, its "
            "attention's core on the backend above"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return receipt


# (surface, observed) -> what adds its weights' gradients to the main gradient: where the recipe has
# gradient_accumulation_fusion, and of itself.
_WITH_THE_KEY = {
    (linear.SURFACE.name, TE): "Transformer Engine's modules",
    ("moe_products", "hopper"): "the experts",
}
_ALWAYS = {
    (linear_cross_entropy.SURFACE.name, linear_cross_entropy.CHUNKED): "the head",
    (embedding.SURFACE.name, embedding.TRITON): "the embedding",
}


def who_adds_weight_gradients(
    fused: bool, backends: list[dict[str, Any]], yardstick: bool
) -> str | None:
    """A note on the gradients that no further pass adds to the main gradient; None without any.

    fused: precision.gradient_accumulation_fusion. The yardstick's linears are chosen by nobody.
    """
    served = {(entry["surface"], entry["observed"]) for entry in backends}
    if yardstick:
        served.add((linear.SURFACE.name, TE))
    adding = (_WITH_THE_KEY if fused else {}) | _ALWAYS
    names = [name for backend, name in adding.items() if backend in served]
    if not names:
        return None
    listed = " and of ".join(filter(None, (", of ".join(names[:-1]), names[-1])))
    return (
        f"weight gradients of {listed} are added to the main gradient where they are computed; all "
        "others after their products"
    )


def _work(flops_per_token: float, device: str) -> Work:
    peak = flops.PEAKS.get(device)
    return Work(flops_per_token, peak, flops.FORMULA, peak and f"{device}, dense bf16, data sheet")
