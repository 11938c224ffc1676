"""Kernels compiled before a run's model is built: what each part runs, and the launcher's side."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from left_behind import Marked, wait_until

from megacpp_mcore.host.gpus import Gpu
from megacpp_mcore.kernels.nvcc import KernelBuildError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.changes import changed_keys
from megacpp_mcore.training import one_process
from megacpp_mcore.training.gpu import launcher, precompile, precompile_part, rank_setup
from megacpp_mcore.training.gpu.torchrun import RanksOutcome

GPU = Gpu("NVIDIA H200", (9, 0))
PARTS = ["A", "E", "M", "R", "ends"]
# Writes what it was started with, and does as a file of its name in the folder HOW says.
FAKE = """
import json, os, sys, time
from pathlib import Path

part, how = sys.argv[1], Path(os.environ["HOW"])
names = ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
told = {"argv": sys.argv[1:], "session": os.getsid(0), "pid": os.getpid()}
told |= {name: os.environ.get(name) for name in names}
(how / f"{part}.tmp").write_text(json.dumps(told))
(how / f"{part}.tmp").rename(how / f"{part}.json")
script = how / part
if script.is_file():
    exec(script.read_text())
print("megacpp: took 2.1 s")
print("a warning of a package's as it ends: 7.0")
"""


@pytest.fixture
def how(tmp_path, monkeypatch):
    """A machine with a GPU and empty caches, whose parts are FAKE: what they do, and have done."""
    (tmp_path / "a_part.py").write_text(FAKE)
    folder = tmp_path / "how"
    folder.mkdir()
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for name, value in {"HOW": str(folder), "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MEGACPP_BACKENDS"):
        monkeypatch.delenv(name, raising=False)
    for name in precompile._CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(precompile, "_PART", "a_part")
    monkeypatch.setattr(precompile, "visible", lambda: [GPU])
    return folder


def compiled(how: Path) -> list[str]:
    """The parts that have been started since the last call."""
    found = sorted(how.glob("*.json"))
    names = [path.stem for path in found]
    for path in found:
        path.unlink()
    return names


def launch(*overrides: str, gpus: int = 1, out: str = "out", recipe: str = "nam56r") -> None:
    with precompile.beside(load_recipe(recipe, overrides), gpus, Path(out)) as processes:
        precompile.wait_for(processes)


def told(how: Path) -> dict[str, dict]:
    import json

    return {path.stem: json.loads(path.read_text()) for path in how.glob("*.json")}


# --- what a part runs


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_both_directions_and_the_update(small, part, packed, monkeypatch):
    if packed:
        masking = "data.dataloader_inter_document_masking=true"
        small = load_recipe(small.source, [*small.overrides, masking])
    kept, on_cpu = {}, one_process.on_cpu

    def kept_as_it_was(model, args):
        kept["model"] = model
        kept["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        return on_cpu(model, args)

    monkeypatch.setattr(one_process, "on_cpu", kept_as_it_was)
    precompile_part.compile_part(part, small, "cpu")
    model, before = kept["model"], kept["before"]
    named = dict(model.named_parameters())
    changed = {name for name, p in named.items() if not torch.equal(p, before[name])}
    layers = {name for name in named if ".layers." in name and "mtp.layers" not in name}
    others = set(named) - layers
    if part == "ends":
        assert not layers and changed == others, others - changed
        assert any(name.startswith("mtp.") for name in others)
    else:
        assert len(model.decoder.layers) == 1 and layers
        assert changed == layers, (layers - changed, changed - layers)


def test_parts_are_the_letters_of_the_pattern_and_of_mtp():
    assert precompile_part.parts(load_recipe("nam56r")) == PARTS
    without = load_recipe("nam56r", ["model.pattern=MM", "model.depth=2", "mtp.pattern=AE"])
    assert precompile_part.parts(without) == ["M", "A", "E", "ends"]


FULL = [
    "parallel.recompute_granularity=full", "parallel.recompute_method=uniform",
    "parallel.recompute_num_layers=1",
]  # fmt: skip
BLOCKS = [
    'recompute.attention=["core_attn"]', 'recompute.moe=["act"]', "recompute.mamba3=core",
    "recompute.m2rnn=core", "recompute.layernorm=true", "launch.cuda_graph_impl=none",
    "attention.mla_down_proj_fusion=true",
]  # fmt: skip


@pytest.mark.parametrize("recompute", [FULL, BLOCKS], ids=["full", "blocks"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_runs_sizes_and_precision(part, recompute):
    """Triton's keys are sizes and dtypes: only what makes a run one process and its model one layer
    may differ."""
    spread = [
        "launch.nproc_per_node=8", "parallel.expert_model_parallel_size=8",
        "moe.moe_token_dispatcher_type=flex", *recompute,
    ]  # fmt: skip
    run = load_recipe("nam56r", spread)
    own = precompile_part.part_recipe(part, run)
    differ = changed_keys(run.to_dict(), own.to_dict())
    allowed = {
        "backends.moe_dispatch", "launch.cuda_graph_impl", "launch.nproc_per_node", "model.depth",
        "model.pattern", "moe.moe_token_dispatcher_type", "mtp.pattern",
        "parallel.expert_model_parallel_size", "parallel.overlap_grad_reduce",
        "parallel.overlap_param_gather", "schedule.global_batch_size",
    }  # fmt: skip
    allowed |= {  # of the letter's own none
        "A": {"recompute.moe", "recompute.mamba3", "recompute.m2rnn"},
        "E": {"recompute.attention", "recompute.mamba3", "recompute.m2rnn"},
        "M": {"recompute.attention", "recompute.moe", "recompute.m2rnn", "recompute.layernorm"},
        "R": {"recompute.attention", "recompute.moe", "recompute.mamba3"},
        "ends": {key for key in differ if "recompute" in key},
    }[part]  # fmt: skip
    allowed |= {"attention.mla_down_proj_fusion"} if part != "A" else set()
    allowed |= set() if part == "ends" else {"model.vocab_size", "mtp.mtp_num_layers"}
    assert set(differ) <= allowed, differ
    assert own.precision.gradient_accumulation_fusion and own.plan.depth == 1
    assert own.world_size == 1 and own.launch.cuda_graph_impl == "none"
    if part == "ends":
        assert own.mtp.mtp_num_layers == run.mtp.mtp_num_layers and "E" not in own.plan.letters
    else:
        assert own.plan.letters == {part}


def test_a_part_of_a_recipe_with_dsa_layers_is_of_its_mla_ones():
    dsa = ["attention.kind=mla", "attention.dsa_ranks=[2]", "attention.dsa_indexer_loss_coeff=1e-3"]
    dsa += [f"attention.dsa_indexer_{key}" for key in ("n_heads=4", "head_dim=64", "topk=64")]
    run = load_recipe("nam56r", dsa)
    assert {"+", "D"} <= run.plan.symbols
    assert precompile_part.part_recipe("A", run).plan.symbols == {"+"}


def test_a_part_that_is_not_the_recipes_is_refused(capsys):
    assert precompile_part.main(["D", "--megacpp-recipe", "nam56r"]) == 2
    assert capsys.readouterr().err == "megacpp: D: choose A, E, M, R, ends\n"


PART = """
import sys, threading
from megacpp_mcore.training.gpu import precompile_part

def compile_part(part, recipe, done):
    threading.Thread(target=lambda: threading.Event().wait(300)).start()  # as a package's
    print(part, recipe.name)
    if part == "E":
        raise RuntimeError("no E here")
    done()

precompile_part.compile_part = compile_part
precompile_part.apply_environment = precompile_part._as_in_a_rank = lambda *args: None
status = precompile_part.main([sys.argv[1], "--megacpp-recipe", "nam56r"])
print(status)
"""


def test_a_part_says_how_long_it_took_and_ends_at_once():
    done = subprocess.run([sys.executable, "-c", PART, "A"], capture_output=True, text=True)
    took = precompile_part.TOOK.format(r"[\d.]+")
    assert done.returncode == 0 and re.fullmatch(rf"A nam56r\n{took}\n", done.stdout), done


def test_a_part_that_fails_says_so_last():
    with subprocess.Popen(
        [sys.executable, "-c", PART, "E"], stdout=-1, stderr=-1, text=True
    ) as run:
        assert [run.stdout.readline() for _ in range(2)] == ["E nam56r\n", "1\n"]
        run.kill()
        assert run.stderr.read().endswith("RuntimeError: no E here\n")


@pytest.mark.parametrize("pattern, letter", [("AEMR", "M"), ("AER", "R"), ("AE", "A"), ("E", "E")])
def test_the_ends_are_built_with_the_cheapest_letter(pattern, letter):
    sizes = [f"model.pattern={pattern}", f"model.depth={len(pattern)}", "mtp.mtp_num_layers=0"]
    recipe = load_recipe("nam56r", [*sizes, "mtp.pattern=null"])
    assert precompile_part.part_recipe("ends", recipe).plan.letters == {letter}


@pytest.mark.parametrize("part, imported", [("M", False), ("ends", False), ("A", True)])
def test_only_a_part_with_attention_looks_for_its_backends(part, imported, monkeypatch):
    """FlashAttention-4 takes five seconds to import."""
    from megacpp_mcore import dispatch

    asked, choose = [], dispatch.choose
    monkeypatch.setattr(
        dispatch, "choose", lambda name, *args: asked.append(name) or choose(name, *args)
    )
    precompile_part._as_in_a_rank(part, load_recipe("nam56r-tiny"))
    assert ("core_attention" in asked) is imported


# --- the launcher's side


def test_each_part_has_a_process_on_a_gpu_in_turn(how, capsys, monkeypatch):
    launch("launch.nproc_per_node=2", gpus=2)
    found = told(how)
    assert list(found) and sorted(found) == PARTS
    assert [found[part]["CUDA_VISIBLE_DEVICES"] for part in PARTS] == ["0", "1", "0", "1", "0"]
    for part, process in found.items():
        words = [part, "--megacpp-recipe", "nam56r", "--megacpp-set", "launch.nproc_per_node=2"]
        assert process["argv"] == [*words, "--megacpp-out", "out"]
        assert process["session"] == process["pid"] != os.getpid()
        world = [process[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")]
        assert world == ["0", "1", "0", "1"]
    first, last = capsys.readouterr().err.splitlines()
    assert first == (
        "megacpp: compiling the kernels of A, E, M, R and of the model's ends in 5 processes: once"
    )
    assert re.fullmatch(
        r"megacpp: compiled them in [\d.]+ s: A 2 s, E 2 s, M 2 s, R 2 s, ends 2 s", last
    )
    assert compiled(how) == PARTS
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,6")
    launch("launch.nproc_per_node=2", "model.hidden_size=1792", gpus=2)
    found = told(how)
    assert [found[part]["CUDA_VISIBLE_DEVICES"] for part in PARTS] == ["5", "7", "5", "7", "5"]


def test_a_part_that_fails_is_a_line_and_the_others_are_waited_for(how, capsys):
    (how / "E").write_text("print('a traceback'); sys.exit('megacpp: no E here\\n\\n')")
    (how / "M").write_text("os.kill(os.getpid(), 9)")
    (how / "ends").write_text("sys.exit(3)")
    (how / "R").write_text("time.sleep(1); (how / 'done').touch()")
    launch()
    _, *failed, _ = capsys.readouterr().err.splitlines()
    ahead = "are compiled ahead, the ranks compile them:"
    assert failed == [
        f"megacpp: no kernels of E {ahead} no E here",
        f"megacpp: no kernels of M {ahead} it was killed by SIGKILL",
        f"megacpp: no kernels of the model's ends {ahead} status 3",
    ]
    assert (how / "done").exists() and compiled(how) == PARTS
    launch()
    assert compiled(how) == PARTS  # nothing says that they are compiled


def test_a_process_that_cannot_be_started_does_not_end_the_run(how, capsys, monkeypatch):
    start = precompile._start

    def all_but_m(name, *others):
        if name == "M":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(name, *others)

    monkeypatch.setattr(precompile, "_start", all_but_m)
    launch()
    assert compiled(how) == ["A", "E"]
    assert "are compiled ahead, the ranks compile them: [Errno 11]" in capsys.readouterr().err
    monkeypatch.setattr(precompile, "_start", start)
    launch()
    assert compiled(how) == PARTS  # no mark was left


def test_parts_that_take_too_long_are_killed_with_what_they_started(how, capsys, monkeypatch):
    marked = Marked()
    for name, value in marked.environment.items():
        monkeypatch.setenv(name, value)
    (how / "ends").write_text("import subprocess; subprocess.run(['sleep', '300'])")
    for part in PARTS[:-1]:
        (how / part).write_text("while not (how / 'ends.json').exists(): time.sleep(0.01)")

    def monotonic() -> float:
        """Past the limit when only the last part is there, however slow this machine is."""
        found = told(how)
        late = len(found) == len(PARTS) and not any(
            precompile._is_running(found[part]["pid"]) for part in PARTS[:-1]
        )
        return time.monotonic() + (precompile.LIMIT_S + 1 if late else 0)

    monkeypatch.setattr(precompile, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    began = time.monotonic()
    launch()
    assert time.monotonic() - began < precompile.LIMIT_S
    _, late, _ = capsys.readouterr().err.splitlines()
    assert late.startswith("megacpp: no kernels of the model's ends are"), late
    assert late.endswith("compile them: it took more than 180 s")
    assert not marked.left()


@pytest.mark.parametrize("change", ["recipe", "backends", "code", "gpu", "cache"])
def test_what_is_compiled_is_compiled_once(how, monkeypatch, capsys, change):
    launch()
    assert compiled(how) == PARTS
    capsys.readouterr()
    # nothing that kernels depend on: steps, data, checkpoints, the number of ranks, the folder
    same = [
        "schedule.train_iters=70_000", 'data.data_path=["x"]', "checkpoint.save=null",
        "checkpoint.save_interval=null", "launch.nproc_per_node=2",
    ]  # fmt: skip
    launch(*same, gpus=2, out="another")
    assert compiled(how) == [] and capsys.readouterr().err == ""
    sets = []
    if change == "recipe":
        sets = ["schedule.micro_batch_size=2"]
    elif change == "backends":
        monkeypatch.setenv("MEGACPP_BACKENDS", "norm=reference")
    elif change == "code":
        monkeypatch.setattr(precompile.lane, "code_sha256", lambda: "0" * 64)
    elif change == "gpu":
        monkeypatch.setattr(precompile, "visible", lambda: [Gpu("NVIDIA H100", (9, 0))])
    else:
        attention = Path(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])
        for mark in attention.iterdir():
            mark.unlink()
    launch(*sets)
    assert compiled(how) == PARTS


@pytest.mark.parametrize(
    "key", ["data.dataloader_inter_document_masking=true", "precision.grad_reduce_in_bf16=true",
            "moe.moe_router_topk=2", "launch.environment.NVTE_FLASH_ATTN=0"]
)  # fmt: skip
def test_every_key_that_a_kernel_depends_on_counts(key):
    before, after = load_recipe("nam56r"), load_recipe("nam56r", [key])
    assert precompile._digest(before, GPU) != precompile._digest(after, GPU)


def test_not_where_ranks_have_parts_of_layers_nor_without_a_gpu(how, monkeypatch, capsys):
    tensor = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    launch(*tensor, "launch.nproc_per_node=2", gpus=2)
    monkeypatch.setattr(precompile, "visible", lambda: [])
    launch()
    assert compiled(how) == [] and capsys.readouterr().err == ""


@pytest.fixture
def launches(monkeypatch):
    """launches(ranks): `megacpp train` with that in the place of run_ranks, as with GPUs."""
    monkeypatch.setattr(launcher, "check_packages", lambda recipe, yardstick: None)
    monkeypatch.setattr(launcher, "_check", lambda recipe, gpus, resume: None)
    monkeypatch.setattr(launcher, "compile_all", lambda recipe: None)

    def run(ranks, **words):
        monkeypatch.setattr(launcher, "run_ranks", ranks)
        return launcher.launch_ranks("nam56r", (), 1, "out", **words)

    return run


@pytest.mark.parametrize("yardstick", [False, True])
def test_ranks_start_while_parts_compile_and_wait_for_all_of_them(how, launches, capsys, yardstick):
    for part in PARTS:
        (how / part).write_text("while not (how / 'go').exists(): time.sleep(0.01)")

    def ranks(module, argv, count):
        processes = ()
        if "--megacpp-after" in argv:
            at = argv.index("--megacpp-after")
            processes = rank_setup._process_ids(argv[at + 1])
            wait_until(lambda: len(told(how)) == len(PARTS))
            assert set(processes) == {process["pid"] for process in told(how).values()}
            waiting = threading.Thread(target=precompile.wait_for, args=[processes])
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive() and "compiled them" not in capsys.readouterr().err
            (how / "go").touch()
            waiting.join(60)
            assert not waiting.is_alive()
        assert bool(processes) is not yardstick
        return RanksOutcome(0)

    assert launches(ranks, yardstick=yardstick) == 0
    assert compiled(how) == ([] if yardstick else PARTS)
    assert ("compiled them in" in capsys.readouterr().err) is not yardstick


def test_nothing_is_waited_for_where_nothing_is_compiled(how, launches):
    launch()
    assert launches(lambda module, argv, count: RanksOutcome("--megacpp-after" in argv)) == 0


def test_ranks_that_fail_before_the_parts_end_end_them(how, launches, monkeypatch, capsys):
    marked = Marked()
    for name, value in marked.environment.items():
        monkeypatch.setenv(name, value)
    for part in PARTS:
        (how / part).write_text("time.sleep(300)")

    def ranks(module, argv, count):
        wait_until(lambda: len(told(how)) == len(PARTS))
        return RanksOutcome(2, "rank 0 of 1 refuses")

    assert launches(ranks) == 2
    said = capsys.readouterr().err
    assert "compiled them" not in said and "SIGKILL" not in said
    assert not marked.left() and not Path(os.environ["TRITON_CACHE_DIR"]).exists()


def test_a_process_that_ended_is_not_waited_for():
    """Nor one whose parent has not yet asked for its status."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        precompile.wait_for([process.pid])
    precompile.wait_for([process.pid])


def test_a_refusal_while_they_compile_kills_them(how, monkeypatch):
    for part in PARTS:
        (how / part).write_text("time.sleep(300)")
    marked = Marked()
    for name, value in marked.environment.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(KernelBuildError, match="no nvcc"),
        precompile.beside(load_recipe("nam56r"), 1, Path("out")),
    ):
        wait_until(lambda: len(told(how)) == len(PARTS))
        raise KernelBuildError("no nvcc")
    assert not marked.left()
    assert not Path(os.environ["TRITON_CACHE_DIR"]).exists()  # no mark


# A rank that waits for the parts, and says so as a file of the folder HOW.
RANK = """
import os, sys
from pathlib import Path
from megacpp_mcore.training.gpu import precompile

Path(os.environ["HOW"], "rank").touch()
after = sys.argv[sys.argv.index("--megacpp-after") + 1]
precompile.wait_for([int(pid) for pid in after.split(",")])
"""
LAUNCH = """
import sys, time
from megacpp_mcore import cli
from megacpp_mcore.host.gpus import Gpu
from megacpp_mcore.training.gpu import launcher, precompile, torchrun

precompile._PART, precompile.visible = "a_part", lambda: [Gpu("a GPU", (9, 0))]
launcher._check = lambda recipe, gpus, resume: None
launcher.check_packages = lambda recipe, yardstick: None
launcher.compile_all = lambda recipe: time.sleep(300 if sys.argv[2] == "nvcc" else 0)
launcher.run_ranks = lambda module, argv, count: torchrun.run_ranks("a_rank", argv, count)
sys.exit(cli.main(["train", "nam56r", "--gpus", "1", "--out", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["nvcc", "ranks"])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_launcher_that_is_stopped(how, tmp_path, monkeypatch, stop, when):
    """Python itself: the server of `warm` would be the parent of the parts' parent."""
    marked = Marked()
    for name, value in marked.environment.items():
        monkeypatch.setenv(name, value)
    for part in PARTS:
        (how / part).write_text("import subprocess; subprocess.run(['sleep', '300'])")
    (tmp_path / "a_rank.py").write_text(RANK)
    words = [sys.executable, "-c", LAUNCH, str(tmp_path / "out"), when]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(told(how)) == len(PARTS))
        wait_until(lambda: when == "nvcc" or (how / "rank").exists())
        process.send_signal(stop)
        said = process.stderr.read()
    status = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[stop]
    assert process.returncode == status, said
    assert "compiled them" not in said
    assert not marked.left()
