"""linear_cross_entropy over a vocabulary split over GPUs, by NCCL: right, and what it costs.

    torchrun --standalone --nproc-per-node 2 tests/gpu/loss_over_ranks.py

On every rank `loss_ranks.check` for the chunked backend and the reference, in one chunk and in
several; then, at NAM56R's sizes, times and peak memory of the chunked backend beside Megatron's
output layer and vocabulary-parallel cross entropy. Ends with status 0 where all is right.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from megacpp_mcore.stack import bridges  # noqa: E402

bridges.before_megatron()
bridges.install()

import loss_ranks  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

from megacpp_mcore.kernels.linear_cross_entropy import REFERENCE, chunk_loop  # noqa: E402
from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED  # noqa: E402

TOKENS, HIDDEN, VOCAB = 16384, 3584, 65536
ROUNDS = 12


SMALL, ODD, LARGE = (8, 2, 12, 24), (64, 5, 72, 4 * 5000), (192, 3, 96, 4 * 16384)
CHECKED = [
    (REFERENCE, torch.float32, [SMALL]),
    (CHUNKED, torch.float32, [SMALL, ODD]),
    (CHUNKED, torch.bfloat16, [SMALL, ODD, LARGE]),
]


def check(group: dist.ProcessGroup) -> None:
    whole = chunk_loop.chunk_length
    for length in (whole, lambda tokens, classes: 128):
        chunk_loop.chunk_length = length
        for head, dtype, shapes in CHECKED:
            for sizes in shapes:
                loss_ranks.check(head, group, "cuda", dtype, *sizes)
    chunk_loop.chunk_length = whole


def compare(group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(TOKENS, 1, HIDDEN, device="cuda", generator=generator).bfloat16()
    labels = torch.randint(VOCAB, (TOKENS, 1), device="cuda", generator=generator)
    weight = torch.randn(VOCAB // ranks, HIDDEN, device="cuda") * HIDDEN**-0.5
    weight = weight.bfloat16().requires_grad_()
    hidden.requires_grad_()
    weights = torch.full((TOKENS, 1), 1 / TOKENS, device="cuda")

    def chunked() -> None:
        everyones = copy_to_tensor_model_parallel_region(hidden, group=group)
        total, _ = CHUNKED.weighted(everyones, weight, labels, weights, tp_group=group)
        torch.autograd.grad(total, (hidden, weight))

    def megatron() -> None:
        logits = copy_to_tensor_model_parallel_region(hidden, group=group) @ weight.t()
        losses = vocab_parallel_cross_entropy(logits, labels, tp_group=group)
        torch.autograd.grad((losses * weights).sum(), (hidden, weight))

    gradients = (hidden.numel() + weight.numel()) * 2 / 2**30
    for name, call in (("chunked", chunked), ("megatron", megatron)):
        times = []
        for turn in range(ROUNDS):
            if turn == 2:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier(group)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 - gradients
        if rank == 0:
            middle = sorted(times[2:])[(ROUNDS - 2) // 2]
            print(f"TP {ranks}, {name}: {middle:.2f} ms forward + backward, {peak:.3f} GiB above "
                  "inputs and gradients", flush=True)  # fmt: skip


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = dist.new_group(list(range(dist.get_world_size())))
    check(group)
    if dist.get_rank() == 0:
        print(f"right on {dist.get_world_size()} ranks", flush=True)
    compare(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
