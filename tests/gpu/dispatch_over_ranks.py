"""The exchange of tokens over the GPUs of a host: what it computes, and what it costs.

    torchrun --standalone --nproc-per-node 2 tests/gpu/dispatch_over_ranks.py check NAME OUT
    torchrun --standalone --nproc-per-node 2 tests/gpu/dispatch_over_ranks.py capture NAME OUT
    torchrun --standalone --nproc-per-node 2 tests/gpu/dispatch_over_ranks.py time OUT NAME ...
    torchrun --standalone --nproc-per-node 2 tests/gpu/dispatch_over_ranks.py profile OUT NAME ...
    torchrun --standalone --nproc-per-node 2 tests/gpu/dispatch_over_ranks.py copies OUT

Commands may follow one another, each after a word "then"; the status is 1 where one of them found
wrong values. check: a layer E of NAM56R and a small model by the dispatcher NAME, held against
all-to-all. capture: the layer as one CUDA graph, held against itself. time: forward + backward of
a layer E at NAM56R's sizes, weight gradients into main_grad, by each NAME in turns:
DISPATCHER[:SMS[:worst]][+EXPERTS], the multiprocessors that DeepEP gets, and "worst" where it
allocates for the worst case and the host does not wait. copies: DeepEP's and NCCL's exchanges
alone, by size of their chunks and multiprocessors. profile: a table of kernels of each NAME and a
trace, beside OUT. OUT: a JSON file.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2])]

from megacpp_mcore.stack import bridges  # noqa: E402

bridges.before_megatron()
bridges.install()

from parallel_layouts import RECIPE  # noqa: E402

from megacpp_mcore import dispatch  # noqa: E402
from megacpp_mcore.bench import layer as bench_layer  # noqa: E402
from megacpp_mcore.bench.variants import Variant, build, take_weights  # noqa: E402
from megacpp_mcore.recipe import load_recipe  # noqa: E402
from megacpp_mcore.training.cpu import megatron_setup  # noqa: E402
from megacpp_mcore.training.one_process import in_half_precision  # noqa: E402

EPS = torch.finfo(torch.bfloat16).eps
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
OVER_RANKS = [
    f"parallel.expert_model_parallel_size={RANKS}", f"launch.nproc_per_node={RANKS}",
    "launch.cuda_graph_impl=none", "checkpoint.save=null", "checkpoint.load=null",
    "checkpoint.save_interval=null",
]  # fmt: skip
BASELINE = "alltoall"
ROUNDS, WARM_UP = 24, 4


def start() -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl"
    )  # without a device: else every one of Megatron's groups connects
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def end() -> None:
    if adapter := sys.modules.get("megacpp_mcore.layers.deepep"):
        adapter.close()
    dist.destroy_process_group()


def forget() -> None:
    """What earlier models of this process left: decisions, and logs sized for their layers."""
    dispatch.forget()
    megatron_setup._reset_loss_trackers()


def layers(names: list[str], *overrides: str) -> dict:
    """name -> the layer E of nam56r with that dispatcher, all with the weights of the first."""
    words = [*bench_layer.layer_overrides("E"), *OVER_RANKS, *overrides]
    recipe = load_recipe("nam56r", [*words, f"schedule.global_batch_size={4 * RANKS}"])
    built = {}
    for name in names:
        dispatch.forget()
        torch.manual_seed(1)
        dispatcher, _, experts = name.partition("+")
        backends = f"moe_dispatch={dispatcher.partition(':')[0]}"
        backends += f",moe_experts={experts}" if experts else ""
        built[name] = bench_layer._Layer(name, Variant(recipe, backends), "cuda")
        if not take_weights(built[name].trained, dict(built[names[0]].trained.named_parameters())):
            print(f"{name}: other parameters than {names[0]}")
        for x in (*built[name].sets, built[name].direction):
            generator = torch.Generator("cuda").manual_seed(7 + dist.get_rank())
            x.data = torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype)
    return built


def distances(found: dict, expected: dict) -> dict[str, float]:
    """Of each tensor the root mean square of the difference in units of the expected one's, and
    of outputs and input gradients of the worst token's ("... worst")."""
    table = {}
    for name, value in expected.items():
        difference, value = (found[name].float() - value.float()), value.float()
        table[name] = float(difference.norm() / value.norm().clamp(min=1e-30))
        if name in ("y", "dx"):
            rows = difference.flatten(0, -2).norm(dim=-1)
            typical = value.flatten(0, -2).norm(dim=-1).square().mean().sqrt()
            table[f"{name} worst"] = float(rows.max() / typical)
    return table


def small_model(name: str) -> dict:
    """Loss and gradients of one batch of a small NAM56R of its A and E alone."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"small-{dist.get_rank()}.toml"
    path.write_text(RECIPE)
    words = [
        *OVER_RANKS[:3], "model.pattern=AE", "model.depth=4", "mtp.mtp_num_layers=0",
        "mtp.pattern=", "precision.gradient_accumulation_fusion=false",
    ]  # fmt: skip
    recipe = load_recipe(str(path), words)
    forget()
    torch.manual_seed(1)
    model, args = build(Variant(recipe, f"moe_dispatch={name}"))
    model = in_half_precision(model, args)
    generator = torch.Generator("cuda").manual_seed(3 + dist.get_rank())
    shape = (2, args.seq_length + 1)
    tokens = torch.randint(257, shape, generator=generator, device="cuda")
    positions = torch.arange(args.seq_length, device="cuda").expand(2, -1)
    ones = torch.ones(positions.shape, device="cuda")
    total = model(
        input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None,
        labels=tokens[:, 1:].contiguous(), loss_mask=ones, loss_weights=ones,
    )  # fmt: skip
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), **gradients}


def check(name: str) -> tuple[dict, list[str]]:
    """What was compared, and what is wrong.

    A layer: its router sees the same tokens, so that all differences are roundings: of the rows,
    of their sum, of what the ranks add up, each to bf16 and a few on the way to a gradient. A
    model: a rounding may send a token to another expert further on, as it does between Megatron's
    two dispatchers; three times their distance is allowed.
    """
    wrong, table = [], {}
    roundings = 16
    built = layers([BASELINE, name], "precision.gradient_accumulation_fusion=false")
    said = [d for d in dispatch.decisions() if d.surface == "moe_dispatch"]
    values = {which: made.values() for which, made in built.items()}
    again = built[name].values()
    for key, far in distances(values[name], values[BASELINE]).items():
        bound = roundings**0.5 * EPS / 2 * (4 if key.endswith("worst") else 1)
        table[f"layer {key}"] = far, bound
    unequal = [key for key, value in again.items() if not torch.equal(value, values[name][key])]
    table["layer: not the same again"] = float(len(unequal)), 0.5
    built.clear()
    models = {which: small_model(which) for which in (BASELINE, "reference", name)}
    usual = distances(models["reference"], models[BASELINE])
    for key, far in distances(models[name], models[BASELINE]).items():
        table[f"model {key}"] = far, 3 * max(usual[key], EPS / 2)
    for key, (far, bound) in table.items():
        if not far <= bound:
            wrong.append(f"{key}: {far:.3g} > {bound:.3g}")
    print(f"rank {dist.get_rank()}: {said[-1].observed}, {len(table)} compared, wrong: {wrong}")
    return table, wrong


def capture(name: str) -> tuple[dict, list[str]]:
    """A layer's forward and backward as one CUDA graph, replayed with other tokens, whose routing
    is another: equal to the eager call in every bit."""
    built = layers([name], "precision.gradient_accumulation_fusion=false")[name]
    built.trained.layers[0].mlp.token_dispatcher.waits = False
    one, other = (x.detach().clone() for x in built.sets)
    expected = []
    for x in (one, other):
        built.sets[0].data.copy_(x)
        expected.append(built.values())
    x = built.sets[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            built.forward(0).backward(built.direction)
            built.forget()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = built.forward(0)
        y.backward(built.direction)
    gradients = {f"d {n}": p.grad for n, p in built.trained.named_parameters()}
    table, wrong = {}, []
    for turn, tokens in enumerate((one, other, one)):
        x.data.copy_(tokens)
        graph.replay()
        torch.cuda.synchronize()
        found = {"y": y.detach(), "dx": x.grad, **gradients}
        for key, value in expected[turn % 2].items():
            table[f"replay {turn}, {key}"] = float((found[key] != value).sum()), 0.5
    wrong = [key for key, (unequal, _) in table.items() if unequal]
    graph.reset()
    return table, wrong


def timed(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each, in turns, all ranks together; the slowest rank's."""
    samples = {name: [] for name in calls}
    for turn in range(WARM_UP + rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda._sleep(16_000_000)  # the host queues meanwhile, as in a training step
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                samples[name].append(start.elapsed_time(end))
    found = torch.tensor([statistics.median(s) for s in samples.values()], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(samples, found.tolist(), strict=True))


def time_layers(names: list[str], profiles: Path | None = None) -> dict:
    """profiles: a folder for a table of the kernels of each, which then are not timed."""
    built = layers(names, "precision.gradient_accumulation_fusion=true")
    forward, both, peak = {}, {}, {}
    for name, made in built.items():
        for parameter in made.trained.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
        _, *options = name.partition("+")[0].split(":")
        made.trained.layers[0].mlp.token_dispatcher.waits = "worst" not in options

        def call(made=made, name=name, options=options, backward=True):
            if name.startswith("deepep"):
                use_sms(int(options[0]) if options else None)
            y = made.forward(0)
            if backward:
                y.backward(made.direction)
                made.forget()

        both[name] = call
        forward[name] = lambda call=call: call(backward=False)
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if profiles is not None:
        profile(both, profiles)
        return {"profiled": names}
    return {"forward": timed(forward), "forward_backward": timed(both), "peak MiB": peak}


def use_sms(sms: int | None) -> None:
    """Let the link of DeepEP use so many multiprocessors from here on; None: as it is shipped."""
    from deep_ep import Buffer

    from megacpp_mcore.layers import deepep

    Buffer.set_num_sms(sms or deepep._SMS)
    for link in deepep._links.values():
        link.sending = Buffer.get_dispatch_config(RANKS)
        link.returning = Buffer.get_combine_config(RANKS)


def profile(calls: dict[str, Callable[[], object]], folder: Path) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    for name, call in calls.items():
        with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for _ in range(4):
                call()
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            table = found.key_averages().table(sort_by="cuda_time_total", row_limit=40,
                                               max_name_column_width=70)  # fmt: skip
            (folder / f"profile-{name.replace(':', '-')}.txt").write_text(table)
            found.export_chrome_trace(str(folder / f"trace-{name.replace(':', '-')}.json.gz"))


def copies() -> dict:
    """Milliseconds and GB/s of one direction of an exchange of 16,384 tokens, top-4 of 16."""
    from deep_ep import Buffer, Config

    group = dist.group.WORLD
    tokens, hidden, experts, topk = 16384, 3584, 16, 4
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    weights, chosen = scores.topk(topk, dim=-1)
    out, part, copied = x.new_empty(RANKS * tokens, hidden), torch.empty_like(x), x.repeat(topk, 1)
    back = torch.empty_like(copied)
    calls = {
        "nccl all-gather": lambda: dist.all_gather_into_tensor(out, x),
        "nccl reduce-scatter": lambda: dist.reduce_scatter_tensor(part, out),
        "nccl all-to-all, top-k copies": lambda: dist.all_to_all_single(back, copied),
    }
    size = Config(64, 32, 512, 6, 128).get_nvl_buffer_size_hint(2 * hidden, RANKS)
    buffer = Buffer(group, size, 0, explicitly_destroy=True)
    to_rank, _, to_expert, goes, _ = buffer.get_dispatch_layout(chosen, experts)
    layout = {
        "num_tokens_per_rank": to_rank,
        "is_token_in_rank": goes,
        "num_tokens_per_expert": to_expert,
    }
    calls["deepep layout"] = lambda: buffer.get_dispatch_layout(chosen, experts)
    for sms, chunk in [(20, 24), (20, 8), (20, 16), (20, 32), (24, 24), (32, 24), (32, 16), (32, 8),
                       (48, 24), (48, 16), (48, 8), (64, 16), (64, 8)]:  # fmt: skip
        config = Config(sms, chunk, 256, 6, 128)

        def sent(worst=0, config=config):
            return buffer.dispatch(x, topk_idx=chosen, topk_weights=weights, config=config,
                                   num_worst_tokens=worst, **layout)  # fmt: skip

        received, *_, handle, _ = sent()
        label = f"{sms} SMs, chunk {chunk}"
        calls[f"deepep dispatch, {label}"] = sent
        calls[f"deepep resend, {label}"] = lambda h=handle, c=config: buffer.dispatch(
            x, handle=h, config=c
        )
        calls[f"deepep combine, {label}"] = lambda h=handle, c=config, r=received: buffer.combine(
            r, h, config=c)  # fmt: skip
        if chunk == 24:
            calls[f"deepep dispatch worst case, {label}"] = lambda s=sent: s(RANKS * tokens)
    found = timed(calls, 12)
    buffer.destroy()
    return found | {"rows received": received.shape[0]}


def run(command: str, *arguments: str) -> bool:
    """One command, its results written and printed by rank 0. False: it found wrong values."""
    if command in ("check", "capture"):
        name, out = arguments
        table, wrong = (check if command == "check" else capture)(name)
        everyones = [None] * RANKS
        dist.all_gather_object(everyones, wrong)
        found = {"compared": table, "wrong": [text for of_rank in everyones for text in of_rank]}
    elif command == "time":
        out, *names = arguments
        found = time_layers(names)
    elif command == "profile":
        out, *names = arguments
        found = time_layers(names, Path(out).parent)
    else:
        (out,) = arguments
        found = copies()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found, indent=1))
        print(json.dumps(found.get("wrong", found), indent=1), flush=True)
    return not found.get("wrong")


def main(words: list[str]) -> None:
    began = time.perf_counter()
    start()
    right = True
    while words:
        until = words.index("then") if "then" in words else len(words)
        command, words = words[:until], words[until + 1 :]
        right &= run(*command)
        if dist.get_rank() == 0:
            print(f"{command}: until {time.perf_counter() - began:.0f} s", flush=True)
    end()
    sys.exit(not right)


if __name__ == "__main__":
    main(sys.argv[1:])
