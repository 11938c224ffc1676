"""Refuse sizes that no memory holds, with the key to change."""

from collections.abc import Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe

OF_PARAMETERS = (
    "model.vocab_size", "model.hidden_size", "model.depth", "model.ffn_hidden_size",
    "moe.num_experts", "moe.moe_ffn_hidden_size",
)  # fmt: skip
_USUAL = {"cpu": "nam56r-tiny", "cuda": "nam56r"}


class OutOfMemoryError(MegacppError):
    """The recipe needs more memory than there is."""


def refuse(recipe: Recipe, keys: Sequence[str], part: str, needed: float, there: float) -> None:
    """Raises OutOfMemoryError when `needed` bytes, most of them for `part`, are more than `there`.

    keys: what `part` grows with; that which is farthest from the shipped recipe's is named.
    """
    if needed <= there:
        return
    usual = load_recipe(_USUAL[recipe.launch.device])
    key = max(keys, key=lambda key: (recipe.get(key) or 0) / (usual.get(key) or 1))
    raise OutOfMemoryError(
        f"recipe {recipe.name}: {key} = {recipe.get(key)}: at least {needed / 2**30:,.1f} GiB are "
        f"needed, most for {part}, and {there / 2**30:,.1f} GiB are there; make it smaller, or "
        "train where there is more memory"
    )
