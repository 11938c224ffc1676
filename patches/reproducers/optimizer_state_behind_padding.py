"""A reshardable checkpoint must store each parameter's own optimizer state.

Two buckets of 3 and 5 elements, padded to 4 and 8: the state of the second bucket's parameters
begins at element 3 of the joined state, not at 4.
"""

from types import SimpleNamespace

from _common import DEFECT, RIGHT, hide_gpu, report, run

SIZES, STARTS, BUCKETS = (3, 2, 3), (0, 4, 6), (0, 1, 1)
EXPECTED = [[0, 1, 2], [3, 4], [5, 6, 7]]


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    places = zip(parameters, STARTS, SIZES, BUCKETS, strict=True)
    buffer = SimpleNamespace(
        buckets=[
            SimpleNamespace(numel_unpadded=used, grad_data=torch.zeros(padded))
            for used, padded in ((3, 4), (5, 8))
        ],
        numel_unpadded=8,
        param_index_map={p: (start, start + size, bucket) for p, start, size, bucket in places},
    )
    optimizer = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{torch.float32: []}],
        get_parameter_state_dp_zero=lambda **how: {
            0: {torch.float32: {"exp_avg": torch.arange(8.0), "numel_unpadded": 8}}
        },
    )
    sharded = {str(i): ShardedTensor.from_rank_offsets(str(i), p) for i, p in enumerate(parameters)}
    state = DistributedOptimizer.sharded_param_state_fully_reshardable(
        optimizer, sharded, metadata={}
    )
    found = [state[i]["exp_avg"].data.tolist() for i in range(3)]
    return report(RIGHT if found == EXPECTED else DEFECT, f"state {found}, expected {EXPECTED}")


run(main)
