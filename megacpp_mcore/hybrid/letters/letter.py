"""What the table knows of a block letter: its place in Megatron's stack, its module, its cost, and
what the layout planner asks about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import RecomputeSettings
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.planner.activations import Sizes
    from megacpp_mcore.planner.rates import Rates
    from megacpp_mcore.recipe import Recipe
    from megacpp_mcore.recipe.refusal import Rules

# Megatron's symbol -> the field of its HybridStackSubmodules that has the layer's spec.
STACK_FIELDS = {
    "M": "mamba_layer",
    "G": "gdn_layer",
    "*": "attention_layer",
    "D": "dsa_layer",
    "+": "mla_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
}


class Spec(NamedTuple):
    """The two words after Megatron's --spec."""

    module: str
    name: str


@dataclass(frozen=True)
class Cost:
    """What one layer costs. Operations are a token's; an m x n weight costs 2 m n of them.

    weights: parameters that each token is multiplied with. others: the rest of the parameters.
    mixing: operations a token of the forward pass that no weight has a part in, such as a scan's.
    idle: parameters of experts that the token does not meet. detached: operations of the forward
    pass that one of the two gradients is not made for.
    """

    weights: int
    others: int
    mixing: float = 0.0
    idle: int = 0
    detached: float = 0.0


# (recipe, layer, mean number of keys a query sees) -> what the layer costs
CostOf = Callable[["Recipe", "Layer", float], Cost]
# (recipe, sizes of a rank, what is recomputed or None) -> bytes a token and rank
KeptOf = Callable[["Recipe", "Sizes", "RecomputeSettings | None"], float]

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class Experts:
    """What the planner asks about routed experts.

    parameters: of all of them. flops: operations a token of the experts that it meets, forward and
    backward. exchanged: bytes a token that a rank keeps beyond `Planning.kept` where its experts
    serve other ranks' tokens, `skew` being by how much the rows of the fullest are more than the
    mean's.
    """

    parameters: Callable[["Recipe"], int]
    flops: Callable[["Recipe"], float]
    exchanged: Callable[["Recipe", "Sizes", "RecomputeSettings", float], float]


@dataclass(frozen=True)
class Planning:
    """What `megacpp recipe plan` asks about a layer, besides its cost.

    kept: what the layer saves for its backward pass besides its input and the output of its norm.
    replicated: parameters that every tensor-parallel rank has; None: the norm's. recurrence:
    seconds of forward and backward of a recurrence on one rank, which are added to the layer's
    products; None: it has none. experts: None: it has no routed ones. surface: where the layer's
    rate was measured for each backend of a surface, that surface. recomputes: the parts of
    [recompute] that the layer can have, as "key.part". recomputes_norm: whether
    recompute.layernorm is about its norm.
    """

    kept: KeptOf
    replicated: Callable[["Recipe"], int] | None = None
    recurrence: Callable[["Recipe", "Sizes", "Rates"], float] | None = None
    experts: Experts | None = None
    surface: str | None = None
    recomputes: tuple[str, ...] = ()
    recomputes_norm: bool = True


@dataclass(frozen=True)
class Slot:
    """A letter in one of Megatron's slots. Paths are dotted, so that nothing is imported here.

    symbol: Megatron's. module: the class in the layer's mixer slot under our spec. layer: the
    function that makes the layer's spec, `layers.blocks.StackParts` -> Megatron's ModuleSpec.
    native: the class under Megatron's own spec, None where it has none. native_cost: what that
    costs, where it is another block than ours. planned: for `megacpp recipe plan`; None: that
    refuses a model with it. exported: what its layers are called in an exported model
    (`inference`); None: generation and export refuse a model with it.
    """

    symbol: str
    module: str
    layer: str
    cost: CostOf
    native: str | None = None
    native_cost: CostOf | None = None
    planned: Planning | None = None
    exported: str | None = None


@dataclass(frozen=True)
class BlockLetter:
    """A letter of a source pattern. title: what it stands for, in a few words.

    slots: attention has one for each kind; every other letter has one. not_native: why Megatron
    cannot run it without us; empty: it can, or, where it has no such block, the title says it.
    spec: what --spec names for a stack that has this letter, where that is not nam56r_stack_spec.
    rules: refuses what a recipe with the letter may not say (Megatron's own keys of attention and
    experts have their rules in recipe/rules). split_sequence: why the tokens of a sequence cannot
    lie on several ranks; packed_documents: why a row cannot have several documents; empty: they
    can. recompute: its key in [recompute]. packages: (module to import, package to install) that a
    run on GPUs needs.
    """

    letter: str
    title: str
    slots: tuple[Slot, ...]
    not_native: str = ""
    spec: Spec | None = None
    rules: "Callable[[Rules], None] | None" = None
    split_sequence: str = "its entry does not say that it can take a part of the sequence"
    packed_documents: str = "its entry does not say that it keeps documents apart"
    recompute: str | None = None
    packages: tuple[tuple[str, str], ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(slot.symbol for slot in self.slots)

    @property
    def is_native(self) -> bool:
        """Whether Megatron's own spec has a block for it, be it another one."""
        return all(slot.native for slot in self.slots)

    @property
    def why_not_native(self) -> str:
        """Why target native refuses the letter; empty where Megatron's own block is the same."""
        if self.not_native or self.is_native:
            return self.not_native
        return f"Megatron has no {self.title}; target native cannot run it"

    def slot(self, symbol: str) -> Slot:
        """The letter in the slot of `symbol`, one of `symbols`."""
        return next(slot for slot in self.slots if slot.symbol == symbol)


def norm_parameters(recipe: "Recipe", size: int | None = None) -> int:
    """Parameters of a norm over `size` channels, hidden_size by default."""
    size = recipe.model.hidden_size if size is None else size
    return size * (1 if recipe.model.normalization == "RMSNorm" else 2)
