"""The gradient of MLA's shared rotary key must be the sum over all ranks' heads.

One layer with the same weights on one rank and over two tensor-parallel ranks: the gradients of the
input must be equal.
"""

import os
import tempfile

from _common import DEFECT, RIGHT, hide_gpu, mla_attention, place_on_cpu, report, run

SEQ = 12


def main() -> int:
    hide_gpu()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        found = errors(os.path.join(folder, "store"), rank=0 if child else 1)
        if not child:
            os._exit(RIGHT)
        os.waitpid(child, 0)
    # The same sums of float64, in another order.
    right = all(error < 1e-12 for error in found.values())
    told = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    return report(RIGHT if right else DEFECT, f"input gradient, two ranks against one: {told}")


def errors(store: str, rank: int) -> dict[str, float]:
    """The relative error of two ranks' gradient against one rank's, by kind of parallelism."""
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2
    )
    place_on_cpu()
    parallel_state.initialize_model_parallel(1)
    expected = input_gradient(lambda x: x)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    found = {}
    for name, sequence_parallel in (("tensor", False), ("tensor and sequence", True)):

        def cut(x, sequence_parallel=sequence_parallel):
            return x.chunk(2)[rank] if sequence_parallel else x

        gradient = input_gradient(
            cut, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
        )
        error = (gradient - cut(expected)).norm() / expected.norm()
        torch.distributed.all_reduce(error)
        found[name] = error.item()
    return found


def input_gradient(cut, **config):
    """The gradient of sum(output * direction) in this rank's part (`cut`) of the input sequence."""
    import torch

    torch.manual_seed(3)
    layer = mla_attention(rope_type="rope", **config).double()
    generator = torch.Generator().manual_seed(5)
    hidden, direction = torch.randn(2, SEQ, 2, 32, generator=generator, dtype=torch.float64)
    hidden = cut(hidden).clone().requires_grad_()
    output, _ = layer(hidden, attention_mask=None)
    (output * cut(direction)).sum().backward()
    return hidden.grad


run(main)
