"""Check that a run fits in this machine's memory, before anything is allocated.

The estimate is a lower bound of the four parts that grow with the recipe's sizes, so that it
refuses nothing that could run.
"""

from megacpp_mcore.host import memory
from megacpp_mcore.hybrid import flops
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training import sizes

_FP32 = 4
_BATCH_BYTES = 5 * 8  # of a token: tokens, labels, mask and positions, as torch and numpy have them
_INDEX_BYTES = 12  # of a sample in Megatron's indices: document, offset, place in the shuffle
_KEYS = {
    "parameters": sizes.OF_PARAMETERS,
    "activations": ("model.vocab_size", "model.hidden_size", "model.seq_length", "model.depth",
                    "schedule.micro_batch_size"),
    "batch": ("schedule.global_batch_size", "model.seq_length"),
    "samples": ("schedule.train_iters", "schedule.global_batch_size"),
}  # fmt: skip


def check(recipe: Recipe) -> None:
    """Raises OutOfMemoryError, which names the key, the bytes needed and the bytes there."""
    parts = estimate(recipe)
    largest = max(parts, key=parts.__getitem__)
    sizes.refuse(recipe, _KEYS[largest], largest, sum(parts.values()), memory.available())


def estimate(recipe: Recipe) -> dict[str, int]:
    """Bytes by part. parameters: with gradients and AdamW's two moments, all fp32. activations:
    what every layer keeps at least of a micro batch, and the logits."""
    model, schedule = recipe.model, recipe.schedule
    tokens = schedule.micro_batch_size * model.seq_length
    layers = len(recipe.plan.layers)
    samples = schedule.train_iters * schedule.global_batch_size
    return {
        "parameters": 4 * _FP32 * flops.count(recipe).parameters,
        "activations": _FP32 * tokens * (2 * layers * model.hidden_size + recipe.padded_vocab_size),
        "batch": _BATCH_BYTES * schedule.global_batch_size * model.seq_length,
        "samples": _INDEX_BYTES * samples,
    }
