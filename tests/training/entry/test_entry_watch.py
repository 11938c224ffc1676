"""What is read, timed and booked around each step of Megatron's loop."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from late_gpu import LateGpu
from launched import CACHES, watched_on

from megacpp_mcore import dispatch, receipts
from megacpp_mcore.hybrid import flops
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.training.gpu.rank_setup import LaunchError


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
