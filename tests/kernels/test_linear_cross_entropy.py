"""Linear and cross entropy: admission, contracts, extreme logits, chunks, and what is refused.

The chunked backend runs in Triton's interpreter here.
"""

import admission
import pytest
import torch
from loss_contract import CONTRACTS, close, draw, leaves, per_token, weighted, weights
from torch.nn import functional

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.linear_cross_entropy import (
    REFERENCE,
    LinearCrossEntropyInputError,
    chunk_loop,
    chunked,
    linear_cross_entropy,
    weighted_linear_cross_entropy,
)
from megacpp_mcore.kernels.linear_cross_entropy import triton as kernels
from megacpp_mcore.kernels.linear_cross_entropy.chunked import CHUNKED
from megacpp_mcore.kernels.linear_cross_entropy.megatron import MEGATRON
from megacpp_mcore.kernels.linear_cross_entropy.weight_gradient import WeightGradient
from megacpp_mcore.kernels.main_grad import handed_on
from megacpp_mcore.surfaces import linear_cross_entropy as loss_surface
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training.cpu.megatron_setup import single_process

test_admission = admission.suite("linear_cross_entropy", beyond_dispatch=("chunked",))

HEADS = {"reference": REFERENCE, "chunked": CHUNKED, "megatron": MEGATRON}
# Megatron's cross entropy subtracts from its softmax in place, again in every backward pass.
BROKEN = {("megatron", "a_second_backward_pass_gives_the_same")}


@pytest.fixture
def chunks_of_five(monkeypatch):
    monkeypatch.setattr(chunk_loop, "chunk_length", lambda tokens, classes: 5)


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_contract(head, contract, dtype, chunks_of_five):
    if (head, contract) in BROKEN:
        pytest.skip("Megatron's own gradients change with every backward pass")
    with single_process(0):
        CONTRACTS[contract](HEADS[head], "cpu", dtype)


def test_the_contracts_see_one_gradient_for_all_tokens():
    """Those of all tokens, times what comes back for the first, as Liger's were before 0.8.2."""

    def old(**inputs):
        losses = REFERENCE.per_token(**inputs)
        return losses * (losses.detach() * 0 + _First.apply(losses)) / losses.detach()

    broken = type(REFERENCE)(old, REFERENCE.weighted)
    with pytest.raises(AssertionError):
        CONTRACTS["any_gradient_for_every_token"](broken, "cpu", torch.float32)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flatten()[0].expand(gradient.shape)


def test_it_is_torchs_cross_entropy_of_the_logits():
    hidden, weight = torch.randn(7, 3, 8).double(), torch.randn(11, 8).double()
    labels = torch.randint(11, (7, 3))
    for smoothing in (0.0, 0.2):
        losses = linear_cross_entropy(hidden, weight, labels, label_smoothing=smoothing)
        logits = (hidden @ weight.t()).flatten(0, 1)
        expected = functional.cross_entropy(
            # torch shares the smoothing out among all classes, Megatron among the wrong ones.
            logits, labels.flatten(), reduction="none", label_smoothing=smoothing * 11 / 10
        )  # fmt: skip
        # Two sums of 11 exponentials of at most e^30, in another order.
        torch.testing.assert_close(losses.flatten(), expected, rtol=0, atol=30 * 11 * 2**-52)


@pytest.mark.parametrize("head", ["reference", "chunked"])
def test_large_logits_neither_overflow_nor_lose_the_loss(head):
    hidden = torch.tensor([[[1e4, -1e4]]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    labels = (torch.tensor([[i]]) for i in range(3))
    losses = [HEADS[head].per_token(hidden, weight, label).item() for label in labels]
    assert losses == pytest.approx([0.6931472, 2e4 + 0.6931472, 0.6931472])


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "hidden_size"), [(1, 23), (2, 1), (64, 8), (97, 23)])
def test_chunks_of_any_sizes(vocab, hidden_size, chunks_of_five):
    generator = torch.Generator().manual_seed(vocab)
    for tokens in (1, 6):
        tensors = {
            "hidden": torch.randn(tokens, hidden_size, generator=generator),
            "weight": torch.randn(vocab, hidden_size, generator=generator),
            "labels": torch.randint(vocab, (tokens,), generator=generator),
        }
        given = torch.rand(tokens, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            rounded = {n: x.to(dtype) if n != "labels" else x for n, x in tensors.items()}
            truth = per_token(REFERENCE, rounded, torch.float64, given)
            truth += weighted(REFERENCE, rounded, torch.float64, given, by=3.0)
            found = per_token(CHUNKED, rounded, dtype, given)
            found += weighted(CHUNKED, rounded, dtype, given, by=3.0)
            size = rounded["hidden"].double() @ rounded["weight"].double().t()
            for actual, expected in zip(found, truth, strict=True):
                close(actual, expected, dtype, largest_logit=6 + size.abs().max().item())


def test_what_is_not_wanted_is_not_made(monkeypatch, chunks_of_five):
    made = []
    monkeypatch.setattr(WeightGradient, "add", lambda self, *given: made.append("weight"))
    monkeypatch.setattr(WeightGradient, "result", lambda self: self._result)
    product = torch.mm

    def mm(a, b, *, out):
        made.append(
            "logits" if b.shape[0] == a.shape[1] == tensors["hidden"].shape[-1] else "hidden"
        )
        return product(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    tensors = draw("cpu", torch.float32)
    given = weights(tensors["labels"])
    chunks = 3  # 15 tokens
    for wants in ("", "hidden", "weight", "hidden weight"):
        made.clear()
        CHUNKED.weighted(**leaves(tensors, torch.float32, wants), loss_weights=given)
        assert made.count("logits") == chunks
        assert made.count("hidden") == chunks * ("hidden" in wants)
        assert made.count("weight") == chunks * ("weight" in wants)
    made.clear()
    with torch.no_grad():
        CHUNKED.weighted(**leaves(tensors, torch.float32), loss_weights=given)
    assert made == ["logits"] * chunks


class TestKernels:
    """In blocks and tiles that are small enough for several of them here."""

    @pytest.mark.slow
    @pytest.mark.parametrize("vocab", [5, 32, 33])
    def test_rows_of_several_blocks(self, vocab, monkeypatch, chunks_of_five):
        monkeypatch.setattr(kernels, "_LANES", 8)
        monkeypatch.setattr(kernels, "_DEPTH", 2)
        tensors = draw("cpu", torch.float32, vocab)
        given = weights(tensors["labels"])
        for options in (
            {},
            {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.7},
        ):
            truth = per_token(REFERENCE, tensors, torch.float64, given, **options)
            truth += weighted(REFERENCE, tensors, torch.float64, given, by=3.0, **options)
            found = per_token(CHUNKED, tensors, torch.float32, given, **options)
            found += weighted(CHUNKED, tensors, torch.float32, given, by=3.0, **options)
            for actual, expected in zip(found, truth, strict=True):
                close(actual, expected, torch.float32, largest_logit=6 + vocab / 100)

    @pytest.mark.parametrize("shape", [(1, 1), (4, 8), (7, 13), (0, 3)])
    def test_transposed(self, shape, monkeypatch):
        monkeypatch.setattr(kernels, "_TILE", 4)
        rows, columns = shape
        x = torch.randn(rows, columns + 2).bfloat16()[:, 1 : 1 + columns]
        room = torch.full((columns + 1, rows), 9.0, dtype=torch.bfloat16)
        assert torch.equal(kernels.transposed(x, room[:columns]), x.t())
        assert (room[columns:] == 9).all()

    @pytest.mark.parametrize("by", [1.0, -0.5])
    def test_scaled(self, by, monkeypatch):
        monkeypatch.setattr(kernels, "_SCALE_BLOCK", 8)
        monkeypatch.setattr(kernels, "_SCALE_PROGRAMS", 3)
        x, factor = torch.randn(71).bfloat16(), torch.tensor(by)
        expected = (x.float() * factor).bfloat16()
        assert torch.equal(kernels.scaled(x, factor), expected)
        kernels.scale_(x, factor)
        assert torch.equal(x, expected)

    @pytest.mark.parametrize("by", [1.0, -0.5, 0.0])
    def test_add_scaled(self, by, monkeypatch):
        monkeypatch.setattr(kernels, "_ADD_BLOCK", 8)
        monkeypatch.setattr(kernels, "_SCALE_PROGRAMS", 3)
        for size in (1, 8, 71):
            total, x = torch.randn(size), torch.randn(size)
            expected = total + by * x  # exact products: one rounding, of the sum
            kernels.add_scaled_(total, x, torch.tensor(by))
            assert torch.equal(total, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
class TestIntoMainGrad:
    """The weight's gradient goes into main_grad, in float32 from the products on."""

    STEPS = (("weighted", 2.5), ("weighted", -0.75), ("per_token", 1.5))

    @pytest.fixture(autouse=True)
    def handed(self, monkeypatch, chunks_of_five):
        """What each use gave to autograd."""
        found = []

        def spy(weight):
            found.append(handed_on(weight))
            return found[-1]

        monkeypatch.setattr(chunked, "handed_on", spy)
        return found

    def made(self, dtype):
        """Leaves with a main_grad of random numbers, which are returned, and loss weights."""
        tensors = draw("cpu", dtype)
        inputs, given = leaves(tensors, dtype), weights(tensors["labels"])
        start = torch.randn(inputs["weight"].shape)
        inputs["weight"].main_grad = start.clone()
        inputs["weight"].grad_added_to_main_grad = False
        return inputs, given, start

    @staticmethod
    def loss(head, inputs, given, form, by):
        if form == "weighted":
            return by * head.weighted(**inputs, loss_weights=given)[0]
        return by * (head.per_token(**inputs) * given).sum()

    def expected(self, inputs, given, steps):
        """The gradients of hidden and weight by the definition in float64."""
        wide = leaves(inputs, torch.float64)
        sum(self.loss(REFERENCE, wide, given.double(), *step) for step in steps).backward()
        return wide["hidden"].grad, wide["weight"].grad

    def backward(self, dtype, steps):
        """All steps in one backward pass; what is in main_grad more than before, and the truth."""
        inputs, given, start = self.made(dtype)
        sum(self.loss(CHUNKED, inputs, given, *step) for step in steps).backward()
        d_hidden, d_weight = self.expected(inputs, given, steps)
        close(inputs["hidden"].grad, d_hidden, dtype)
        added = inputs["weight"].main_grad.double() - start.double()
        return inputs["weight"], added, d_weight

    @pytest.mark.parametrize("steps", [STEPS[:1], STEPS[2:], STEPS[:2], STEPS], ids=len)
    def test_every_use_is_added_once(self, dtype, steps, handed):
        weight, added, expected = self.backward(dtype, steps)
        close(added, expected, dtype)
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        assert [x is None for x in handed] == [False, *[True] * (len(steps) - 1)]

    @pytest.mark.parametrize("form", ["weighted", "per_token"])
    def test_again_through_a_retained_graph(self, dtype, form, handed):
        inputs, given, start = self.made(dtype)
        loss = self.loss(CHUNKED, inputs, given, form, 1.0)
        for by, keep in ((2.0, True), (-0.5, True), (3.0, False)):
            loss.backward(torch.tensor(by), retain_graph=keep)
        _, expected = self.expected(inputs, given, [(form, 4.5)])
        close(inputs["weight"].main_grad - start, expected, dtype)
        assert [x is None for x in handed] == [False] * 3

    def test_bf16_products_are_not_rounded_before_they_are_added(self, dtype):
        """A factor of which bf16 would keep eight bits."""
        _, added, expected = self.backward(dtype, [("weighted", 1 / 3)])
        _, again, other = self.backward(dtype, [("weighted", 1.0)])
        close(added, expected, dtype), close(again, other, dtype)
        if dtype == torch.bfloat16:
            assert not torch.equal(added.bfloat16().double(), added)

    def test_where_a_second_layer_has_the_weight_zeros_are_handed_on(self, dtype):
        inputs, given, _ = self.made(dtype)
        inputs["weight"].zero_out_wgrad = True
        self.loss(CHUNKED, inputs, given, "weighted", 2.0).backward()
        assert not inputs["weight"].grad.any()

    def test_no_tokens(self, dtype):
        inputs, given, start = self.made(dtype)
        inputs |= {n: inputs[n].detach()[:0] for n in ("hidden", "labels")}
        self.loss(CHUNKED, inputs, given[:0], "weighted", 2.0).backward()
        assert torch.equal(inputs["weight"].main_grad, start)

    def test_a_weight_that_wants_no_gradient_has_none_added(self, dtype):
        inputs, given, start = self.made(dtype)
        inputs["weight"].requires_grad_(False)
        self.loss(CHUNKED, inputs, given, "weighted", 2.0).backward()
        assert torch.equal(inputs["weight"].main_grad, start)

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param(lambda total, x, by: total.add_(x), id="factor dropped"),
            pytest.param(lambda total, x, by: total.add_(2 * by * x), id="added twice"),
            pytest.param(lambda total, x, by: None, id="not added"),
            pytest.param(lambda total, x, by: total.sub_(by * x), id="sign"),
            pytest.param(lambda total, x, by: total.copy_(by * x), id="main_grad overwritten"),
            pytest.param(lambda total, x, by: total[:8].add_(by * x[:8]), id="tile left out"),
        ],
    )
    def test_what_is_added_wrongly_is_refused(self, dtype, wrong, monkeypatch):
        monkeypatch.setattr(chunked, "_add_scaled_", wrong)
        _, added, expected = self.backward(dtype, self.STEPS[:2])
        with pytest.raises(AssertionError):
            close(added, expected, dtype)


class TestChunks:
    @pytest.mark.parametrize(
        ("tokens", "classes", "length"),
        [
            (16384, 65536, 2048),  # NAM56R: 256 MiB of logits
            (8192, 131072, 2048),
            (16384, 8192, 16384),  # an eighth of NAM56R's vocabulary
            (16384, 262144, 1024),
            (2049, 65536, 1152),  # two of nearly one length
            (5, 65536, 128),
            (0, 65536, 128),
        ],
    )
    def test_length(self, tokens, classes, length):
        assert chunk_loop.chunk_length(tokens, classes) == length

    def test_a_huge_vocabulary_has_chunks_all_the_same(self):
        assert chunk_loop.chunk_length(4096, 2**28) == chunk_loop.ALIGNMENT


class TestWeightGradient:
    @pytest.mark.parametrize("shape", [(6, 4), (7, 3), (1, 5), (130, 33), (2, 1)])
    def test_it_is_rounded_once(self, shape):
        """One and many halves of an epsilon: a sum in bf16 would stay at one."""
        vocab, hidden = shape
        weight = torch.zeros(shape, dtype=torch.bfloat16)
        gradient = WeightGradient(weight, chunks=9)
        rows = torch.arange(1.0, vocab + 1).bfloat16()
        expected = torch.zeros(shape)
        for size in (1.0, *[2.0**-9] * 8):
            d_logits = (size * rows).unsqueeze(0)
            states = torch.linspace(0.5, 1.5, hidden).bfloat16().unsqueeze(0)
            gradient.add(d_logits, states.t())
            expected += d_logits.float().t() @ states.float()
        result = gradient.result()
        assert result.dtype == torch.bfloat16 and torch.equal(result, expected.bfloat16())
        alone = rows[:, None].float() @ states.float()
        assert not torch.equal(result, alone.bfloat16())

    @pytest.mark.parametrize("shape", [(6, 4), (7, 3), (1, 5)])
    @pytest.mark.parametrize("chunks", [1, 3])
    def test_wide_it_is_the_sum_before_that_rounding(self, shape, chunks):
        vocab, hidden = shape
        weight = torch.zeros(shape, dtype=torch.bfloat16)
        wide, narrow = (WeightGradient(weight, chunks, wide) for wide in (True, False))
        for _ in range(chunks):
            d_logits, hidden_t = torch.randn(2, vocab).bfloat16(), torch.randn(hidden, 2).bfloat16()
            wide.add(d_logits, hidden_t), narrow.add(d_logits, hidden_t)
        result = wide.result()
        assert result.dtype == torch.float32 and not torch.equal(result.bfloat16().float(), result)
        assert torch.equal(result.bfloat16(), narrow.result())

    def test_nothing_added_is_nothing(self):
        assert not WeightGradient(torch.ones(3, 2).bfloat16(), chunks=0).result().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5, 3)}, r"hidden is \(2, 1, 4\) and weight is \(5, 3\)"),
        ({"weight": torch.ones(0, 4)}, r"V and h at least 1"),
        (
            {"weight": torch.ones(5, 4).bfloat16()},
            r"hidden is torch.float32 and weight is torch.bf",
        ),
        (
            {"labels": torch.zeros(2, dtype=torch.int64)},
            r"labels is \(2,\); with hidden \(2, 1, 4\)",
        ),
        ({"labels": torch.zeros(2, 1)}, r"labels are torch.float32; they must be torch.int64"),
        ({"label_smoothing": 1.0}, r"label_smoothing is 1.0; it must be in \[0, 1\)"),
        ({"z_loss": -1.0}, r"z_loss is -1.0; it must be at least 0"),
        ({"softcap": 0.0}, r"softcap is 0.0; it must be positive, or None"),
        ({"logit_scale": float("nan")}, r"logit_scale is nan; it must be a finite number"),
        ({"loss_weights": torch.ones(3, 1)}, r"loss_weights is \(3, 1\)"),
        ({"loss_weights": torch.ones(2, 1).double()}, r"loss_weights are torch.float64"),
        ({"loss_weights": torch.ones(2, 1, requires_grad=True)}, r"loss_weights want a gradient"),
    ],
)
@pytest.mark.parametrize("head", HEADS)
def test_what_does_not_fit_is_refused(head, change, message):
    given = {
        "hidden": torch.ones(2, 1, 4), "weight": torch.ones(5, 4),
        "labels": torch.zeros(2, 1, dtype=torch.int64), "loss_weights": torch.ones(2, 1),
    } | change  # fmt: skip
    with pytest.raises(LinearCrossEntropyInputError, match=message):
        HEADS[head].weighted(**given)
    given.pop("loss_weights")
    if "loss_weights" not in change:
        with pytest.raises(LinearCrossEntropyInputError, match=message):
            HEADS[head].per_token(**given)


def test_chunked_takes_no_float16():
    tensors = draw("cpu", torch.float16)
    with pytest.raises(
        LinearCrossEntropyInputError, match=r"hidden is torch.float16; .* takes tor"
    ):
        CHUNKED.per_token(**tensors)


class TestDispatch:
    @pytest.fixture(autouse=True)
    def packages(self, monkeypatch):
        monkeypatch.setattr(loss_surface, "import_reason", lambda module: None)

    def verdicts(self, device="cuda", dtype="bfloat16", tp=1):
        problem = Workload.of(device, dtype, tensor_model_parallel_size=tp)
        return dispatch.verdicts("linear_cross_entropy", problem)

    def test_in_order(self):
        served = [name for name, reason in self.verdicts().items() if reason is None]
        assert served == ["chunked", "megatron", "reference"]

    def test_a_split_vocabulary(self):
        assert self.verdicts(tp=2)["chunked"] is None

    def test_float16(self):
        found = self.verdicts(dtype="float16")
        assert "gradients of unlikely classes" in found["chunked"]
        assert found["megatron"] is None

    def test_without_a_gpu(self):
        assert [n for n, reason in self.verdicts("cpu").items() if reason is None] == ["reference"]


def test_the_public_functions_are_the_reference():
    assert REFERENCE.per_token is linear_cross_entropy
    assert REFERENCE.weighted is weighted_linear_cross_entropy
