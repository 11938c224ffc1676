"""What a backward function may ask of the backward pass that runs it."""

import torch


def frees_the_graph() -> bool:
    """Whether this pass frees the graph: then it is the last to read what was kept for it, and may
    overwrite tensors that nothing else refers to. Only inside a backward pass."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()
