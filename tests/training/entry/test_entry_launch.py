"""The GPU entry without a GPU: its arguments, its environment, and what it refuses."""

import errno
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import receipt_samples as samples
import torch
from launched import arguments, megatron
from torch.distributed.checkpoint.metadata import Metadata

from megacpp_mcore import receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import cache_folder
from megacpp_mcore.layers.hooked_arguments import HookedArgumentError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.check import MegatronRefusal
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.gpu import launcher
from megacpp_mcore.training.gpu.compilations import triton_cache_entries
from megacpp_mcore.training.gpu.rank_setup import LaunchError, launch, recipe_argv
from megacpp_mcore.training.gpu.torchrun import RanksOutcome


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


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        (["--save-activations-interval", "1"], []),
        (["--save-tokens-per-expert-interval", "1"], []),
        (["--save-dgrads-interval", "1"], []),
        (
            ["--logits-save-dir", "logits", "--logits-save-top-k", "4"],
            [
                "checkpoint.save=saved", "checkpoint.save_interval=5", "checkpoint.async_save=true",
                "checkpoint.use_persistent_ckpt_worker=true",
            ],
        ),
    ],
)  # fmt: skip
def test_what_hooks_on_modules_would_miss_is_refused(small_recipe, overrides, words, sets):
    """Megatron saves what they see; our layers do not call all of their modules."""
    recipe = load_recipe(str(small_recipe), [*overrides, *sets])
    why = f"{words[0]} saves what hooks on modules see"
    argv = [*arguments(recipe), *words]
    with pytest.raises(HookedArgumentError, match=why), megatron(launch(argv)):
        pass


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_a_trace_of_the_router_is_refused_in_a_captured_step(
    small_recipe, overrides, tmp_path, impl
):
    """Its hooks run where a step runs in Python."""
    sets = [f"launch.cuda_graph_impl={impl}", "schedule.check_for_nan_in_loss_and_grad=false"]
    recipe = load_recipe(str(small_recipe), [*overrides, *sets])
    argv = [*arguments(recipe), "--moe-routing-trace-path", str(tmp_path)]
    if impl == "none":
        with megatron(launch(argv)) as args:
            assert args.moe_routing_trace_path == str(tmp_path)
        return
    why = "--moe-routing-trace-path records what hooks on modules see.*captured"
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
