"""What a backward function may ask of the backward pass that runs it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError


def frees_the_graph() -> bool:
    """Whether this pass frees the graph: then it is the last to read what was kept for it, and may
    overwrite tensors that nothing else refers to. Only inside a backward pass."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class SecondDerivativeError(MegacppError):
    """A kernel's gradient was to be differentiated itself."""


def no_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward function that raises SecondDerivativeError in a pass with create_graph=True.

    torch's once_differentiable refuses in the second pass, and only where that pass visits it:
    `torch.autograd.grad(gradient, x)` does not, and the gradient's other parts are returned.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            name = type(ctx).__name__.removesuffix("Backward").strip("_")
            raise SecondDerivativeError(
                f"{name} has no second derivative, and create_graph=True asks for one: compute "
                "the gradients without it, or those of a layer of torch's own operations"
            )
        return backward(ctx, *gradients)

    return checked
