"""The GPU entry as far as a machine without one goes: launch, arguments, batches, loss, receipt."""

import contextlib
import dataclasses
import errno
import importlib.util
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import receipt_samples as samples
import torch
from late_gpu import LateGpu
from torch.distributed.checkpoint.metadata import Metadata

from megacpp_mcore import dispatch, receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import cache_folder
from megacpp_mcore.hybrid import flops
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.check import MegatronRefusal
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.cpu.megatron_setup import single_process
from megacpp_mcore.training.gpu import launcher
from megacpp_mcore.training.gpu.compilations import triton_cache_entries
from megacpp_mcore.training.gpu.rank_setup import Launch, LaunchError, launch, recipe_argv
from megacpp_mcore.training.gpu.torchrun import RanksOutcome

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500"}  # fmt: skip

CACHES = (
    "TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING", "TORCHINDUCTOR_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def a_rank_of_one(monkeypatch):
    """The environment torchrun makes; what a launch sets is taken back at the end."""
    for name in ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "NOTE", "OTHER", *CACHES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain"])


@pytest.fixture
def overrides(small_recipe: Path) -> list[str]:
    """The small recipe as if for one GPU."""
    return [
        "launch.device=cuda", "launch.environment.NOTE=recipe", "launch.environment.OTHER=recipe",
        "moe.moe_grouped_gemm=true",
        "checkpoint.save_interval=null",
    ]  # fmt: skip


@pytest.fixture
def gpu_recipe(small_recipe: Path, overrides: list[str]) -> Recipe:
    return load_recipe(str(small_recipe), overrides)


def arguments(recipe: Recipe) -> list[str]:
    return recipe_argv(recipe) + lower(recipe).argv


@contextlib.contextmanager
def megatron(launched: Launch):
    """Megatron's arguments and process groups of one CPU process, taken down at the end."""
    from megatron.core import num_microbatches_calculator
    from megatron.training import global_vars

    from megacpp_mcore.training.gpu import train as gpu_train

    try:
        with bridges.pretend_h200():
            args = gpu_train.megatron_args(launched)
        with single_process(args.seed):
            yield args
    finally:
        global_vars.destroy_global_vars()
        num_microbatches_calculator.destroy_num_microbatches_calculator()


def test_the_recipe_arrives_and_its_environment_is_applied_or_kept(gpu_recipe, monkeypatch, capsys):
    monkeypatch.setenv("NOTE", "mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    launched = launch(arguments(gpu_recipe))
    assert launched.recipe == gpu_recipe
    assert launched.argv == lower(gpu_recipe).argv
    assert launched.out == Path("runs/small")
    applied, kept = launched.environment["applied"], launched.environment["kept"]
    # What is compiled and searched for is kept for the user's next run, in whatever folder.
    assert applied.pop("TRITON_CACHE_DIR") == str(cache_folder("triton").absolute())
    flash = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache_folder("flash_attention").absolute()),
    }
    assert applied == {"OTHER": "recipe", "TRITON_CACHE_AUTOTUNING": "1", **flash}
    assert kept == {"NOTE": "mine", "TORCHINDUCTOR_CACHE_DIR": "/mine"}
    assert os.environ["OTHER"] == "recipe" and os.environ["NOTE"] == "mine"
    assert "MEGACPP_RECIPE" not in os.environ  # the recipe is handed on
    assert "kept NOTE=mine" in capsys.readouterr().err


@pytest.mark.parametrize("blocked", ["a file", "a full disk"])
def test_kernels_are_kept_in_the_runs_folder_where_the_users_cannot_be_written(
    gpu_recipe, tmp_path, monkeypatch, capsys, blocked
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    if blocked == "a file":
        (tmp_path / "home").touch()
    else:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=full))
    applied = launch(arguments(gpu_recipe)).environment["applied"]
    own = Path("runs/small/cache").absolute()
    assert applied["TRITON_CACHE_DIR"] == str(own / "triton")
    assert applied["TORCHINDUCTOR_CACHE_DIR"] == str(own / "inductor")
    users = tmp_path / "home" / "megacpp-mcore"
    said = f"megacpp: compiled kernels are kept in {own}: {users} cannot be written to ("
    assert said in capsys.readouterr().err


def test_a_start_tells_whether_its_kernels_were_compiled_before(gpu_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    launch(arguments(gpu_recipe))
    assert triton_cache_entries() == 0
    (tmp_path / "triton" / "a-kernel").mkdir(parents=True)
    assert triton_cache_entries() == 1


def test_the_yardstick_is_megatrons_own_stack_with_the_recipes_arguments(small_recipe, overrides):
    from megacpp_mcore.training.gpu import train as gpu_train

    without_r = [*overrides, "model.pattern=AEMM", "mtp.pattern=AE"]
    recipe = load_recipe(str(small_recipe), without_r)
    launched = launch(["--megacpp-yardstick", *arguments(recipe)])
    with megatron(launched) as args:
        assert args.spec == ["megacpp_mcore.specs.yardstick", "yardstick_stack_spec"]
        assert args.hybrid_layer_pattern == "+EMM/+E"
        with bridges.pretend_h200():
            model = gpu_train.config_container(launched, args).model
    stack = model.hybrid_stack_spec.submodules
    assert model.get_builder_cls().__name__ == "YardstickBuilder"
    assert stack.mamba_layer.submodules.mixer.module.__name__ == "MambaMixer"
    core = stack.mla_layer.submodules.self_attention.submodules.core_attention
    assert core.__name__ == "DispatchedCoreAttention"


def test_the_yardstick_is_not_captured(small_recipe):
    recipe = load_recipe(str(small_recipe), [
        "launch.device=cuda", "launch.cuda_graph_impl=full_iteration", "model.pattern=AEMM",
        "mtp.pattern=AE", "moe.moe_token_dispatcher_type=alltoall", "moe.moe_grouped_gemm=true",
        "schedule.check_for_nan_in_loss_and_grad=false", "launch.distributed_backend=nccl",
        "model.transformer_impl=transformer_engine",
    ])  # fmt: skip
    with pytest.raises(LaunchError, match=r"set launch\.cuda_graph_impl=none"):
        launch(["--megacpp-yardstick", *arguments(recipe)])


def test_the_yardstick_has_no_block_like_r(gpu_recipe):
    with pytest.raises(LaunchError, match="no block like R"):
        launch(["--megacpp-yardstick", *arguments(gpu_recipe)])


def test_the_recipe_may_come_from_the_environment(gpu_recipe, monkeypatch):
    monkeypatch.setenv("MEGACPP_RECIPE", gpu_recipe.request)
    assert launch(lower(gpu_recipe).argv).recipe == gpu_recipe


def test_a_shipped_recipes_arguments_are_enough(monkeypatch, capfd):
    """`torchrun --nproc-per-node 8 -m megacpp_mcore.pretrain $(megacpp recipe args nam56r)`"""
    monkeypatch.setenv("WORLD_SIZE", "8")
    recipe = load_recipe("nam56r")
    argv = lower(recipe).argv
    assert launch(argv).recipe == recipe
    assert capfd.readouterr().err.count("those of the shipped recipe nam56r,") == 1
    monkeypatch.setenv("RANK", "1")
    assert launch([*argv, "--tensorboard-dir", "log"]).recipe == recipe
    assert capfd.readouterr().err == ""
    other = lower(load_recipe("nam56r", ["schedule.seed=2"])).argv
    with pytest.raises(LaunchError, match="not those of an unmodified shipped recipe"):
        launch(other)


def test_a_launch_that_cannot_be_right_is_refused(gpu_recipe, small_recipe, monkeypatch):
    def refused(argv: list[str], what: str) -> None:
        with pytest.raises(LaunchError, match=what):
            launch(argv)

    argv = lower(gpu_recipe).argv
    refused(argv, "no recipe")
    refused(["--megacpp-set", "schedule.seed=2", *argv], "names none")
    refused(recipe_argv(gpu_recipe), "arguments for recipe small are missing")
    refused(["--megacpp-recipe", str(small_recipe), *argv], 'launch.device = "cpu"')
    monkeypatch.setenv("MEGACPP_RECIPE", "nam56r")
    refused(arguments(gpu_recipe), "asks for .* and MEGACPP_RECIPE for 'nam56r'")
    monkeypatch.delenv("MEGACPP_RECIPE")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(arguments(gpu_recipe), "torchrun started 2 ranks")
    monkeypatch.delenv("MASTER_PORT")
    refused(arguments(gpu_recipe), "MASTER_PORT not set")


def test_the_environment_is_set_before_torch_is_imported():
    script = (
        "import sys; import megacpp_mcore.pretrain, megacpp_mcore.training.gpu.rank_setup; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_module_refuses_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "megacpp_mcore.pretrain"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("megacpp: no recipe") and done.stderr.count("\n") == 1


def test_megatron_arguments_of_another_recipe_are_refused(gpu_recipe):
    argv = arguments(gpu_recipe)
    argv[argv.index("--lr") + 1] = "1"
    why = "optimizer.lr is 0.003, Megatron has lr = 1.0"
    with pytest.raises(LaunchError, match=why), megatron(launch(argv)):
        pass


def test_sigterm_ends_the_loop_after_a_step(gpu_recipe):
    """As a scheduler sends it: Megatron then saves and ends."""
    with megatron(launch(arguments(gpu_recipe))) as args:
        assert args.exit_signal_handler and args.exit_signal == signal.SIGTERM


def test_what_the_entry_does_not_do_is_refused(gpu_recipe):
    argv = [*arguments(gpu_recipe), "--check-for-spiky-loss"]
    why = "does not support --check-for-spiky-loss"
    with pytest.raises(LaunchError, match=why), megatron(launch(argv)):
        pass


def test_a_log_that_nothing_can_write_is_refused(gpu_recipe, tmp_path, monkeypatch):
    """Megatron arguments without a recipe key may follow the recipe's, and count."""
    argv = [*arguments(gpu_recipe), "--tensorboard-dir", str(tmp_path)]
    find, found = importlib.util.find_spec, [None]
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *p: found[0] if n == "tensorboard" else find(n, *p)
    )
    why = "--tensorboard-dir needs the package tensorboard"
    with pytest.raises(MegacppError, match=why), megatron(launch(argv)):
        pass
    found[0] = ModuleSpec("tensorboard", None)
    with megatron(launch(argv)) as args:
        assert args.tensorboard_dir == str(tmp_path)


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


def test_a_run_goes_on_from_a_complete_checkpoint_or_begins_in_a_free_folder(
    gpu_recipe, tmp_path, capsys
):
    from megacpp_mcore.training.gpu.train import _check_folder
    from megacpp_mcore.training.run_folder import RunFolderError

    launched = launch(["--megacpp-out", str(tmp_path / "out"), *arguments(gpu_recipe)])
    args = SimpleNamespace(load=str(tmp_path / "saved"), ckpt_format="torch_dist")
    _check_folder(launched, args)
    (tmp_path / "out").mkdir()
    receipt = tmp_path / "out" / "receipt.json"
    samples.train(receipt, recipe=receipts.recipe_entry("mine", launched.recipe.to_dict()))
    with pytest.raises(RunFolderError, match="has the receipt of a run"):
        _check_folder(launched, args)
    (tmp_path / "saved" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "saved" / "iter_0000004" / "metadata.json").touch()
    index = pickle.dumps(Metadata({}, storage_data={}))
    (tmp_path / "saved" / "iter_0000004" / ".metadata").write_bytes(index)
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    tracker.touch()  # cut off as it was written
    _check_folder(launched, args)
    assert "resuming from the last complete checkpoint, step 4" in capsys.readouterr().err
    assert tracker.read_text() == "4"
    other = launched.recipe.to_dict()
    other["optimizer"]["lr"] = 7.0
    samples.train(receipt, recipe=receipts.recipe_entry("mine", other))
    with pytest.raises(MegacppError, match=r"has another recipe: optimizer\.lr was 7\.0 and is "):
        _check_folder(launched, args)
    samples.train(receipt, recipe=receipts.recipe_entry("mine", launched.recipe.to_dict()))
    (tmp_path / "saved" / "iter_0000004" / ".metadata").write_bytes(b"junk")
    with pytest.raises(MegacppError, match=r"\.metadata cannot be read: .*no older whole"):
        _check_folder(launched, args)


def test_what_megatron_refuses_is_told_in_its_words(small_recipe, overrides):
    recipe = load_recipe(str(small_recipe), [*overrides, "schedule.lr_warmup_fraction=0.1"])
    refused = "Megatron refuses the recipe: .*only specify one of lr-warmup-fraction"
    with pytest.raises(MegatronRefusal, match=refused), megatron(launch(arguments(recipe))):
        pass


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


class FakeLoop:
    """Megatron's loop as `Watch` sees it: its functions by name, in its order."""

    def __init__(self, training, steps: int) -> None:
        self.training, self.first, self.steps = training, 0, steps
        self.optimizer = SimpleNamespace(
            param_groups=[{"lr": 0.5, "default_config": True, "params": []}]
        )

    def setup_model_and_optimizer(self, model_type):
        dispatch.decide("linear", dispatch.Workload.of("cpu", "any"))
        return [torch.nn.Linear(2, 3)], self.optimizer, None

    def build_train_valid_test_data_iterators(self, provider):
        return None, None, None

    def train_step(self, iterator, model, optimizer, iteration=None):
        return {"lm loss": torch.tensor(9.0 - iteration)}, 0, False, False, 0, 0.25, None, None

    def training_log(self, losses, total, learning_rate, iteration):
        return False

    def save_checkpoint_and_time(self, iteration, model):
        return None

    def maybe_finalize_async_save(self, blocking=False, terminate=False):
        return None

    def evaluate(self, forward_step):
        return {"lm loss": torch.tensor(7.5)}, None, False

    def evaluate_and_print_results(self, prefix, forward_step, iteration):
        self.training.evaluate(forward_step)

    def run(self, stop_at: int | None = None) -> None:
        loop = self.training
        model, optimizer, _ = loop.setup_model_and_optimizer(None)
        loop.build_train_valid_test_data_iterators(None)
        for iteration in range(self.first, self.steps):
            if iteration == stop_at:
                raise RuntimeError("out of memory")
            loop.train_step(None, model, optimizer, iteration=iteration)
            loop.training_log({}, {}, 0.5, iteration + 1)
            loop.maybe_finalize_async_save(blocking=False)
        loop.save_checkpoint_and_time(self.steps, model)
        loop.evaluate_and_print_results(f"iteration {self.steps}", None, self.steps)
        loop.evaluate_and_print_results("iteration 3 on test set", None, self.steps)


NAMES = (
    "setup_model_and_optimizer", "build_train_valid_test_data_iterators", "train_step",
    "save_checkpoint_and_time", "maybe_finalize_async_save", "evaluate",
    "evaluate_and_print_results", "training_log",
)  # fmt: skip


@pytest.fixture
def watched(gpu_recipe, tmp_path, monkeypatch):
    """A Watch around a fake loop: (watch, loop)."""
    from megatron.training import training

    from megacpp_mcore.training.gpu.watch import Watch
    from megacpp_mcore.training.heartbeat import Heartbeat

    launched = launch(["--megacpp-out", str(tmp_path / "out"), *arguments(gpu_recipe)])
    loop = FakeLoop(training, steps=3)
    for name in NAMES:
        monkeypatch.setattr(training, name, getattr(loop, name))
    with megatron(launched) as args:
        args.iteration = 0
        yield Watch(launched, Goodput(), Heartbeat(tmp_path / "heartbeat", 0, None)), loop


def test_a_profiled_step_is_in_the_receipt(watched, monkeypatch):
    from megacpp_mcore.training.gpu import step_profile

    watch, loop = watched
    spans = [step_profile.Span("a_kernel", 0, 2_000_000)]
    monkeypatch.setattr(step_profile, "recorded", lambda call: (call(), spans))
    watch.launch = dataclasses.replace(watch.launch, profile=2)
    with watch.installed():
        loop.run()
    kernel = {"name": "a_kernel", "launches": 1, "ms": 2.0}
    found = {"step": 2, "span_ms": 2.0, "busy_ms": 2.0, "compute_ms": 2.0, "kernels": [kernel]}
    assert watch.write("complete")["profile"] == found


def test_a_resumed_run_does_not_ignore_a_profile_of_a_step_that_is_done(watched):
    from megatron.training import get_args

    watch, loop = watched
    get_args().iteration = 2
    watch.launch = dataclasses.replace(watch.launch, profile=2)
    refused = "step 2 cannot be profiled: the run's steps are 3 to"
    with pytest.raises(LaunchError, match=refused), watch.installed():
        loop.run()


def test_the_receipt_is_gathered_inside_the_loop(watched, tmp_path):
    watch, loop = watched
    with watch.installed():
        loop.run()
    assert loop.training.train_step == loop.train_step  # as it was
    watch.write("complete")
    receipt = receipts.read(tmp_path / "out" / "receipt.json")
    assert receipt["series"]["step"] == [1, 2, 3]
    assert receipt["series"]["loss"] == [9.0, 8.0, 7.0]
    assert receipt["series"]["lr"] == [0.5] * 3 and receipt["series"]["grad_norm"] == [0.25] * 3
    assert receipt["series_info"]["cold_steps"] == [1]
    assert receipt["evaluations"] == {"step": [3], "loss": [7.5]}
    assert receipt["result"]["test_loss"] == 7.5
    assert receipt["result"]["tokens"] == 3 * 4 * 32
    applied = receipt["environment"]["applied"]
    assert applied["NOTE"] == applied["OTHER"] == "recipe" and set(CACHES) <= applied.keys()
    assert receipt["topology"]["world_size"] == 1
    assert {"surface", "requested", "observed", "reason"} <= receipt["backends"][0].keys()
    result = receipt["result"]
    assert result["cold_start_s"] * 1000 > result["first_step_ms"] > 0
    assert "launch_s" not in result  # no launcher
    assert result["flops_per_token"] == flops.training_flops(watch.launch.recipe)
    assert result["triton_cache_entries_at_start"] == 0
    assert result["triton_kernels_compiled"] == 0 and result["torch_compile_s"] >= 0
    assert result["tflops_per_s_per_device"] > 0 and result["mfu"] is None  # no known peak
    assert result["parameter_bytes"] == 4 * (2 * 3 + 3)
    seconds = receipt["goodput"]["seconds"]
    assert all(seconds[part] > 0 for part in ("compile", "step", "data", "checkpoint"))


def watched_on(watch, monkeypatch) -> LateGpu:
    device = LateGpu()
    monkeypatch.setattr(watch, "_device", device)
    return device


@pytest.mark.parametrize("yardstick", [False, True])
def test_megatrons_functions_are_compiled_in_advance_for_its_own_blocks_alone(
    watched, monkeypatch, yardstick
):
    from megatron.training import initialize

    watch, loop = watched
    watch.launch = dataclasses.replace(watch.launch, yardstick=yardstick)
    compiled = []
    monkeypatch.setattr(initialize, "_warmup_jit_function", lambda tp_size: compiled.append(1))
    with watch.installed():
        loop.training.set_jit_fusion_options(tp_size=1)
    assert compiled == [1] * yardstick


def test_the_clock_of_a_step_is_the_devices(watched, monkeypatch):
    """Work on a GPU goes on after train_step has returned: the host waits in the step's span."""
    watch, loop = watched
    watch.goodput = only_waits_take_time(watched_on(watch, monkeypatch))
    with watch.installed():
        loop.run()
    receipt = watch.write("complete")
    # Of LateGpu, 100 between two marks. The third begins at the second's end, before its copy; the
    # second at a mark of its own, as the first has been waited for.
    assert receipt["series"]["ms"] == [100.0, 100.0, 200.0]
    assert receipt["result"]["first_step_ms"] == 100
    seconds = {name: spent for name, spent in receipt["goodput"]["seconds"].items() if spent}
    assert seconds == {"compile": 2.0, "step": 4.0}  # a cold step and two warm ones


def only_waits_take_time(device: LateGpu) -> Goodput:
    """A ledger whose clock goes on by two seconds when the host waits for the device."""
    now = [0]

    def later() -> None:
        now[0] += 2 * 10**9

    device.on_wait = later
    return Goodput(clock=lambda: now[0])


def said_by(watch, loop, device, monkeypatch) -> list[str]:
    """What happens, in order: steps, waits for the device, a save and evaluations."""
    said = []
    step, save = loop.train_step, loop.save_checkpoint_and_time
    evaluate = loop.evaluate_and_print_results

    def steps(iterator, model, optimizer, iteration=None):
        said.append(f"step {iteration + 1}")
        return step(iterator, model, optimizer, iteration=iteration)

    def saves(iteration, model):
        said.append(f"save {iteration}")
        return save(iteration, model)

    def evaluates(prefix, forward_step, iteration):
        said.append("evaluation")
        return evaluate(prefix, forward_step, iteration)

    monkeypatch.setattr(loop.training, "train_step", steps)
    monkeypatch.setattr(loop.training, "save_checkpoint_and_time", saves)
    monkeypatch.setattr(loop.training, "evaluate_and_print_results", evaluates)
    device.on_wait = lambda: said.append(f"wait {1 + sum(w.startswith('wait') for w in said)}")
    return said


def test_a_step_is_read_when_the_next_one_is_under_way(watched, monkeypatch):
    """And all are before a save; the first one is at once, as it compiles."""
    from megatron.training import get_args

    watch, loop = watched
    get_args().train_iters, loop.steps = 9, 4
    said = said_by(watch, loop, watched_on(watch, monkeypatch), monkeypatch)
    with watch.installed():
        loop.run()
    early = ["step 1", "wait 1", "step 2", "step 3", "wait 2", "step 4", "wait 3"]
    assert said == [*early, "wait 4", "save 4", "evaluation", "evaluation"]
    series = watch.write("complete")["series"]
    assert series["step"] == [1, 2, 3, 4] and series["loss"] == [9.0, 8.0, 7.0, 6.0]


def test_the_last_step_is_read_at_once(watched, monkeypatch):
    from megatron.training import get_args

    watch, loop = watched
    get_args().train_iters = 2
    said = said_by(watch, loop, watched_on(watch, monkeypatch), monkeypatch)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        for iteration in range(2):
            loop.training.train_step(None, model, optimizer, iteration=iteration)
    assert said == ["step 1", "wait 1", "step 2", "wait 2"] and watch.iteration == 2


@pytest.mark.parametrize(
    ("interval", "tensorboard", "waits_before_its_log"),
    [(2, None, [1, 2, 4]), (9, None, [1]), (9, (3, "log"), [1, 3]), (9, (1, None), [1])],
)
def test_a_log_of_values_waits_for_the_steps_before_it_in_their_spans(
    watched, monkeypatch, interval, tensorboard, waits_before_its_log
):
    """Megatron's own wait would be booked as idle: nine tenths of a run that logs every step."""
    from megatron.training import get_args

    watch, loop = watched
    args, loop.steps = get_args(), 5
    args.train_iters, args.log_interval = 9, interval
    if tensorboard:
        args.tensorboard_log_interval, args.tensorboard_dir = tensorboard
    device, waits = watched_on(watch, monkeypatch), []

    def logs(losses, total, learning_rate, iteration):
        if not watch._unread:  # nothing is left to wait for
            waits.append(iteration)

    monkeypatch.setattr(loop.training, "training_log", logs)
    watch.goodput = only_waits_take_time(device)
    with watch.installed():
        loop.run()
    assert waits == waits_before_its_log
    seconds = watch.write("complete")["goodput"]["seconds"]
    assert {name: spent for name, spent in seconds.items() if spent} == {"compile": 2, "step": 8}


def test_an_evaluation_waits_for_the_steps_before_it(watched, monkeypatch):
    from megatron.training import get_args

    watch, loop = watched
    get_args().train_iters = 9
    said = said_by(watch, loop, watched_on(watch, monkeypatch), monkeypatch)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        for iteration in range(2):
            loop.training.train_step(None, model, optimizer, iteration=iteration)
        loop.training.evaluate_and_print_results("iteration 2", None, 2)
    assert said == ["step 1", "wait 1", "step 2", "wait 2", "evaluation"]


def test_a_wait_for_the_gpu_is_named_in_the_heartbeat(watched, monkeypatch):
    watch, loop = watched
    said = []
    monkeypatch.setattr(watch, "_heartbeat", SimpleNamespace(beat=said.append, note=said.append))
    watched_on(watch, monkeypatch)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        loop.training.train_step(None, model, optimizer, iteration=0)
    assert said == ["in step 1", "waiting for step 1 on the GPU", "in step 1"]


def test_a_steps_power_is_of_the_time_since_the_step_before_was_read(watched, monkeypatch):
    from megatron.training import get_args

    from megacpp_mcore.receipts.power import Reading
    from megacpp_mcore.training.gpu import watch as module

    watch, loop = watched
    get_args().train_iters, loop.steps = 9, 3
    joules, now = itertools.count(0, 100), [0.0]
    meter = SimpleNamespace(read=lambda: Reading(next(joules), None), limit_w=lambda: 700.0)
    monkeypatch.setattr(module, "PowerMeter", lambda: meter)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.append(now[-1] + 0.5) or now[-1])
    watched_on(watch, monkeypatch)
    with watch.installed():
        loop.run()
    receipt = watch.write("complete")
    assert receipt["series"]["power_w"] == [200.0] * 3  # 100 J in half a second
    assert receipt["result"]["power_limit_w"] == 700
    # before steps 1 and 2, where nothing is unread, and at the end of each of the three
    assert next(joules) == 500


def test_the_wait_for_data_is_data_whoever_reads(watched, monkeypatch):
    """A captured step's micro batches are read before it by Megatron, not by our forward step."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    watch, loop = watched
    said, slow = [], iter(lambda: time.sleep(0.2) or len(said), None)
    monkeypatch.setattr(watch, "_heartbeat", SimpleNamespace(
        beat=lambda doing: said.append(doing),
        note=lambda doing, alone=False: said.append((doing, alone)),
    ))  # fmt: skip
    monkeypatch.setattr(
        loop.training, "build_train_valid_test_data_iterators",
        lambda provider: (RerunDataIterator(slow), RerunDataIterator(iter([7])), None),
    )  # fmt: skip
    step = loop.train_step

    def reads(iterator, model, optimizer, iteration=None):
        assert next(iterator) and next(iterator)
        return step(iterator, model, optimizer, iteration=iteration)

    monkeypatch.setattr(loop.training, "train_step", reads)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        train, valid, test = loop.training.build_train_valid_test_data_iterators(None)
        for iteration in range(2):
            loop.training.train_step(train, model, optimizer, iteration=iteration)
    seconds = watch.write("complete")["goodput"]["seconds"]
    assert seconds["data"] >= 0.8 and seconds["step"] + seconds["compile"] < 0.8
    reading = [("in step 2, reading a micro batch", True), ("in step 2", False)]
    assert said[-5:] == ["in step 2", *reading, *reading]
    assert next(valid) == 7 and test is None
    with pytest.raises(StopIteration):
        next(valid)


def test_a_step_in_which_another_rank_compiled_is_booked_as_compile(watched, monkeypatch):
    """Known when the step's span has ended; the wait for it is charged so, too."""
    from megatron.training import get_args

    from megacpp_mcore.training.gpu import readback

    watch, loop = watched
    get_args().train_iters = 9
    asked = []

    def on_any_rank(flags):
        asked.append(bool(flags[0]))
        return flags if len(asked) != 2 else torch.tensor([1.0, 0.0, 0.0])

    monkeypatch.setattr(readback, "on_any_rank", on_any_rank)
    watch.goodput = only_waits_take_time(watched_on(watch, monkeypatch))
    with watch.installed():
        loop.run()
    assert asked == [True, False, False]
    receipt = watch.write("complete")
    assert receipt["series_info"]["cold_steps"] == [1, 2]
    assert receipt["goodput"]["seconds"]["compile"] == 4.0
    assert receipt["goodput"]["seconds"]["step"] == 2.0


def test_a_step_that_compiles_is_booked_as_compile(watched, tmp_path, monkeypatch):
    from megacpp_mcore.training.gpu import watch as module

    watch, loop = watched
    counts = iter([5, 5, 9, 9, 9])  # before each of three steps, and behind the last two
    monkeypatch.setattr(module, "compilations", lambda: next(counts))
    with watch.installed():
        loop.run()
    receipt = watch.write("complete")
    assert receipt["series_info"]["cold_steps"] == [1, 2]
    seconds, series = receipt["goodput"]["seconds"], receipt["series"]["ms"]
    assert seconds["compile"] * 1000 >= series[0] + series[1] - 1
    assert seconds["step"] * 1000 < series[2] + 1


def test_the_receipt_says_whose_weight_gradients_are_added_where_they_are_computed(
    watched, request
):
    watch, loop = watched
    request.addfinalizer(dispatch.forget)
    with watch.installed():
        dispatch.record(dispatch.Decision("embedding", "auto", "triton", "a test's", "no:where"))
        loop.run()
    notes = watch.write("complete")["notes"]
    assert sum("gradients of the embedding are added to the main gradient" in n for n in notes) == 1


ALL = "norm triton, linear te, moe_products hopper, linear_cross_entropy chunked, embedding triton"
ADDED = {
    # (gradient_accumulation_fusion, what served, the yardstick) -> who adds
    "all": (True, ALL, False, "Transformer Engine's modules, of the experts, of the head and of "
            "the embedding are"),
    "key off": (False, ALL, False, "the head and of the embedding are"),
    "torch's products": (True, "linear te, moe_products torch", False,
                         "Transformer Engine's modules are"),
    "one of a pipeline's ranks": (True, "linear te, embedding reference, embedding triton", False,
                                  "Transformer Engine's modules and of the embedding are"),
    "Megatron's head and linears": (True, "linear reference, linear_cross_entropy megatron, "
                                    "embedding triton", False, "the embedding are"),
    "yardstick": (True, "core_attention flash_4", True, "Transformer Engine's modules are"),
    "none": (False, "linear te, linear_cross_entropy liger, embedding reference", False, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_who_adds_weight_gradients_is_of_the_backends_that_served(name):
    from megacpp_mcore.surfaces.registry import REGISTRY
    from megacpp_mcore.training.gpu.receipt import _ALWAYS, _WITH_THE_KEY, who_adds_weight_gradients

    for surface, backend in (_WITH_THE_KEY | _ALWAYS).keys() - {("moe_products", "hopper")}:
        assert backend in {known.name for known in REGISTRY[surface].backends}
    fused, served, yardstick, expected = ADDED[name]
    pairs = (pair.split() for pair in served.split(", "))
    backends = [{"surface": surface, "observed": observed} for surface, observed in pairs]
    note = who_adds_weight_gradients(fused, backends, yardstick)
    if expected is None:
        assert note is None
    else:
        assert note.startswith(f"weight gradients of {expected} added to the main gradient ")


@pytest.mark.parametrize("column, value", [("loss", math.nan), ("norm", math.inf)])
@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_a_step_that_is_not_finite_ends_the_run_before_a_checkpoint(
    watched, monkeypatch, column, value, saved_after
):
    """Step 2, with a save right after it, after the next one, or later."""
    from megatron.training import get_args

    from megacpp_mcore.training.gpu.watch import NotFiniteError

    watch, loop = watched
    get_args().train_iters, loop.steps = 9, saved_after
    watched_on(watch, monkeypatch)
    step, started, saved = loop.train_step, [], []

    def broken(forward_step, model, optimizer, iteration=None):
        started.append(iteration + 1)
        done = list(step(forward_step, model, optimizer, iteration=iteration))
        if iteration == 1 and column == "loss":
            done[0] = {"lm loss": torch.tensor(value)}
        elif iteration == 1:
            done[5] = value
        return tuple(done)

    loop.training.train_step = broken
    loop.training.save_checkpoint_and_time = lambda iteration, model: saved.append(iteration)
    with pytest.raises(NotFiniteError, match=f"^step 2: .* is {value}"), watch.installed():
        loop.run()
    assert not saved and watch.iteration == 2
    assert started == [1, 2, 3][: saved_after if saved_after < 3 else 3]
    watch.drain()  # the step after it is forgotten
    assert watch.write("failed", "not finite")["series"]["step"] == [1]


def test_a_signalled_run_of_one_rank_ends_after_its_step(watched, monkeypatch):
    from megatron.training import global_vars, training

    watch, _ = watched
    handler = global_vars.get_signal_handler()
    with watch.installed():
        assert training.get_signal_handler().signals_received() == [False]
        monkeypatch.setattr(handler, "_signal_received", True)
        assert training.get_signal_handler().signals_received() == [True]


def test_a_step_that_megatron_ends_to_run_it_again_elsewhere_is_no_step(watched, monkeypatch):
    """As train_step returns when a result was rejected twice (schedule.rerun_mode): no losses, save
    the step before, exit with 16."""
    watch, loop = watched
    step = loop.train_step

    def rejected(iterator, model, optimizer, iteration=None):
        if iteration < 2:
            return step(iterator, model, optimizer, iteration=iteration)
        return {}, True, True, True, 16, None, None, 0

    monkeypatch.setattr(loop.training, "train_step", rejected)
    with watch.installed():
        model, optimizer, _ = loop.training.setup_model_and_optimizer(None)
        done = [loop.training.train_step(None, model, optimizer, iteration=n) for n in range(3)]
    assert done[2] == ({}, True, True, True, 16, None, None, 0)
    assert watch.iteration == 2
    assert watch.write("failed", "16")["series"]["step"] == [1, 2]


def test_a_loop_that_breaks_leaves_a_receipt_that_says_so(watched, tmp_path, monkeypatch):
    from megacpp_mcore.training.gpu.train import _record_end

    watch, loop = watched
    device = watched_on(watch, monkeypatch)
    with pytest.raises(RuntimeError) as caught, watch.installed():
        loop.run(stop_at=2)
    device.finish()  # the second step; no reading may wait for a GPU that has failed
    device.on_wait = pytest.fail
    _record_end(watch, caught.value)
    result = receipts.read(tmp_path / "out" / "receipt.json")["result"]
    assert result["status"] == "failed" and result["steps"] == 2
    assert result["reason"] == "after step 2: RuntimeError: out of memory"


def test_out_of_memory_names_the_largest_consumers(watched, monkeypatch, capsys):
    from megacpp_mcore.training.gpu.train import _record_end

    watch, loop = watched
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.current": 2**30})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    _record_end(watch, torch.OutOfMemoryError("CUDA out of memory"))
    said = capsys.readouterr().err
    assert "GPU memory of rank 0 while the model was being built: 2.00 GiB on the device" in said
    with watch.installed():
        loop.run()
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ):
        _record_end(watch, error)
        said = capsys.readouterr().err
        assert "GPU memory of rank 0: 2.00 GiB on the device, 1.00 GiB in use" in said
        assert "optimizer states" in said and "activations" in said
    _record_end(watch, RuntimeError("another error"))
    assert "GPU memory" not in capsys.readouterr().err


SEGMENTS = [
    {"segment_pool_id": pool, "total_size": size}
    for pool, size in (((0, 0), 5 * 2**30), ((0, 1), 2**31), ((7, 0), 2**29))
]


@pytest.mark.parametrize(
    ("impl", "said"),
    [("full_iteration", "CUDA graphs hold 2.50 GiB"), ("none", None)],
)
def test_out_of_memory_names_what_cuda_graphs_hold(watched, monkeypatch, impl, said):
    from megatron.training import get_args

    watch, loop = watched
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.current": 2**30})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: asked.append(1) or SEGMENTS)
    with watch.installed():
        loop.run()
    asked.clear()
    get_args().cuda_graph_impl = impl
    lines = watch.memory_report().splitlines()
    found = [line for line in lines if "CUDA graphs" in line]
    assert (len(found), len(asked)) == ((1, 1) if said else (0, 0))
    assert said is None or found[0].startswith(f"  {said} of what torch has reserved")
    assert "to use less" in lines[-1]


def test_a_run_that_megatron_resumes_goes_on_in_its_receipt(watched, tmp_path):
    from megatron.training import get_args as megatron_args

    from megacpp_mcore.training.gpu.watch import Watch
    from megacpp_mcore.training.heartbeat import Heartbeat

    watch, loop = watched
    with watch.installed():
        loop.run()
    watch.write("interrupted", "stopped")
    megatron_args().iteration = loop.first = 2  # Megatron has loaded the checkpoint of step 2
    loop.steps = 4
    again = Watch(watch.launch, Goodput(), Heartbeat(tmp_path / "heartbeat", 0, None))
    with again.installed():
        loop.run()
    again.write("complete")
    receipt = receipts.read(tmp_path / "out" / "receipt.json")
    assert receipt["series"]["step"] == [1, 2, 3, 4]
    assert receipt["result"]["tokens"] == 4 * 4 * 32
    assert receipt["goodput"]["seconds"]["lost"] > 0  # step 3 was done twice
    assert "resumed from the checkpoint of step 2" in receipt["notes"]


def test_another_megatron_loop_is_refused(watched, monkeypatch):
    from megacpp_mcore.training.gpu.loop import WatchError

    watch, loop = watched
    monkeypatch.delattr(loop.training, "train_step")
    with pytest.raises(WatchError, match="train_step"), watch.installed():
        pass
    assert loop.training.evaluate == loop.evaluate  # nothing stays wrapped


def test_the_dataset_helper_needs_no_makefile(monkeypatch):
    from megatron.core.datasets import utils

    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    bridges.dataset_helper()
    utils.compile_helpers()  # unbridged it runs make where there is no Makefile, and exits


def test_train_on_gpus_refuses_what_it_cannot_do(gpu_recipe, small_recipe, overrides):
    def refused(what: str, gpus: int = 1, *more: str) -> None:
        with pytest.raises(MegacppError, match=what):
            launcher.launch_ranks(str(small_recipe), [*overrides, *more], gpus, None)

    refused("--gpus 0", 0)
    refused("schedule.global_batch_size = 4", 3)
    refused("launch.nnodes = 2", 1, "launch.nnodes=2")
    if torch.cuda.device_count() == 0:
        refused("CUDA shows 0 GPUs")
    with pytest.raises(LaunchError, match="without --gpus"):
        launcher.launch_ranks(str(small_recipe), [], 1, None)


@pytest.fixture
def on_a_machine_with_gpus(monkeypatch):
    """The launcher as on two GPUs, whose ranks end as told: (what they were started with, end)."""
    started, ends = [], [RanksOutcome(0)]
    monkeypatch.setattr(launcher, "visible", lambda: ["a GPU"] * 2)

    def ranks(module, argv, count):
        started.append((module, argv, count))
        return ends[-1]

    monkeypatch.setattr(launcher, "run_ranks", ranks)
    return started, ends


def test_a_run_goes_back_before_its_ranks_start(
    on_a_machine_with_gpus, small_recipe, overrides, tmp_path, capsys
):
    started, _ = on_a_machine_with_gpus
    for iteration in (3, 6):
        saved = tmp_path / f"iter_000000{iteration}"
        saved.mkdir()
        (saved / "metadata.json").touch()
        (saved / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    where = [*overrides, f"checkpoint.load={tmp_path}"]
    with pytest.raises(MegacppError, match=r"--resume-from 5: .* of iterations 3, 6"):
        launcher.launch_ranks(str(small_recipe), where, 1, str(tmp_path / "out"), resume_from=5)
    assert not started
    launcher.launch_ranks(str(small_recipe), where, 1, str(tmp_path / "out"), resume_from=3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3" and started
    assert "it is now superseded-iter_0000006" in capsys.readouterr().err
    without = [*overrides, "checkpoint.load=null"]
    with pytest.raises(LaunchError, match=r"set checkpoint\.load"):
        launcher.launch_ranks(str(small_recipe), without, 1, None, resume_from=3)


def test_train_on_gpus_starts_ranks_with_the_recipes_arguments(
    on_a_machine_with_gpus, small_recipe, overrides, tmp_path
):
    started, _ = on_a_machine_with_gpus
    out = str(tmp_path / "out")
    assert launcher.launch_ranks(str(small_recipe), overrides, 2, out) == 0
    [(module, argv, count)] = started
    assert (module, count) == ("megacpp_mcore.pretrain", 2)
    recipe = load_recipe(str(small_recipe), [*overrides, "launch.nproc_per_node=2"])
    assert argv == [*recipe_argv(recipe), "--megacpp-out", out, *lower(recipe).argv]


def test_a_run_that_dies_says_what_happened_and_how_to_go_on(
    on_a_machine_with_gpus, small_recipe, overrides, watched, tmp_path, capsys
):
    _, ends = on_a_machine_with_gpus
    watch, loop = watched
    with watch.installed():
        loop.run()  # the receipt stays at "running", as a rank leaves it that is killed
    saved = tmp_path / "saved"
    where = [*overrides, f"checkpoint.load={saved}"]
    ends.append(RanksOutcome(137, "rank 1 of 2 was killed by SIGKILL."))
    assert launcher.launch_ranks(str(small_recipe), where, 2, str(tmp_path / "out")) == 137
    assert "SIGKILL. There is no complete checkpoint to resume from" in capsys.readouterr().err
    result = receipts.read(tmp_path / "out" / "receipt.json")["result"]
    assert (result["status"], result["reason"]) == ("failed", "rank 1 of 2 was killed by SIGKILL.")
    (saved / "iter_0000003").mkdir(parents=True)
    for name in (".metadata", "metadata.json"):
        (saved / "iter_0000003" / name).touch()
    with pytest.raises(LaunchError, match="give --resume"):
        # killed before the tracker was written
        launcher.launch_ranks(str(small_recipe), where, 2, None)
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(LaunchError, match="give --resume"):
        launcher.launch_ranks(str(small_recipe), where, 2, None)
    out = str(tmp_path / "out")
    assert launcher.launch_ranks(str(small_recipe), where, 2, out, resume=True) == 137
    assert f"complete checkpoint is {saved}/iter_0000003" in capsys.readouterr().err
