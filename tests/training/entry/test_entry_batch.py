"""The GPU entry's micro batches, its model and its loss."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from launched import arguments, megatron

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.gpu.rank_setup import launch


def test_blends_have_their_shares_and_mock_data_must_be_asked_for(gpu_recipe, corpus, overrides):
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    from megacpp_mcore.training.gpu.data import datasets_provider

    def train_of(*more: str):
        recipe = load_recipe(gpu_recipe.source, [*overrides, *more])
        with megatron(launch(arguments(recipe))):
            return datasets_provider([12, 4, 0])[0]

    assert type(train_of()) is GPTDataset
    blend = train_of(f'data.data_path=["1", "{corpus}", "3", "{corpus}"]')
    assert type(blend) is BlendedDataset and blend.dataset_index[:12].tolist().count(1) == 9
    assert type(train_of("data.mock_data=true", "data.data_path=null")) is MockGPTDataset


def test_packed_documents_are_apart_in_the_loop(gpu_recipe, overrides):
    """Whole documents in a row of THD: what one holds has no part in another's losses."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.training.gpu import batch as gpu_batch
    from megacpp_mcore.training.gpu import train as gpu_train
    from megacpp_mcore.training.gpu.data import datasets_provider

    packed = ["data.dataloader_inter_document_masking=true", "schedule.micro_batch_size=1"]
    recipe = load_recipe(gpu_recipe.source, [*overrides, *packed])
    launched = launch(arguments(recipe))
    with megatron(launched) as args:
        train, *_ = datasets_provider([1000, 4, 0])
        with bridges.pretend_h200():
            config = gpu_train.config_container(launched, args).model
        model = config.get_builder_cls()(config).build_model(
            ProcessGroupCollection.use_mpu_process_groups()
        )
        rows = (row for row in train if 4 < row["cu_seqlens"][1] < 28)

        def loss_behind(end: int, row: dict) -> float:
            row = row | {"loss_mask": (torch.arange(32) >= end).float()}
            batch = torch.utils.data.default_collate([row])
            output, loss_func = gpu_batch.forward_step(iter([batch]), model)
            total, tokens, _ = loss_func(output)
            assert tokens == 32 - end
            return total.item()

        whole = {"cu_seqlens": torch.tensor([0] + 32 * [32], dtype=torch.int32)}
        whole["max_seqlen"] = torch.tensor(32, dtype=torch.int32)
        # An expert's product rounds a row in another order where its other rows are others: a few
        # units in the last place. The corpus is our own source: another commit, other rows, and of
        # an untrained model a row may show nothing of what is before it. Of eight, one does.
        rounding, off = 4 * torch.finfo(torch.float32).eps, []
        for row in itertools.islice(rows, 8):
            end = int(row["cu_seqlens"][1])
            other = row | {"tokens": row["tokens"].clone()}
            other["tokens"][:end] = (other["tokens"][:end] + 1) % 256
            apart = pytest.approx(loss_behind(end, row), rel=rounding)
            assert loss_behind(end, other) == apart
            off.append(loss_behind(end, other | whole) / loss_behind(end, row | whole) - 1)
        assert len(off) == 8 and max(map(abs, off)) > 4 * rounding


def test_packed_rows_of_a_micro_batch_are_one_row(gpu_recipe, overrides):
    from megacpp_mcore.training.gpu import batch as gpu_batch
    from megacpp_mcore.training.gpu.data import datasets_provider

    packed = ["data.dataloader_inter_document_masking=true", "schedule.micro_batch_size=2"]
    with megatron(launch(arguments(load_recipe(gpu_recipe.source, [*overrides, *packed])))):
        train, *_ = datasets_provider([8, 4, 0])
        rows = torch.utils.data.default_collate([train[0], train[1]])
        config = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=1)
        batch = gpu_batch.get_batch(iter([rows]), config)
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(batch[key], rows[key].reshape(1, 64))
    offsets = batch["documents"].params(tokens_per_sample=32).cu_seqlens_q.tolist()
    assert {0, 32, 64} <= set(offsets)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage", ["an end", "a middle with MTP", "a middle"])
def test_a_pipeline_stage_reads_what_it_needs(gpu_recipe, overrides, monkeypatch, stage, packed):
    """A middle stage has no tokens, and of packed rows their documents alone."""
    from megacpp_mcore.training.gpu import batch as gpu_batch
    from megacpp_mcore.training.gpu.data import datasets_provider

    masking = f"data.dataloader_inter_document_masking={str(packed).lower()}"
    recipe = load_recipe(gpu_recipe.source, [*overrides, masking, "schedule.micro_batch_size=1"])
    with megatron(launch(arguments(recipe))):
        train, *_ = datasets_provider([8, 4, 0])
        rows = torch.utils.data.default_collate([train[0]])
        config = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=1)
        monkeypatch.setattr(
            gpu_batch, "is_first_or_last_pipeline_stage", lambda vp_stage: stage == "an end"
        )
        monkeypatch.setattr(
            gpu_batch, "mtp_on_this_rank", lambda **layout: stage == "a middle with MTP"
        )
        unread = iter([rows])
        batch = gpu_batch.get_batch(unread, config)
    if stage == "a middle":
        assert all(batch[key] is None for key in ("tokens", "labels", "loss_mask", "position_ids"))
        assert (batch["documents"] is not None) == packed == (next(unread, None) is None)
    else:
        assert torch.equal(batch["tokens"], rows["tokens"])
        assert (batch["documents"] is not None) == packed


def test_a_context_parallel_rank_has_its_part_of_every_row(gpu_recipe, monkeypatch):
    """Two chunks of four for either of two ranks, the first with the last: causal work is even."""
    from megatron.core import mpu

    from megacpp_mcore.training.gpu import batch as gpu_batch
    from megacpp_mcore.training.gpu.data import datasets_provider

    with megatron(launch(arguments(gpu_recipe))) as args:
        train, *_ = datasets_provider([8, 4, 0])
        rows = torch.utils.data.default_collate([train[0], train[1]])
        config = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=1)
        args.context_parallel_size, parts, cp_rank = 2, [], [0]
        with monkeypatch.context() as patch:
            patch.setattr(mpu, "get_context_parallel_group", lambda: "two ranks")
            for name, answer in (("get_world_size", lambda: 2), ("get_rank", lambda: cp_rank[0])):
                real = getattr(torch.distributed, name)
                patch.setattr(
                    torch.distributed, name,
                    lambda group=None, real=real, answer=answer: (
                        answer() if group == "two ranks" else real(group)
                    ),
                )  # fmt: skip
            for cp_rank[0] in range(2):
                parts.append(gpu_batch.get_batch(iter([rows]), config))
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        first, second = (part[key].chunk(2, dim=1) for part in parts)
        whole = torch.cat([first[0], *second, first[1]], dim=1)
        torch.testing.assert_close(whole, rows[key], rtol=0, atol=0)


def test_the_model_the_batches_and_the_loss(gpu_recipe):
    """Megatron's builder with our spec, GPTDataset through our provider, the loss by hand."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.training.gpu import batch as gpu_batch
    from megacpp_mcore.training.gpu import train as gpu_train
    from megacpp_mcore.training.gpu.data import datasets_provider

    launched = launch(arguments(gpu_recipe))
    with megatron(launched) as args:
        train, valid, test = datasets_provider([8, 4, 0])
        assert len(train) >= 8 and len(valid) >= 4 and test is None
        with bridges.pretend_h200():
            config = gpu_train.config_container(launched, args).model
        builder = config.get_builder_cls()(config)
        model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
        samples = torch.utils.data.default_collate([train[0], train[1]])
        output, loss_func = gpu_batch.forward_step(iter([samples]), model)
        total, tokens, report = loss_func(output)
        mask = samples["loss_mask"]
        losses = model(
            samples["tokens"], samples["position_ids"], None, labels=samples["labels"]
        ).detach()
        assert losses.shape == mask.shape == (2, 32)
        assert tokens == mask.sum()
        torch.testing.assert_close(total.detach(), (losses * mask).sum())
        torch.testing.assert_close(report["lm loss"], torch.stack([total, tokens.float()]))
        # An untrained model: nearly uniform over the padded vocabulary.
        assert (total / tokens).item() == pytest.approx(5.57, rel=0.05)
        total.backward()
        # the MTP depth has no part in `total`: its loss is in the graph of the main head's
        without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without


def test_a_loss_or_a_gradient_that_is_not_finite_ends_the_run(gpu_recipe):
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.training.training import get_megatron_ddp_config

    from megacpp_mcore.training.gpu.batch import checked_loss

    with megatron(launch(arguments(gpu_recipe))) as args:
        assert args.check_for_nan_in_loss_and_grad and args.rerun_mode == "validate_results"
        mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        total, tokens, _ = checked_loss(mask, torch.tensor(9.0))
        assert (total, tokens) == (9.0, 2)
        for bad in (float("nan"), float("inf")):
            with pytest.raises((RuntimeError, SystemExit)):
                checked_loss(mask, torch.tensor(bad))
        # Gradients Megatron's data parallelism checks, bucket by bucket, by the same argument.
        asked = get_megatron_ddp_config(args)
        assert asked.check_for_nan_in_grad and not asked.check_for_large_grads
        for value in (1.0, float("nan"), float("inf")):
            gradients = SimpleNamespace(grad_data=torch.tensor([1.0, value]))
            reducing = SimpleNamespace(buckets=[gradients])
            ends = contextlib.nullcontext() if value == 1 else pytest.raises(RuntimeError)
            with ends:
                _ParamAndGradBucketGroup.check_grads(reducing, True, False)


def test_data_of_another_vocabulary_is_refused_before_the_model(small_recipe, overrides):
    from megacpp_mcore.training.data.blend import check_data

    def refused(what: str, *more: str) -> None:
        with pytest.raises(MegacppError, match=what):
            check_data(load_recipe(str(small_recipe), [*overrides, *more]))

    check_data(load_recipe(str(small_recipe), overrides))
    refused("no embedding", "model.vocab_size=200", "data.null_tokenizer_eod_id=199")
    refused("end with token 256", "model.vocab_size=300", "data.null_tokenizer_eod_id=null")
    refused("no dataset at /absent", 'data.data_path=["1", "/absent"]')


def test_a_stack_that_is_not_ours_is_refused(gpu_recipe):
    from megacpp_mcore.training.gpu import train as gpu_train
    from megacpp_mcore.training.gpu.model import StackSpecError

    launched = launch(arguments(gpu_recipe))
    with megatron(launched) as args:
        with bridges.pretend_h200():
            config = gpu_train.config_container(launched, args).model
        config.hybrid_stack_spec = None  # what Megatron makes of a spec that fails to import
        with pytest.raises(StackSpecError, match="the stack spec is none"):
            config.get_builder_cls()(config).build_model(None)
