"""The embedding: admission, gradients in main_grad, runs over blocks' borders, wrong kernels."""

import admission
import pytest
import torch
from admission_probes import poisoned_memory

from megacpp_mcore.kernels import main_grad, parity
from megacpp_mcore.kernels.embedding import embedding as definition
from megacpp_mcore.kernels.embedding import triton as kernels
from megacpp_mcore.kernels.embedding.case import KINDS, EmbeddingCase
from megacpp_mcore.kernels.embedding.triton import EmbeddingInputError, embedding

test_admission = admission.suite("embedding", beyond_dispatch=("triton",))

VOCAB, HIDDEN = 37, 11
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch):
    """Of four tokens and several tiles of columns; crossing runs take two parts at a time."""
    sizes = {"_TOKENS": 4, "_COLUMNS": 8, "_PARTS": 2, "_PART_COLUMNS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(kernels, name, size)


def drawn(kind, tokens, dtype=torch.bfloat16, seed=0):
    """weight, ids [1, tokens] and the rows' gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    ids = KINDS[kind](tokens, VOCAB, generator).view(1, tokens)
    return weight, ids, torch.randn(tokens, 1, HIDDEN, generator=generator).to(dtype)


def wrapped(weight, start=None):
    """As data parallelism leaves it."""
    weight.main_grad = torch.zeros(weight.shape) if start is None else start.clone()
    weight.grad_added_to_main_grad = False
    return weight


def sums(ids, dy):
    rows = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
    return rows.index_add_(0, ids.t().flatten(), dy.double().flatten(0, 1))


def assert_sums(found, expected, tokens):
    """In float32: an epsilon a term, of sums of up to three times the root of their number."""
    bound = max(tokens, 1) * torch.finfo(torch.float32).eps * 4 * max(tokens, 1) ** 0.5
    assert (found.double() - expected).abs().max() <= bound


class TestIntoMainGrad:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_run_is_added_once_and_other_rows_keep_their_bits(
        self, kind, dtype, small_blocks
    ):
        for tokens in (1, 3, 4, 5, 8, 29):
            weight, ids, dy = drawn(kind, tokens, dtype, seed=tokens)
            start = torch.randn(VOCAB, HIDDEN)
            wrapped(weight, start)
            with poisoned_memory("cpu"):
                y = embedding(weight, ids)
                y.backward(dy)
            assert torch.equal(y, definition(weight, ids)) and y.is_contiguous()
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
            assert_sums(weight.main_grad - start, sums(ids, dy), tokens)
            absent = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, ids.flatten(), False)
            assert torch.equal(weight.main_grad[absent], start[absent])

    @pytest.mark.parametrize("length", range(1, 14))
    def test_a_run_of_any_length_from_any_place_of_a_block(self, length, small_blocks):
        """Ids 0, then `length` times 1, then 2, and so on: every border of a run meets a border
        of a block, and lies one before and one behind it."""
        for lead in range(5):
            ids = torch.tensor([[0] * lead + [1] * length + [2] * 3 + [3] * 5])
            weight, _, _ = drawn("uniform", 1)
            dy = torch.randn(ids.numel(), 1, HIDDEN).bfloat16()
            embedding(wrapped(weight), ids).backward(dy)
            assert_sums(weight.main_grad, sums(ids, dy), ids.numel())

    def test_it_is_the_gradient_that_a_weight_without_main_grad_gets(self, small_blocks):
        weight, ids, dy = drawn("bytes", 29, torch.float32)
        embedding(weight, ids).backward(dy)
        dense, weight.grad = weight.grad, None
        embedding(wrapped(weight), ids).backward(dy)
        assert torch.equal(weight.main_grad, dense)

    def test_a_16_bit_main_grad_is_rounded_once(self, small_blocks):
        weight, ids, dy = drawn("equal", 29)
        wrapped(weight, torch.ones(VOCAB, HIDDEN).bfloat16())
        embedding(weight, ids).backward(dy)
        expected = 1 + sums(ids, dy)
        error = (weight.main_grad.double() - expected).abs()
        # Triton's interpreter cuts bits off where a GPU rounds: an epsilon, not half of one.
        assert (error <= torch.finfo(torch.bfloat16).eps * expected.abs() + 1e-4).all()

    def test_two_batch_rows_are_in_megatrons_order(self, small_blocks):
        weight, ids, _ = drawn("uniform", 12)
        ids = ids.view(3, 4)
        y = embedding(wrapped(weight), ids)
        assert y.shape == (4, 3, HIDDEN) and torch.equal(y[1, 2], weight[ids[2, 1]])
        dy = torch.randn(y.shape).bfloat16()
        y.backward(dy)
        assert_sums(weight.main_grad, sums(ids, dy), 12)

    @pytest.mark.slow
    def test_the_same_bits_every_time(self, small_blocks):
        weight, ids, dy = drawn("bytes", 61)
        found = []
        for _ in range(3):
            embedding(wrapped(weight), ids).backward(dy)
            found.append(weight.main_grad)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

    def test_a_gradient_that_is_not_finite_stays_in_its_row(self, small_blocks):
        weight, _, _ = drawn("uniform", 1)
        ids = torch.tensor([[4, 5, 5, 6, 6]])
        dy = torch.ones(5, 1, HIDDEN).bfloat16()
        dy[1] = float("inf")
        embedding(wrapped(weight), ids).backward(dy)
        assert torch.equal(weight.main_grad.isfinite().all(1), torch.arange(VOCAB) != 5)

    def test_no_tokens(self):
        weight, ids, _ = drawn("uniform", 1)
        y = embedding(wrapped(weight), ids[:, :0])
        y.sum().backward()
        assert y.shape == (0, 1, HIDDEN) and not weight.main_grad.any()


class TestOneBackwardPass:
    """The contract with autograd and data parallelism, of a weight that is used several times."""

    @pytest.fixture
    def handed(self, monkeypatch):
        """What each use gave to autograd."""
        found = []

        def spy(weight):
            found.append(main_grad.handed_on(weight))
            return found[-1]

        monkeypatch.setattr(kernels, "handed_on", spy)
        return found

    def test_only_the_first_use_hands_a_gradient_on(self, handed):
        weight, ids, dy = drawn("bytes", 9)
        wrapped(weight)
        loss = sum((embedding(weight, ids).float() * dy.float()).sum() for _ in range(3))
        loss.backward()
        assert [x is None for x in handed] == [False, True, True]
        assert weight.grad.shape == weight.shape  # as overlap_grad_reduce asks
        assert_sums(weight.main_grad, 3 * sums(ids, dy), 27)

    def test_every_backward_pass_hands_one_on(self, handed):
        weight, ids, dy = drawn("bytes", 9)
        y = embedding(wrapped(weight), ids)
        for _ in range(2):
            y.backward(dy, retain_graph=True)
        assert [x is None for x in handed] == [False, False]
        assert_sums(weight.main_grad, 2 * sums(ids, dy), 18)

    def test_a_backward_pass_inside_another(self, handed):
        """As an activation checkpoint's that is re-entered: both hand their gradient on."""
        from torch.utils.checkpoint import checkpoint

        weight, ids, dy = drawn("bytes", 9)
        wrapped(weight)
        anchor = torch.ones((), requires_grad=True)

        def inner(anchor):
            return embedding(weight, ids) * anchor

        loss = (embedding(weight, ids).float() * dy.float()).sum()
        loss = loss + (checkpoint(inner, anchor, use_reentrant=True).float() * dy.float()).sum()
        loss.backward()
        assert all(x is not None for x in handed) and len(handed) == 2
        assert_sums(weight.main_grad, 2 * sums(ids, dy), 18)

    def test_where_somebody_adds_it_up_all_the_same_it_is_zero(self, handed):
        weight, ids, dy = drawn("bytes", 9)
        wrapped(weight).zero_out_wgrad = True
        (embedding(weight, ids) * dy + embedding(weight, ids) * dy).sum().backward()
        assert not weight.grad.any()

    def test_outside_of_a_backward_pass_it_is_always_there(self):
        weight = torch.ones(2, 3)
        assert main_grad.handed_on(weight) is not None and main_grad.handed_on(weight) is not None

    def test_a_weight_that_wants_no_gradient_gets_none(self, handed):
        weight, ids, _ = drawn("bytes", 9)
        wrapped(weight).requires_grad_(False)
        assert not embedding(weight, ids).requires_grad and not weight.main_grad.any()


def share(case, operator, seed=0):
    """The largest error of the operator in units of what is allowed."""
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed)
    truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64, by_region=True)
    values = parity.run(case, case.bind(operator, "cpu", torch.bfloat16), tensors, truth.directions)
    return max(e.share for e in parity.errors(case, values, truth, torch.bfloat16))


class TestWrongKernels:
    """What the bench's gate must refuse, in the kernels themselves."""

    CASE = EmbeddingCase(2, 15, HIDDEN, VOCAB, "repeated")

    @pytest.fixture(autouse=True)
    def right(self, small_blocks):
        assert share(self.CASE, embedding) <= 1

    def replaced(self, monkeypatch, name, before=lambda kernel, arguments: None):
        """The kernel with its arguments changed by `before`, which may leave the launch out."""
        kernel = getattr(kernels, name)

        class Launch:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    changed = before(grid, arguments)
                    if changed is not None:
                        kernel[changed[0]](*changed[1], **options)

                return launch

        monkeypatch.setattr(kernels, name, Launch())

    def test_dropped_crossing_runs(self, monkeypatch):
        self.replaced(monkeypatch, "_embedding_add_crossing_runs")
        assert share(self.CASE, embedding) > 1

    def test_one_dropped_crossing_run(self, monkeypatch):
        self.replaced(
            monkeypatch,
            "_embedding_add_crossing_runs",
            lambda grid, given: ((grid[0] - 3, grid[1]), given),
        )
        assert share(self.CASE, embedding) > 1

    def test_a_block_that_is_not_run(self, monkeypatch):
        self.replaced(
            monkeypatch, "_embedding_add_runs", lambda grid, given: ((grid[0] - 1, grid[1]), given)
        )
        assert not share(self.CASE, embedding) <= 1

    def test_a_tile_of_columns_that_is_not_run(self, monkeypatch):
        self.replaced(
            monkeypatch, "_embedding_add_runs", lambda grid, given: ((grid[0], grid[1] - 1), given)
        )
        assert not share(self.CASE, embedding) <= 1

    def test_a_sign(self, monkeypatch):
        self.replaced(
            monkeypatch, "_embedding_add_runs",
            lambda grid, given: (grid, (*given[:2], -given[2], *given[3:])),
        )  # fmt: skip
        assert share(self.CASE, embedding) > 1

    def test_runs_taken_to_begin_one_token_late(self, monkeypatch):
        """The first token behind every border of a block counts for the run before it."""

        def late(grid, given):
            runs = given[0].clone()
            runs[4::4] = runs[3:-1:4]
            return grid, (runs, *given[1:])

        self.replaced(monkeypatch, "_embedding_add_runs", late)
        many_runs = EmbeddingCase(2, 15, HIDDEN, VOCAB, "uniform")
        assert share(many_runs, embedding) > 1

    def test_an_order_that_is_one_off(self, monkeypatch):
        self.replaced(
            monkeypatch, "_embedding_add_runs",
            lambda grid, given: (grid, (given[0], given[1].roll(1), *given[2:])),
        )  # fmt: skip
        assert share(self.CASE, embedding) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5, 3).half()}, r"the weight is torch.float16 .* 'reference'"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32)}, r"the ids are torch.int32; .* torch.int64"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, r"the ids are \(4,\) on cpu; they must be"),
        ({"weight": torch.ones(5)}, r"the weight is \(5,\) on cpu"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"weight": torch.ones(5, 3), "ids": torch.zeros(2, 4, dtype=torch.int64)} | change
    with pytest.raises(EmbeddingInputError, match=message):
        embedding(**given)


@pytest.mark.parametrize("operator", [definition, embedding], ids=["definition", "triton"])
def test_an_id_out_of_range_is_refused(operator):
    with pytest.raises(IndexError):
        operator(torch.ones(5, 3), torch.tensor([[0, 5]]))


def test_main_grads_operator_is_what_it_says():
    _, ids, dy = drawn("bytes", 9)
    given = (torch.zeros(VOCAB, HIDDEN), dy, ids)
    torch.library.opcheck(kernels._add_gradient, given)


def test_the_kinds_of_text():
    found = {}
    for kind in KINDS:
        _, ids, _ = drawn(kind, 29)
        assert ids.shape == (1, 29) and ids.min() >= 0 and ids.max() < VOCAB
        found[kind] = ids.unique().numel()
    assert found["equal"] == 1 and found["distinct"] == 29 and found["repeated"] <= 5
    case = EmbeddingCase(1, 4, 8, 16)
    tensors = {"weight": torch.ones(16, 8), "ids": torch.tensor([[3, 3, 4, 5]])}
    assert case.unread_bytes(tensors) == 13 * 8 * 4
