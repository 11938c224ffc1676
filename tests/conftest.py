"""What every test process needs before the first import of Megatron, and a recipe in miniature."""

import gc
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import warm

# One thread a worker: pytest runs a worker per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor need not try each vector instruction of this CPU with a program and a Python that imports
# torch, in every process that compiles: it makes scalar code.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A shell starts what stands behind `&` deaf to Ctrl-C, and so would be all that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite keeps nothing for the user, and finds nothing of an earlier run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["SUITE_FOLDER"] = tempfile.mkdtemp(prefix="megacpp-tests-")
    os.environ["XDG_CACHE_HOME"] = f"{os.environ['SUITE_FOLDER']}/cache"

from left_behind import MARK, Marked

from megacpp_mcore.recipe import Recipe, load_recipe


def pytest_configure(config: pytest.Config) -> None:
    """Before the first test module is imported. The process that only leads others imports no
    Megatron, but has the server of `warm`, one for all."""
    from megacpp_mcore.surfaces.workload import current_device

    if current_device() == "cpu":
        # Kernels run in Triton's interpreter. Triton reads it as it is imported, which dynamo does.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SHARED] = warm.python()
        if not sys.dont_write_bytecode:
            ahead = Path(__file__).with_name("rewrite_ahead.py")
            config.add_cleanup(subprocess.Popen([sys.executable, ahead]).wait)
        return
    from megacpp_mcore.stack import bridges

    bridges.before_megatron()
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.search_once()


SMALL = """
extends = "nam56r-tiny"
description = "every letter and an MTP depth, as small as they go"

[model]
pattern = "AEMR"
depth = 4
hidden_size = 32
ffn_hidden_size = 64
num_attention_heads = 2
seq_length = 32

[attention]
q_lora_rank = 8
kv_lora_rank = 8
qk_head_dim = 8
qk_pos_emb_head_dim = 8
v_head_dim = 8

[moe]
moe_ffn_hidden_size = 32
moe_shared_expert_intermediate_size = 32

[mamba3]
mamba_num_heads = 2
mamba_head_dim = 8
mamba_state_dim = 8
mamba_num_groups = 1
chunk_size = 16

[m2rnn]
k_head_dim = 8
v_head_dim = 8

[schedule]
train_iters = 8
micro_batch_size = 2
global_batch_size = 4
lr_warmup_iters = 2
eval_interval = 4
eval_iters = 1

[checkpoint]
save_interval = 3
"""


# Files whose fixtures take many seconds: one worker of pytest-xdist has all tests of each. It has
# them first, so that none is alone at the end.
ON_ONE_WORKER = (
    "tests/gpu/test_parallel_losses.py",
    "tests/patching/test_shipped_lane.py",
    "tests/recipe/test_megatrons_refusals.py",
    "tests/recipe/test_recipe_check.py",
    "tests/stack/test_compile_bridge.py",
    "tests/test_wheel.py",
    "tests/training/test_cpu_lane.py",
    "tests/training/test_distributed_training.py",
    "tests/training/test_main_grads.py",
)


# Files of which most tests take long, model builds and Triton's interpreter above all; `make check`
# leaves them out, unread, with the tests that are marked `slow` one by one.
SLOW_FILES = (
    "tests/bench/test_bench_layer.py",
    "tests/bench/test_bench_model.py",
    "tests/bench/test_bench_operator.py",
    "tests/bench/test_upstream.py",
    "tests/inference/test_generate.py",
    "tests/kernels/test_core_attention.py",
    "tests/kernels/test_core_attention_tf32.py",
    "tests/kernels/test_embedding.py",
    "tests/kernels/test_m2rnn_kernel.py",
    "tests/kernels/test_mamba3_kernel.py",
    "tests/kernels/test_mamba_ssm_mimo.py",
    "tests/kernels/test_mla_rope.py",
    "tests/kernels/test_mla_up.py",
    "tests/kernels/test_moe_experts.py",
    "tests/kernels/test_moe_hopper.py",
    "tests/kernels/test_moe_routed.py",
    "tests/kernels/test_rope_qk.py",
    "tests/layers/test_attention.py",
    "tests/layers/test_hooks.py",
    "tests/layers/test_loss.py",
    "tests/layers/test_m2rnn_layer.py",
    "tests/layers/test_mamba3_layer.py",
    "tests/layers/test_moe.py",
    "tests/layers/test_moe_norm.py",
    "tests/layers/test_moe_residual.py",
    "tests/layers/test_moe_routers.py",
    "tests/layers/test_moe_whole.py",
    "tests/layers/test_recompute.py",
    "tests/layers/test_stack.py",
    "tests/patching/test_patch_at_once.py",
    "tests/patching/test_patch_export.py",
    "tests/patching/test_patch_safety.py",
    "tests/patching/test_patch_verify.py",
    "tests/planner/test_search.py",
    "tests/stack/test_experts_bridge.py",
    "tests/stack/test_unpickling.py",
    "tests/surfaces/test_admission.py",
    "tests/surfaces/test_walks.py",
    "tests/test_bad_input.py",
    "tests/test_examples.py",
    "tests/test_fuzz.py",
    "tests/test_interpreter.py",
    "tests/training/entry/test_entry_batch.py",
    "tests/training/entry/test_entry_ends.py",
    "tests/training/entry/test_entry_launch.py",
    "tests/training/entry/test_entry_watch.py",
    "tests/training/test_compilations.py",
    "tests/training/test_data_tokenizer.py",
    "tests/training/test_heartbeat.py",
    "tests/training/test_precompile.py",
)


# Of every process that the suite starts, xdist's workers included.
SUITE = Marked(os.environ.setdefault(MARK, uuid.uuid4().hex))


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session, exitstatus):
    """The suite leaves no process and no shared memory behind, or it fails."""
    if hasattr(session.config, "workerinput"):
        return
    warm.close()
    if not session.config.getoption("numprocesses", None):
        # What ends with an interpreter, and so has ended with xdist's workers, ends here.
        multiprocessing.util._exit_function()
        multiprocessing.resource_tracker._resource_tracker._stop()
    shutil.rmtree(os.environ["SUITE_FOLDER"], ignore_errors=True)
    if left := SUITE.left():
        print("\nThe test suite left behind:", *left, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_ignore_collect(collection_path, config):
    file = collection_path.relative_to(config.rootpath).as_posix()
    return True if file in SLOW_FILES and "not slow" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    for item in items:
        if _file(item) in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    # The last file first: tests of training take and wait longest, and should not end alone.
    files = list(dict.fromkeys(map(_file, items)))
    items.sort(key=lambda item: -files.index(_file(item)))


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def pytest_runtest_setup(item):
    import torch

    # What a test draws without a seed is the same whichever tests its worker had before. Without a
    # device torch notes the stack of every caller who seeds one.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    if "megatron.training.argument_utils" in sys.modules:  # or a test that needs none would import
        import megatron_parser

        megatron_parser.parse_once()
    if "megatron.core.tensor_parallel.random" in sys.modules:
        import share_storage

        share_storage.compile_quickly()


def pytest_collection_finish(session):
    """What is there now stays until the end: no collection of a test visits it, which costs 0.3 s
    of the time of each. Triton's interpreter makes so many objects that collections as often as
    Python has them take a thirtieth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Workers begin with torch and Megatron imported, once for all of them."""
    for spec in specs:
        spec.python = warm.python()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # `--dist loadgroup` would do it, but xdist 3.8 renames the tests for it, which pytest 9.2 does
    # not notice.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file in ON_ONE_WORKER:
                return file
            if "admission" in nodeid.partition("[")[0]:  # one definition for all backends
                return nodeid.partition("[")[0]
            # What a GPU test compiles, those with the same first parameter take as well.
            return nodeid.split("-")[0] if file.startswith("tests/gpu/") else nodeid

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level dataset of this package's own source."""
    from megacpp_mcore.training.data.build import build
    from megacpp_mcore.training.data.text import TextFiles

    source = Path(__file__).parent.parent / "megacpp_mcore"
    prefix = tmp_path_factory.mktemp("corpus") / "package"
    build(TextFiles([source], ["*.py"]), prefix, quiet=True)
    return prefix


@pytest.fixture(scope="session")
def small_settings() -> str:
    """The small recipe's file, without data."""
    return SMALL


@pytest.fixture(scope="session")
def small_text(corpus: Path) -> str:
    """The small recipe's file, reading the corpus."""
    return f'{SMALL}\n[data]\ndata_path = ["{corpus}"]\n'


@pytest.fixture
def small_recipe(tmp_path: Path, small_text: str) -> Path:
    """The path of the small recipe."""
    path = tmp_path / "small.toml"
    path.write_text(small_text)
    return path


@pytest.fixture
def small(small_recipe: Path) -> Recipe:
    """The small recipe, loaded."""
    return load_recipe(str(small_recipe))
