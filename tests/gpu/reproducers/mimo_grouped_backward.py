"""MIMO's TileLang backward, 2 groups of 4 heads: 0 sums of each group's heads, 1 it raises."""

import torch
from _mamba3 import HEADS, inputs, mimo, run

GROUPS, RANK = 2, 4
# Both are bf16 gradients of the same kernels; they differ by how a group's heads are summed.
FAR = 8 * torch.finfo(torch.bfloat16).eps


def gradients(tensors):
    y = mimo(**tensors)
    direction = torch.randn(
        y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    return torch.autograd.grad(y, (tensors["Q"], tensors["K"]), direction.to(y.dtype))


def main():
    grouped = inputs(GROUPS, RANK)
    per_head = dict(grouped)
    for name in ("Q", "K"):
        expanded = grouped[name].detach().repeat_interleave(HEADS // GROUPS, dim=3)
        per_head[name] = expanded.requires_grad_()
    wanted = [g.float().unflatten(3, (GROUPS, -1)).sum(4) for g in gradients(per_head)]
    try:
        found = gradients(grouped)
    except ValueError as error:
        if "is not currently supported" not in str(error):
            raise
        print(error)
        return 1
    far = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    print(f"dQ and dK are {far[0]:.1e} and {far[1]:.1e} from the sums over their heads")
    return 0 if max(far) <= FAR else 3


run(main)
