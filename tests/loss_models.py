"""Our HybridModel and Megatron's own with the same weights, each through Megatron's schedules.

The weights are float64; Megatron's cross entropy computes in float32 whatever the model's dtype.
"""

import os
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training.models.hybrid import HybridModelBuilder

from megacpp_mcore.bench.variants import serving
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu import step
from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet
from megacpp_mcore.training.gpu.model import MegacppHybridModel, MegacppModelBuilder, model_config

SIZES = [
    "model.pattern=A", "model.depth=1", "mtp.pattern=A", "model.hidden_size=16",
    "model.ffn_hidden_size=32", "model.num_attention_heads=2", "model.seq_length=12",
    "attention.q_lora_rank=8", "attention.kv_lora_rank=8", "attention.qk_head_dim=8",
    "attention.qk_pos_emb_head_dim=8", "attention.v_head_dim=8", "model.vocab_size=61",
    "data.null_tokenizer_eod_id=60",
]  # fmt: skip
BATCH, SEQ = 3, 12
# Logits here are below 8 in size, which is what float32's rounding of them does to a probability;
# the exponential, the sum, the quotient and the result add an epsilon each.
TOLERANCE = (8 + 4) * torch.finfo(torch.float32).eps
# Of models in float32: some 16 products lie between a head and a weight and back, each with sums of
# up to 64 terms, of which the root of 64 roundings is left.
FLOAT32 = 16 * 64**0.5 * torch.finfo(torch.float32).eps


class Models(NamedTuple):
    ours: MegacppHybridModel
    megatrons: HybridModel


def models(*overrides: str, heads: str | None = None) -> Models:
    """Both, with the same weights. Needs the process groups of `single_process`.

    heads: linear_cross_entropy's backend in ours, where it is not to be what the recipe and the
    environment ask for; a model of Megatron's has Megatron's own.
    """
    recipe = load_recipe("nam56r-tiny", [*SIZES, *overrides])
    os.environ.update(recipe.launch.environment)
    args = megatron_args(lower(recipe).argv)
    groups, built = ProcessGroupCollection.use_mpu_process_groups(), []
    requests = "" if heads is None else f"linear_cross_entropy={heads}"
    for builder, asked in ((MegacppModelBuilder, requests), (HybridModelBuilder, "")):
        with quiet(), serving(asked):
            built.append(builder(model_config(args, recipe)).build_model(groups, True, True))
    torch.manual_seed(3)
    for name, parameter in built[0].named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1 if "embedding" in name else 0.3)
    built[1].load_state_dict(built[0].state_dict())
    return Models(*(model.double().train() for model in built))


def batches(masked: float = 0.3) -> list[dict]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(61, (2, BATCH, SEQ + 1), generator=generator)
    masks = (torch.rand(2, BATCH, SEQ, generator=generator) >= masked).float()
    positions = torch.arange(SEQ).expand(BATCH, -1)
    return [
        {"tokens": t[:, :-1], "labels": t[:, 1:].contiguous(), "loss_mask": m,
         "position_ids": positions} for t, m in zip(tokens, masks, strict=True)
    ]  # fmt: skip


def megatrons_step(iterator, model):
    """forward_step and loss_func of Megatron-LM's pretrain_hybrid.py, as they are defined."""
    batch = next(iterator)

    def loss_func(loss_mask, losses):
        total = torch.sum(losses.view(-1).float() * loss_mask.view(-1).float())
        tokens = loss_mask.sum().to(torch.int)
        return total, tokens, (total.detach().clone(), tokens)

    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip
    return losses, partial(loss_func, batch["loss_mask"])


class Outcome(NamedTuple):
    reports: list[torch.Tensor]
    mtp: torch.Tensor | None
    gradients: dict[str, torch.Tensor]


def run(model, forward_step, data, scale=3.0) -> Outcome:
    """One global batch through Megatron's schedules, the loss scaled as fp16's scaler does."""
    MTPLossLoggingHelper.tracker.clear()
    model.config.grad_scale_func = lambda total: total * scale
    model.zero_grad()
    wrapped, reports, iterator = step.NoGradientSync(model), [], iter(data)
    for index in range(len(data)):
        output, _ = schedules.forward_step(
            forward_step, iterator, wrapped, len(data), None, reports, model.config,
            cp_group_size=1, current_microbatch=index,
        )  # fmt: skip
        schedules.backward_step(None, output, None, model.config)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = [value for report in reports for value in report]
    return Outcome(found, MTPLossLoggingHelper.tracker.get("loss_values"), gradients)


def assert_close(ours, megatrons, what, tolerance=TOLERANCE):
    assert ours.shape == megatrons.shape, what
    error, size = (ours.double() - megatrons.double()).norm(), megatrons.double().norm()
    assert error <= tolerance * size, f"{what}: {error / size:.1e}"


def assert_same(ours: Outcome, megatrons: Outcome, tolerance: float = TOLERANCE):
    """tolerance: of the error's norm, in units of the value's."""
    for mine, theirs in zip(ours.reports, megatrons.reports, strict=True):
        assert_close(mine, theirs, "report", tolerance)
    assert (ours.mtp is None) == (megatrons.mtp is None)
    if ours.mtp is not None:
        assert_close(ours.mtp, megatrons.mtp, "MTP's log", tolerance)
    assert ours.gradients.keys() == megatrons.gradients.keys()
    for name, gradient in megatrons.gradients.items():
        assert_close(ours.gradients[name], gradient, name, tolerance)
