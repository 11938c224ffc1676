"""DSA must not store the index scores of all heads at once; values and gradients stay equal."""

from _common import DEFECT, RIGHT, hide_gpu, report, run

QUERIES, KEYS, BATCH, HEADS, DIM = 24, 40, 2, 16, 32


def main() -> int:
    hide_gpu()
    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import _compute_index_scores

    torch.manual_seed(0)
    inputs = (
        torch.randn(QUERIES, BATCH, HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(QUERIES, BATCH, HEADS, dtype=torch.bfloat16),
        torch.randn(KEYS, BATCH, DIM, dtype=torch.bfloat16),
    )
    with LargestTensor() as largest, torch.no_grad():
        scores = _compute_index_scores(*inputs)
    times = largest.elements / scores.numel()
    if times > 2:
        return report(DEFECT, f"{HEADS} heads: a tensor {times:g} times the size of the scores")
    for relu in (True, False):
        compare(_compute_index_scores, inputs, relu)
    return report(RIGHT, f"{HEADS} heads: no tensor over {times:g} times the scores; values agree")


def compare(function, inputs, relu: bool) -> None:
    """Scores and gradients against the same in float64, with the rounding that fp32 allows."""
    import torch

    tensors = [t.float().requires_grad_() for t in inputs]
    scores = function(*tensors, use_relu=relu)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    exact = [t.double().requires_grad_() for t in inputs]
    q, w, k = exact
    products = torch.einsum("sbhd,tbd->sbht", q, k)
    wanted = torch.einsum("sbht,sbh->bst", products.relu() if relu else products, w)
    wanted.backward(grad.double())
    eps = torch.finfo(torch.float32).eps
    pairs = [
        (scores, wanted),
        *((got.grad, want.grad) for got, want in zip(tensors, exact, strict=True)),
    ]
    for got, want in pairs:
        # sums of up to DIM * HEADS or KEYS * HEADS products, each rounding by eps of the largest
        bound = KEYS * HEADS * eps * want.abs().max()
        assert got.dtype == torch.float32 and (got - want).abs().max() <= bound
    assert scores.shape == (BATCH, QUERIES, KEYS)


def LargestTensor():
    """A context whose `elements` is the size of the largest tensor that an operator returned."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() > 0:
                self.elements = max(self.elements, result.numel())
            return result

    return Mode()


run(main)
