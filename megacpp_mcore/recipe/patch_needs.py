"""The patches without which a recipe's results would be wrong, and why.

A run that needs one and does not have it is refused before the model is built. Other patches of the
lane are optional.
"""

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.pattern import MOE_TRACKER_PATCH
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import mla_rope

# Megatron's fused MLA RoPE tries these block sizes and rotates wrong heads where a block is cut.
_ROPE_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


class MissingPatchError(MegacppError):
    """The recipe needs patches that are not applied to the installed packages."""


def needed(recipe: Recipe) -> dict[str, str]:
    """Patch id -> what goes wrong without it, for the patches that `recipe` needs."""
    needs = {}
    heads = recipe.model.num_attention_heads // recipe.parallel.tensor_model_parallel_size
    cut = [block for block in _ROPE_BLOCKS if heads > block and heads % block]
    if recipe.attention.apply_rope_fusion and "+" in recipe.plan.megatron_pattern and cut:
        needs["mla-rope-head-mask"] = (
            f"attention.apply_rope_fusion with {heads} heads a rank: Megatron's kernel may choose "
            f"blocks of {', '.join(map(str, cut))} heads and then rotates the wrong ones"
        )
    ranks = recipe.parallel.tensor_model_parallel_size
    megatron, named = mla_rope.MEGATRON.name, recipe.backends.get(mla_rope.SURFACE.name)
    if named == megatron and mla_rope.of_recipe(recipe, "cuda") and ranks > 1:
        needs[mla_rope.K_POS_PATCH] = (
            f'backends.mla_rope = "{megatron}" over {ranks} tensor-parallel ranks: the gradient of '
            "k's rotary part leaves other ranks' heads out"
        )
    mtp_experts = any(layer.letter == "E" for layer in recipe.plan.mtp_layers)
    if recipe.mtp.mtp_use_repeated_layer and recipe.mtp.mtp_num_layers > 1 and mtp_experts:
        needs["mtp-moe-aux-loss"] = (
            "mtp.mtp_use_repeated_layer with E in the MTP pattern: the auxiliary loss counts in "
            "full at every depth, so that gradients are wrong"
        )
    if MOE_TRACKER_PATCH in recipe.plan.requires.patches and any(recipe.moe.moe_aux_loss_coeff):
        needs[MOE_TRACKER_PATCH] = (
            "a pipeline stage without E: the all-reduce of logged MoE losses aborts or hangs"
        )
    return needs


def check(recipe: Recipe) -> None:
    """Refuse a recipe that needs a patch which this interpreter's packages do not have.

    Raises MissingPatchError naming every such patch, its reason and the command that applies it.
    """
    from megacpp_mcore import patching

    needs = needed(recipe)
    if absent := patching.missing(needs):
        reasons = "; ".join(f"{patch} ({needs[patch]})" for patch in absent)
        only = " ".join(f"--only {patch}" for patch in absent)
        raise MissingPatchError(
            f"recipe {recipe.name} needs patches that are not applied: {reasons}. Apply them with "
            f"`megacpp patch apply {only}`"
        )
