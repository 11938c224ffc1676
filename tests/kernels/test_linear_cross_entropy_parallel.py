"""linear_cross_entropy over a split vocabulary, on two and four gloo processes.

The chunked backend runs in Triton's interpreter, in several chunks.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def check(rank, folder):
    import loss_ranks

    from megacpp_mcore.kernels.linear_cross_entropy import REFERENCE, chunk_loop
    from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED

    chunk_loop.chunk_length = lambda tokens, classes: 7
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)))
    checked = [(CHUNKED, torch.bfloat16)]
    if ranks == 2:
        checked += [
            (CHUNKED, torch.float32),
            (REFERENCE, torch.float32),
            (REFERENCE, torch.bfloat16),
        ]
    for head, dtype in checked:
        loss_ranks.check(head, group, "cpu", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_vocabulary(ranks, tmp_path):
    run_ranks(check, tmp_path, ranks)
