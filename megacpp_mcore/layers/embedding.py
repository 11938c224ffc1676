"""The word embedding of a HybridModel, by the backend of the surface `embedding`.

Megatron builds the embedding with its weight and initial values, and all around the lookup stays
Megatron's: learned positions, token types, MuP's factor, dropout, the residual stream's dtype. Only
the lookup is ours, and it returns [b, s, h] as a view of [s, b, h]: Megatron's copy to that layout
then has nothing to do. Checkpoints, their names and the inference's ids are as they were.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import embedding as surface
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.workload import current_device


class GatheredEmbedding(VocabParallelEmbedding):
    """Megatron's VocabParallelEmbedding with the whole vocabulary on one rank; `lookup` has its
    rows, as `kernels.embedding` does."""

    lookup: Callable[[Tensor, Tensor], Tensor]

    def forward(self, input_: Tensor) -> Tensor:
        """ids [b, s] -> [b, s, h], a view whose memory is [s, b, h]."""
        return self.lookup(self.weight, input_).transpose(0, 1)


def choose_embedding(model: Any) -> None:
    """Let the backend that dispatch chooses look up the embeddings of `model`, a HybridModel.

    Nothing is asked on a pipeline stage without an embedding. Raises DispatchError where a named
    backend cannot serve.
    """
    if not hasattr(model, "embedding"):
        return
    config = model.config
    workload = surface.workload(current_device(), config)
    decision = dispatch.decide(surface.SURFACE.name, workload, plugin_settings(config).backends)
    words = model.embedding.word_embeddings
    if model.share_embeddings_and_output_weights and model.post_process:
        # Embedding and head may differ in whether they add to main_grad by themselves, so that what
        # autograd gets for their weight is to be added. In a pipeline Megatron does not mark it.
        words.weight.zero_out_wgrad = True
    if decision.observed == REFERENCE:
        return
    # The module that Megatron has built, with all it knows of its weight, gets another forward.
    words.__class__ = GatheredEmbedding
    words.lookup = decision.load()
    if not model.share_embeddings_and_output_weights:
        # Megatron marks a weight that MTP embeds with, too, and zeros are added to main_grad in
        # every backward pass. Here all uses of the weight add to it by themselves.
        words.weight.zero_out_wgrad = False
