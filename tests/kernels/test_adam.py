"""Adam over many tensors: against the equations in float64, and every refusal."""

import pytest
import torch

from megacpp_mcore.kernels import adam
from megacpp_mcore.kernels.adam import AdamInputError, Shard, adam_, table_of

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = [1, 5, adam._CHUNK + 3, 2 * adam._BLOCK]  # one element, odd, two chunks, whole blocks
EPS = torch.finfo(torch.float32).eps


def shard(size, dtype, offset=0, gradient=torch.float32):
    """dtype: the weight's. offset: elements, so that addresses are no multiple of a vector's."""

    def draw():
        return torch.randn(size + offset)[offset:]

    weight = None if dtype is None else torch.full((size,), torch.nan, dtype=dtype)
    return Shard(draw().to(gradient), draw(), draw(), draw().square(), weight)


def expected(one, factor, step):
    """Parameter, moment and square after the step, in float64."""
    g, p, m, v = (x.double() for x in one[:4])
    (b1, b2), g = HYPER["betas"], g * factor
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    update = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + HYPER["eps"])
    return p - HYPER["lr"] * (update + HYPER["weight_decay"] * p), m, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("step", "gradient"), [(1, torch.float32), (30, torch.bfloat16)])
def test_one_update(dtype, offset, step, gradient):
    torch.manual_seed(step)
    shards = [shard(size, dtype, offset, gradient) for size in SIZES]
    factor = torch.tensor(0.37)
    wanted = [expected(one, factor.double(), step) for one in shards]
    before = [one.gradient.clone() for one in shards]
    table = table_of(shards)
    assert table.aligned == (not offset)
    adam_(table, factor, step=step, **HYPER)
    for one, gradient, (p, m, v) in zip(shards, before, wanted, strict=True):
        for found, value in zip(one[1:4], (p, m, v), strict=True):
            # Sums of two products of rounded constants; p's step is quotient, root and bias, too.
            assert (found.double() - value).abs().max() <= 8 * EPS * value.abs().max().clamp(min=1)
        assert torch.equal(one.gradient, gradient)
        if dtype is not None:  # Triton's interpreter cuts bf16 off where a GPU rounds
            error = (one.weight.double() - one.parameter.double()).abs()
            kind = torch.finfo(dtype)
            assert (error <= kind.eps * one.parameter.abs() + kind.eps * kind.tiny).all()


def test_it_is_adamw():
    """Ten steps beside torch's AdamW in float64."""
    torch.manual_seed(0)
    one = Shard(*(torch.randn(77) for _ in range(2)), torch.zeros(77), torch.zeros(77), None)
    theirs = torch.nn.Parameter(one.parameter.double())
    optimizer = torch.optim.AdamW([theirs], **HYPER)
    table = table_of([one])
    for step in range(1, 11):
        one.gradient.copy_(torch.randn(77))
        theirs.grad = one.gradient.double() / 2
        adam_(table, torch.tensor(0.5), step=step, **HYPER)
        optimizer.step()
    bound = 10 * 8 * EPS * theirs.abs().max()
    assert (one.parameter.double() - theirs).abs().max() <= bound


def test_a_table_knows_when_it_no_longer_holds():
    one = shard(7, torch.bfloat16)
    table = table_of([one])
    assert table.addresses == adam.addresses([one])
    moved = one._replace(moment=one.moment.clone())
    assert table.addresses != adam.addresses([moved])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7, dtype=torch.float64)}, "weights are torch.float64"),
        ({"gradient": torch.zeros(7, dtype=torch.float16)}, "gradients are torch.float16"),
        ({"moment": torch.zeros(7, dtype=torch.bfloat16)}, "moment is torch.bfloat16"),
        ({"gradient": torch.zeros(6)}, r"gradient is \(6,\)"),
        ({"square": torch.zeros(14)[::2]}, r"square is \(7,\) with strides \(2,\)"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(AdamInputError, match=message):
        table_of([shard(7, torch.bfloat16)._replace(**change)])


def test_one_launch_takes_weights_of_one_dtype():
    with pytest.raises(AdamInputError, match="one dtype"):
        table_of([shard(7, torch.bfloat16), shard(7, None)])
