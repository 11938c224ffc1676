"""One rank of a GPU run: Megatron's `pretrain` with our model, batches, loss, data and receipt."""

import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.host.processes import END_S, end_within
from megacpp_mcore.layers import hooked_arguments
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.recipe import Recipe, patch_needs
from megacpp_mcore.recipe.check import megatrons_refusals
from megacpp_mcore.recipe.rules import cuda_graphs
from megacpp_mcore.stack import bridges, unpickling
from megacpp_mcore.training import sizes
from megacpp_mcore.training.gpu import memory, precompile, resume
from megacpp_mcore.training.gpu.rank_setup import Launch, LaunchError, check_agreement
from megacpp_mcore.training.gpu.torchrun import record_failure
from megacpp_mcore.training.heartbeat import Heartbeat
from megacpp_mcore.training.kernels import compile_all
from megacpp_mcore.training.packages import check_backends, check_logging, check_packages
from megacpp_mcore.training.run_folder import RunFolderError

# Megatron arguments without a recipe key that this entry point does not implement.
_UNSERVED = (
    "sft", "hybrid_context_parallel", "perform_rl_step", "logits_load_dir", "fim_data",
    "multiple_validation_sets", "full_validation", "per_dataset_sequences_path",
    "check_for_spiky_loss", "skip_train", "dataloader_fast_cache_load",
    "dataloader_defer_npy_index_mmap", "object_storage_cache_path", "inprocess_restart",
)  # fmt: skip
# Served by hooks; here on a head that is not called, unlike Megatron's.
_HOOKED = (*hooked_arguments.HOOKED, "logits_save_dir")


def train(launch: Launch) -> None:
    """Train as one rank; returns when Megatron's loop does.

    Raises LaunchError without CUDA, for Megatron arguments of another recipe, and for arguments
    that this entry point does not support; MissingPackageError, MissingPatchError, DispatchError,
    KernelBuildError, DataError, ResumeError and RunFolderError before the model is built. If the
    loop ends early, the receipt says so, and torchrun gets the reason.
    """
    try:
        _train(launch)
    except Exception as error:
        record_failure(error)
        end_within(END_S)
        raise


def _train(launch: Launch) -> None:
    goodput = Goodput()
    if not torch.cuda.is_available():
        raise LaunchError(
            f"torch sees no CUDA device, but recipe {launch.recipe.name} is for GPUs; on this "
            "machine run `megacpp train nam56r-tiny`"
        )
    dispatch.begin(say_each=False)
    dispatch.strict(launch.recipe.launch.strict)
    bridges.import_ops_only("mamba_ssm")
    check_packages(launch.recipe, yardstick=launch.yardstick)
    if not launch.yardstick:
        dispatch.check_read(launch.recipe)
        check_parameters_fit(launch.recipe, torch.cuda.get_device_properties("cuda").total_memory)
    patch_needs.check(launch.recipe)
    with bridges.hide_packages("jax"):  # Transformer Engine also imports its JAX support
        check_backends(launch.recipe)
    if not launch.yardstick:
        compile_all(launch.recipe)  # the launcher has, where there is one
    bridges.before_megatron()
    bridges.dataset_helper()
    bridges.shift_documents_on_the_device()
    from megacpp_mcore.training.data.blend import check_data

    check_data(launch.recipe)
    args = megatron_args(launch)
    if os.environ["RANK"] == "0":  # before other ranks read the folder: they wait for rank 0
        _check_folder(launch, args)
    with goodput.span("compile"):
        precompile.wait_for(launch.after)
    _pretrain(launch, args, goodput)


def check_parameters_fit(recipe: Recipe, there: int) -> None:
    """Refuse a recipe whose weights, gradients and optimizer states alone exceed a GPU's memory.

    there: bytes of one GPU. Raises OutOfMemoryError.
    """
    if recipe.optimizer.optimizer_cpu_offload:  # how much stays on the GPU is Megatron's choice
        return
    from megacpp_mcore.planner import memory as planned

    stages = range(recipe.parallel.pipeline_model_parallel_size)
    needed = max(planned.kept_of_stage(recipe, stage) for stage in stages)
    sizes.refuse(recipe, sizes.OF_PARAMETERS, "parameters", needed, there)


def megatron_args(launch: Launch) -> Any:
    """Megatron's validated arguments, which are also set in its globals.

    Raises LaunchError and MissingPackageError as `train`, and MegatronRefusal.
    """
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    # SIGTERM, as a scheduler sends it, ends the run after the step or the
    # second one after it, and saves
    sys.argv = [sys.argv[0], *launch.argv, "--exit-signal-handler"]
    # Megatron imports the libraries of all tokenizers: transformers alone takes 3 s.
    hidden = [] if _takes_transformers(launch.argv) else ["transformers"]
    with bridges.hide_packages(*hidden), megatrons_refusals():
        from megacpp_mcore.training.data import megatron_tokenizer

        megatron_tokenizer.serve()
        args = parse_and_validate_args()
        core_transformer_config_from_args(args)  # validates, too
    check_agreement(launch, args)
    # A run may be resumed with more steps: the schedule is the recipe's, its position the
    # checkpoint's. Megatron would refuse a schedule that is not the checkpoint's.
    args.override_opt_param_scheduler = not args.use_checkpoint_opt_param_scheduler
    _check_served(args)
    check_logging(args)
    return args


def _check_served(args: Any) -> None:
    """Refuse the arguments that a run would ignore, or serve in part."""
    if unserved := hooked_arguments.flags(args, _UNSERVED):
        raise LaunchError(
            f"megacpp_mcore.pretrain does not support {unserved}; use Megatron-LM's "
            "pretrain_hybrid.py with our --spec"
        )
    hooked_arguments.refuse(args, _HOOKED)
    captured = args.cuda_graph_impl == "full_iteration"
    if captured and (trace := hooked_arguments.flags(args, ("moe_routing_trace_path",))):
        raise LaunchError(
            f"{trace} records what hooks on modules see, and none runs in a captured step; set "
            'launch.cuda_graph_impl = "none"'
        )


def _takes_transformers(argv: Sequence[str]) -> bool:
    """Whether the tokenizer of Megatron's arguments may be one of the package's."""
    named = dict(pair for pair in pairwise(argv) if pair[0].startswith("--tokenizer"))
    kind, model = named.pop("--tokenizer-type", None), named.pop("--tokenizer-model", "")
    is_ours = kind == "HuggingFaceTokenizer" and model.endswith(".json")
    return bool(named) or not (is_ours or (kind == "NullTokenizer" and not model))


def config_container(launch: Launch, args: Any) -> Any:
    """Megatron's PretrainConfigContainer around our model config, or for the yardstick its own.

    args: of `megatron_args`. The layers' settings are in the model's config.
    """
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megacpp_mcore.training.gpu.model import (
        MegacppModelConfig,
        YardstickModelConfig,
        model_config,
    )

    config_class = YardstickModelConfig if launch.yardstick else MegacppModelConfig
    return pretrain_cfg_container_from_args(args, model_config(args, launch.recipe, config_class))


def _check_folder(launch: Launch, args: Any) -> None:
    """Make the run resume from a complete checkpoint, or refuse a folder with another receipt."""
    can_repair = args.load and args.ckpt_format == "torch_dist"
    if can_repair and (said := resume.repair_tracker(args.load)):
        print(f"megacpp: {said}", file=sys.stderr, flush=True)
    receipt = launch.out / "receipt.json"
    if can_repair and (checkpoint := resume.newest(args.load)):
        resume.check(checkpoint, verify=launch.recipe.checkpoint.verify_checksums)
    resumes = bool(args.load) and (Path(args.load) / resume.TRACKER).is_file()
    if receipt.exists() and not resumes:
        raise RunFolderError(
            f"{launch.out} has the receipt of a run, but there is no checkpoint in {args.load} to "
            "resume from: move the folder away, or choose another --out"
        )
    resume.check_same_run(launch.recipe, receipt)


def _pretrain(launch: Launch, args: Any, goodput: Goodput) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megacpp_mcore.training.checkpoints import writer
    from megacpp_mcore.training.gpu import batch, yardstick
    from megacpp_mcore.training.gpu.compilations import captured_steps_released
    from megacpp_mcore.training.gpu.data import datasets_provider
    from megacpp_mcore.training.gpu.watch import Watch

    if cuda_graphs.was_auto(launch.recipe):
        _record_capture(launch.recipe)
    unpickling.install()
    writer.install()
    writer.keep_no_process(args.async_save)
    step = yardstick.forward_step if launch.yardstick else batch.forward_step
    rank, timeout = int(os.environ["RANK"]), launch.recipe.launch.heartbeat_timeout_s
    heartbeat = Heartbeat(
        launch.out / "heartbeat", rank, timeout, lambda why: record_failure(HungError(why))
    )
    watch = Watch(launch, goodput, heartbeat)
    with captured_steps_released(), heartbeat:
        try:
            with watch.installed():
                try:
                    pretrain(
                        config_container(launch, args),
                        datasets_provider,
                        ModelType.encoder_or_decoder,
                        step,
                    )
                except SystemExit:  # a signal, a time limit: its last step is a step as any other
                    watch.drain()
                    raise
                watch.drain()
        except BaseException as error:
            _record_end(watch, error)
            raise
    watch.write("complete")
    if watch.receipt is not None:
        print(f"receipt {watch.path}", flush=True)
    _end_exchanges()
    torch.distributed.destroy_process_group()


def _end_exchanges() -> None:
    """Free what a dispatcher of tokens shares between ranks, while all of them are there."""
    if adapter := sys.modules.get("megacpp_mcore.layers.deepep"):
        adapter.close()


def _record_capture(recipe: Recipe) -> None:
    """Put what the recipe's `auto` came to among the decisions of the run and its receipt."""
    impl, origin = recipe.launch.cuda_graph_impl, recipe.origins[cuda_graphs.IMPL]
    reason = "no rule is against it" if impl != "none" else origin.removeprefix("auto, but ")
    dispatch.record(
        dispatch.Decision(
            surface="cuda_graph", requested=cuda_graphs.AUTO, observed=impl, reason=reason,
            implementation="megatron.core.full_cuda_graph:FullCudaGraphWrapper",
        )
    )  # fmt: skip


class HungError(MegacppError):
    """A rank has made no progress."""


def _record_end(watch: Any, error: BaseException) -> None:
    """Write the receipt of a run that ended early. Its own errors never replace `error`."""
    if memory.is_out_of_memory(error):
        with contextlib.suppress(RuntimeError):  # CUDA itself may no longer answer
            print(watch.memory_report(), file=sys.stderr, flush=True)
    watch.read_what_is_there()
    reason = f"after step {watch.iteration}: {type(error).__name__}: {error}"
    requested = isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and not error.code  # exit_duration_in_mins, a signal
    )
    with contextlib.suppress(MegacppError):  # the disk may be full
        watch.write("interrupted" if requested else "failed", reason[:2000])
