"""linear_cross_entropy over a split vocabulary, on two and four gloo processes.

The chunked backend runs in Triton's interpreter, in several chunks.
"""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megacpp_mcore import bridges


def worker(rank, ranks, folder):
    torch.set_num_threads(1)
    bridges.before_megatron()
    bridges.install()
    import loss_ranks

    from megacpp_mcore.kernels.linear_cross_entropy import REFERENCE, walk
    from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED

    walk.chunk_length = lambda tokens, classes: 7
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    group = dist.new_group(list(range(ranks)))
    checked = [(REFERENCE, torch.float32), (CHUNKED, torch.bfloat16)]
    if ranks == 2:
        checked += [(REFERENCE, torch.bfloat16), (CHUNKED, torch.float32)]
    for head, dtype in checked:
        loss_ranks.check(head, group, "cpu", dtype)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_vocabulary(ranks, tmp_path):
    mp.spawn(worker, args=(ranks, str(tmp_path)), nprocs=ranks)
