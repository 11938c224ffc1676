"""linear_cross_entropy over a vocabulary that is split over ranks: what every rank must find.

`check` is called by every rank of a group, on CPUs over gloo and on GPUs over NCCL: against the
definition in float64 on the whole vocabulary, and against Megatron's own cross entropy of the
ranks' logits.
"""

import torch
import torch.distributed as dist
from loss_contract import directions, weights
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy import (
    REFERENCE,
    Head,
    LinearCrossEntropyInputError,
)

IGNORED = -100
OPTIONS = {
    "none": {},
    "smoothing": {"label_smoothing": 0.2},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 1.3},
}


def check(
    head: Head, group: dist.ProcessGroup, device: str, dtype: torch.dtype,
    seq: int = 8, batch: int = 2, hidden_size: int = 12, vocab: int = 24,
) -> None:  # fmt: skip
    """Raise AssertionError on the rank that finds something wrong. seq: divides by the ranks."""
    case = _Case(group, device, dtype, seq, batch, hidden_size, vocab)
    for what, options in OPTIONS.items():
        for sequence_parallel in (False, True):
            case.against_the_definition(head, what, options, sequence_parallel)
    case.against_megatron(head)
    case.refused(head)


class _Case:
    def __init__(self, group, device, dtype, seq, batch, hidden_size, vocab) -> None:
        self.group, self.dtype = group, dtype
        self.rank, self.ranks = group.rank(), group.size()
        torch.manual_seed(11)  # the same on all ranks
        self.hidden = torch.randn(seq, batch, hidden_size).to(device, dtype)
        self.weight = (torch.randn(vocab, hidden_size) * hidden_size**-0.5).to(device, dtype)
        self.labels = torch.randint(vocab, (seq, batch)).to(device)
        self.labels[0, 0] = self.labels[2, 1] = IGNORED
        self.given = weights(self.labels.cpu()).to(device)
        self.along = directions(self.labels.cpu()).to(device)
        self.terms = vocab + hidden_size + seq * batch

    @property
    def shard(self) -> Tensor:
        return self.weight.chunk(self.ranks)[self.rank].clone().requires_grad_()

    def close(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """As `loss_contract.close`, and the sum of the ranks' parts in the dtype."""
        bound = (9 + self.ranks) * torch.finfo(self.dtype).eps / 2
        bound += 6 * self.terms * torch.finfo(torch.float32).eps
        error = (actual.double() - expected).abs().max() / (expected.abs().max() or 1)
        assert actual.shape == expected.shape and error <= bound, f"{what}: {error:.2e} > {bound}"

    def same_on_all(self, x: Tensor, what: str) -> None:
        all_of_them = x.new_empty(self.ranks, *x.shape)
        dist.all_gather_into_tensor(all_of_them.flatten(0, 1), x.contiguous(), group=self.group)
        assert torch.equal(all_of_them, x.expand_as(all_of_them)), f"{what} differ between ranks"

    def truth(self, options: dict) -> list[Tensor]:
        """Losses; total; gradients of hidden and weight, of the total and then along `along`."""
        hidden, weight = (x.double().requires_grad_() for x in (self.hidden, self.weight))
        losses = REFERENCE.per_token(hidden, weight, self.labels, **options)
        total = (losses * self.given).sum()
        sources = hidden, weight
        first = torch.autograd.grad(-1.5 * total, sources, retain_graph=True)
        return [losses, total, *first, *torch.autograd.grad(losses, sources, self.along.double())]

    def against_the_definition(
        self, head: Head, what: str, options: dict, sequence_parallel: bool
    ) -> None:
        losses, total, *gradients = self.truth(options)
        cut = (lambda x: x.chunk(self.ranks)[self.rank]) if sequence_parallel else (lambda x: x)
        enter = gather_from_sequence_parallel_region if sequence_parallel else (
            copy_to_tensor_model_parallel_region)  # fmt: skip
        hidden, weight = cut(self.hidden).clone().requires_grad_(), self.shard
        options = options | {"tp_group": self.group}
        everyones = enter(hidden, group=self.group)
        found, single = head.weighted(everyones, weight, self.labels, self.given, **options)
        others = head.per_token(everyones, weight, self.labels, **options)
        name = f"{what}, sequence parallel {sequence_parallel}"
        for x, expected in ((found, total), (single, losses), (others, losses)):
            self.close(x.detach(), expected, name)
            self.same_on_all(x.detach().reshape(-1), name)
        actual = torch.autograd.grad(-1.5 * found, (hidden, weight), retain_graph=True)
        actual += torch.autograd.grad(others, (hidden, weight), self.along)
        for index, (x, expected) in enumerate(zip(actual, gradients, strict=True)):
            wanted = expected.chunk(self.ranks)[self.rank] if index % 2 else cut(expected)
            self.close(x, wanted, f"{name}: gradient {index}")

    def against_megatron(self, head: Head) -> None:
        """Its loss and gradients of the same logits; where nothing counts, its mask says so."""
        counts = self.labels != IGNORED
        hidden, weight = self.hidden.clone().requires_grad_(), self.shard
        logits = copy_to_tensor_model_parallel_region(hidden, group=self.group) @ weight.t()
        theirs = vocab_parallel_cross_entropy(
            logits, self.labels.masked_fill(~counts, 0), tp_group=self.group
        )
        theirs = theirs.masked_fill(~counts, 0.0)
        expected = torch.autograd.grad((theirs * self.given).sum(), (hidden, weight))
        hidden, weight = self.hidden.clone().requires_grad_(), self.shard
        everyones = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        total, ours = head.weighted(everyones, weight, self.labels, self.given, tp_group=self.group)
        self.close(ours, theirs.detach().double(), "Megatron's losses")
        actual = torch.autograd.grad(total, (hidden, weight))
        for x, other, name in zip(actual, expected, ("hidden", "weight"), strict=True):
            self.close(x, other.double(), f"Megatron's gradient of {name}")

    def refused(self, head: Head) -> None:
        """On all ranks, whichever has the label's class; a device would stop its process."""
        if self.labels.device.type == "cpu":
            for label in (-1, len(self.weight)):
                wrong = torch.full_like(self.labels, label)
                try:
                    head.per_token(self.hidden, self.shard, wrong, tp_group=self.group)
                except LinearCrossEntropyInputError as refusal:
                    assert f"labels [{label}] are out of range" in str(refusal)
                else:
                    raise AssertionError(f"label {label} was taken")
