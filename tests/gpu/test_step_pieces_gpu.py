"""What the whole step has beside its layers' kernels, at NAM56R's sizes: values, and the same bits
however often it is repeated."""

import pytest
import torch

from megacpp_mcore.kernels import adam
from megacpp_mcore.kernels.adam import Shard
from megacpp_mcore.kernels.mla_rope import RotaryTable, triton
from megacpp_mcore.layers import mla_down

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

REPEATS = 200
TOKENS, BATCH, HEADS, HIDDEN = 4096, 4, 56, 3584


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_adam_updates_and_rounds(gradient):
    torch.manual_seed(0)
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    factor = torch.tensor(0.37, device="cuda")
    shards, expected = [], []
    for size in (5, 16387, 10_000_000):
        g, p, m, v = (drawn(size, dtype=torch.float32) for _ in range(4))
        shard = Shard(g.to(gradient), p, m, v.square(), drawn(size))
        shards.append(shard)
        g, p, m, v = (x.double() for x in shard[:4])
        g = g * factor.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        update = m / (1 - 0.9**7) / ((v / (1 - 0.95**7)).sqrt() + 1e-8) + 0.1 * p
        expected.append((p - 3e-4 * update, m, v))
    adam.adam_(adam.table_of(shards), factor, **options)
    for shard, values in zip(shards, expected, strict=True):
        for found, value in zip(shard[1:4], values, strict=True):
            bound = 8 * torch.finfo(torch.float32).eps * value.abs().max()
            assert (found.double() - value).abs().max() <= bound
        assert torch.equal(shard.weight, shard.parameter.bfloat16())


def test_rope_in_place_has_the_same_bits_every_time():
    torch.manual_seed(1)
    frequencies = 500_000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    angles = torch.arange(TOKENS).double()[:, None] * frequencies
    table = RotaryTable(*(x.float().cuda() for x in RotaryTable.of(angles)))
    q, kv = (drawn(TOKENS, BATCH, HEADS, 128) for _ in range(2))
    k_pos, dq = drawn(TOKENS, BATCH, 64), torch.randn_like(q)

    def turned(in_place):
        leaf = q.clone().requires_grad_()
        rotated, k, _ = triton.mla_rope(
            leaf * 1, kv, k_pos, table, qk_head_dim=64, in_place=in_place
        )
        torch.autograd.backward([rotated], [dq.clone()])
        return rotated.detach(), k, leaf.grad

    expected = turned(False)
    for _ in range(REPEATS):
        for found, value in zip(turned(True), expected, strict=True):
            assert torch.equal(found, value)


def test_down_projections_have_the_same_bits_every_time():
    torch.manual_seed(2)
    linears = [torch.nn.Linear(HIDDEN, rows, bias=False).bfloat16().cuda() for rows in (64, 128)]
    x = drawn(TOKENS, BATCH, HIDDEN).requires_grad_()
    directions = [drawn(TOKENS, BATCH, rows) for rows in (64, 128)]

    def products():
        for linear in linears:
            linear.fuse_wgrad_accumulation = True
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
            linear.weight.grad = x.grad = None
        outputs = mla_down.one_product(*linears, x)
        torch.autograd.backward(outputs, directions)
        return *(y.detach() for y in outputs), x.grad, *(m.weight.main_grad for m in linears)

    expected = products()
    for _ in range(REPEATS):
        for found, value in zip(products(), expected, strict=True):
            assert torch.equal(found, value)
