"""The GPU entry in tests: its arguments, Megatron around it, and a fake of its loop."""

import contextlib
from types import SimpleNamespace

import torch
from late_gpu import LateGpu

from megacpp_mcore import dispatch
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.cpu.megatron_setup import single_process
from megacpp_mcore.training.gpu.rank_setup import Launch, recipe_argv

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500"}  # fmt: skip

CACHES = (
    "TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING", "TORCHINDUCTOR_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)  # fmt: skip


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


def watched_on(watch, monkeypatch) -> LateGpu:
    device = LateGpu()
    monkeypatch.setattr(watch, "_device", device)
    return device
