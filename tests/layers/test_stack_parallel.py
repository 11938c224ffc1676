"""The whole HybridModel over two gloo processes, against one process with the same weights.

Each layout loads the checkpoint that one process wrote, and runs Megatron's own schedule and
gradient reduction. Its gradients then go back through Megatron's distributed checkpointing, so that
all of them are compared with one process's, whatever part of each a rank holds.

The router's losses are large here, so that their gradients count in every router's.
"""

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

MICRO_BATCHES, SEQ, HIDDEN = 4, 32, 32
ONE = [
    "model.pattern=AEMREA", "model.depth=6", f"model.hidden_size={HIDDEN}",
    "model.ffn_hidden_size=64", "model.num_attention_heads=4", f"model.seq_length={SEQ}",
    "model.make_vocab_size_divisible_by=160",  # times TP, to 320: padding has a part in every loss
    "attention.q_lora_rank=8", "attention.kv_lora_rank=8", "attention.qk_head_dim=8",
    "attention.qk_pos_emb_head_dim=8", "attention.v_head_dim=8", "attention.qk_layernorm=true",
    "moe.moe_ffn_hidden_size=32", "moe.moe_shared_expert_intermediate_size=32",
    "moe.moe_aux_loss_coeff=[0.5]", "moe.moe_z_loss_coeff=0.1",
    "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=8",
    "mamba3.mamba_num_groups=2", "mamba3.chunk_size=16", "m2rnn.k_head_dim=8",
    "m2rnn.v_head_dim=8", "m2rnn.num_heads=2", "data.data_path=null", "data.mock_data=true",
    "schedule.micro_batch_size=1", f"schedule.global_batch_size={MICRO_BATCHES}",
    "launch.nproc_per_node=2", "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=1",
]  # fmt: skip
_TP = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
_EP = ["parallel.expert_model_parallel_size=2"]
_PP = ["parallel.pipeline_model_parallel_size=2"]
# Collectives in what the backward pass makes again.
_AGAIN = ["recompute.mamba3=mixer", "recompute.m2rnn=mixer", "recompute.moe=experts"]
LAYOUTS = {
    "tp2": _TP,
    "tp2-duplicated": _TP,  # MLA's down projections as Transformer Engine has them
    "tp2-ep2": [*_TP, *_EP, "parallel.expert_tensor_parallel_size=1"],
    "tp2-again": [*_TP, *_AGAIN],
    "ep2": _EP,
    "pp2": [*_PP, "model.pattern=AEM|REA"],
    "pp2-vpp2": [*_PP, "model.pattern=AE|MR|E|A"],
}
# Experts over tensor-parallel ranks train with sequence parallelism only.
NO_EXPERTS = ["model.pattern=AMRA", "model.depth=4", "mtp.pattern=A"]
LAYOUTS_WITHOUT_EXPERTS = {"tp2-whole": _TP[:1], "tp2-whole-duplicated": _TP[:1], "tp2-dense": _TP}


def micro_batches():
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(256, (MICRO_BATCHES, 1, SEQ + 1), generator=generator)
    mask = (torch.rand(MICRO_BATCHES, 1, SEQ, generator=generator) > 0.2).float()
    return [
        {
            "tokens": row[:, :-1],
            "labels": row[:, 1:].contiguous(),
            "loss_mask": weights,
            "position_ids": torch.arange(SEQ).expand(1, -1),
        }
        for row, weights in zip(tokens, mask, strict=True)
    ]


def model_of(overrides):
    """The chunks of this rank, each in the wrapper that Megatron's schedules and reductions take;
    in Megatron's groups for the layout."""
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.recipe.lowering import lower
    from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet
    from megacpp_mcore.training.gpu.model import MegacppModelBuilder, model_config

    num_microbatches_calculator.destroy_num_microbatches_calculator()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    recipe = load_recipe("nam56r-tiny", [*ONE, *overrides])
    os.environ.update(recipe.launch.environment)
    args = megatron_args(lower(recipe).argv)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    virtual = args.virtual_pipeline_model_parallel_size or 1
    stage, stages = groups.pp.rank(), groups.pp.size()
    with quiet():
        builder = MegacppModelBuilder(model_config(args, recipe))
        chunks = [
            builder.build_model(
                groups,
                pre_process=index == stage == 0,
                post_process=index == virtual - 1 and stage == stages - 1,
                vp_stage=index if virtual > 1 else None,
            )
            for index in range(virtual)
        ]
    return [wrapper()(chunk, groups) for chunk in chunks]


@contextlib.contextmanager
def duplicated_down_projections():
    """MLA's down projections as Transformer Engine's linears in their mode "duplicated", of which
    there are none here: every rank has the whole weight, and projects the tokens that it has."""
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from megacpp_mcore.layers import parts

    class Duplicated(torch.nn.Linear):
        def __init__(self, columns, rows, *, config, parallel_mode, tp_group, **unused) -> None:
            assert parallel_mode == "duplicated" and tp_group is None
            super().__init__(columns, rows, bias=False)
            self.weight.sequence_parallel = config.sequence_parallel

        def forward(self, x):
            return super().forward(x), None

        def get_extra_state(self) -> None: ...
        def set_extra_state(self, state) -> None: ...

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(keep_vars=True), prefix, {}, sharded_offsets,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )  # fmt: skip

    linears = replace(parts.megatron_linears(), duplicated=Duplicated)
    with (
        mock.patch.object(parts, "megatron_linears", lambda: linears),
        mock.patch.object(multi_latent_attention, "TELinear", Duplicated),
    ):
        yield


def wrapper():
    from megacpp_mcore.training.cpu.step import NoGradientSync

    class Averaged(NoGradientSync):
        """Mean gradients over the data-parallel ranks, as Megatron's DDP makes them."""

        def __init__(self, model, groups) -> None:
            super().__init__(model)
            self.groups = groups
            self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
            self.reduces = True

        def finish_grad_sync(self, force_all_reduce=False) -> None:
            ranks = self.groups.dp_cp.size()
            for parameter in self.parameters() if self.reduces else ():
                expert = not getattr(parameter, "allreduce", True)
                group = self.groups.expt_dp if expert else self.groups.dp_cp
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= ranks

    return Averaged


def run(chunks, batches):
    """Gradients on the chunks' parameters; returns [losses of every batch] on the last stage."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megacpp_mcore.training.cpu.step import forward_step

    def step(iterator, model):
        losses, reduce = forward_step(iterator, model)
        return losses, lambda output: (*reduce(output)[:2], {"loss": reduce(output)[0].detach()})

    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.train()
    with mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("the step waits")):
        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
    return [report["loss"].item() for report in reports]


def sharded(chunks):
    return {
        f"model{index}": chunk.module.sharded_state_dict() for index, chunk in enumerate(chunks)
    }


def load(chunks, folder):
    from megatron.core import dist_checkpointing

    for (_, state), chunk in zip(
        dist_checkpointing.load(sharded(chunks), folder).items(), chunks, strict=True
    ):
        chunk.module.load_state_dict(state)


def save_gradients(chunks, folder):
    """A checkpoint with each gradient in the place of its weight."""
    from megatron.core import dist_checkpointing

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.grad
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded(chunks), folder)


def run_layout(overrides, folder, name):
    """Train one step's gradients under a layout, and save them. Returns this rank's losses."""
    kind = duplicated_down_projections if name.endswith("duplicated") else contextlib.nullcontext
    with kind():
        chunks = model_of(overrides)
    load(chunks, f"{folder}/weights")
    groups = chunks[0].groups
    ranks, rank = groups.dp.size(), groups.dp.rank()
    losses = run(chunks, micro_batches()[rank::ranks])
    save_gradients(chunks, f"{folder}/{name}")
    if groups.tp.rank() != 0:
        return {}
    return dict(zip(range(rank, MICRO_BATCHES, ranks), losses, strict=False))


def assert_close(actual, expected, what):
    """Sums in another order, of tokens x hidden terms: an eps of the largest each, independent."""
    eps = torch.finfo(torch.float32).eps
    bound = math.sqrt(MICRO_BATCHES * SEQ * HIDDEN) * eps * expected.abs().max()
    error = (actual - expected).abs().max()
    assert error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def check_layouts(rank, folder):
    without_cuda()
    for name, own, layouts in (
        ("experts", [], LAYOUTS),
        ("dense", NO_EXPERTS, LAYOUTS_WITHOUT_EXPERTS),
    ):
        check_model(own, layouts, f"{folder}/{name}")


def check_model(own, layouts, folder):
    """Losses, gradients and, where there are experts, their biases, of one model's layouts."""
    from megatron.core import dist_checkpointing

    one = model_of(own)
    one[0].reduces = False
    with torch.no_grad():
        for parameter in one[0].parameters():
            dist.broadcast(parameter.add_(0.02 * torch.randn_like(parameter)), 0)
    os.makedirs(f"{folder}/weights", exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded(one), f"{folder}/weights")
    losses = torch.tensor(run(one, micro_batches()))
    gradients = {name: p.grad for name, p in one[0].module.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    biases = expert_biases(one)

    found = {}
    for name, overrides in layouts.items():
        parts = [None] * 2
        dist.all_gather_object(parts, run_layout([*own, *overrides], folder, name))
        found[name] = parts[0] | parts[1]

    one = model_of(own)
    for name in layouts:
        assert_close(torch.tensor([found[name][i] for i in range(MICRO_BATCHES)]), losses, name)
        load(one, f"{folder}/{name}")
        for key, parameter in one[0].module.named_parameters():
            assert_close(parameter, gradients[key], f"{name}: gradient of {key}")
        for key, bias in expert_biases(one).items():
            assert torch.equal(bias, biases[key]), f"{name}: {key}"


def expert_biases(chunks):
    """As the step has left them. They are buffers, which a checkpoint has beside the gradients."""
    named = chunks[0].module.named_buffers()
    return {name: buffer.clone() for name, buffer in named if name.endswith("expert_bias")}


def without_cuda():
    """What Megatron's parallel code, which is not for the CPU, asks of CUDA without need."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().fork = lambda *name: contextlib.nullcontext()  # there is no dropout
    torch.Tensor.cuda = lambda self: self  # MTP's copy of the embedding, on the last stage
    zeros = torch.zeros
    # the schedules' count of tokens is on device="cuda"
    torch.zeros = lambda *args, device=None, **kwargs: zeros(*args, **kwargs)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path: Path):
    run_ranks(check_layouts, tmp_path)
