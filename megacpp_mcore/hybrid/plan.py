"""HybridPlan: a source pattern lowered to Megatron, as data. `pattern.translate` makes one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megacpp_mcore.hybrid.letters import SHIPPED
from megacpp_mcore.hybrid.letters.letter import Spec

# What every plan counts, also where it has none: a registered letter is counted where it is used.
_LETTERS = [entry.letter for entry in SHIPPED]
_SYMBOLS = list(dict.fromkeys(symbol for entry in SHIPPED for symbol in entry.symbols))


@dataclass(frozen=True)
class Layer:
    """One layer. Numbers are Megatron's: they start at 1, and again in every MTP depth.

    a_rank: 1-based place among the A layers of the main decoder, else None. module: dotted path of
    the class in the layer's mixer slot. stage, virtual_stage: 0-based pipeline rank and virtual
    rank. mtp_depth: None in the main decoder, 1 to K inside MTP.
    """

    number: int
    letter: str
    symbol: str
    a_rank: int | None
    module: str
    stage: int
    virtual_stage: int
    mtp_depth: int | None


@dataclass(frozen=True)
class Segment:
    """One pipeline piece; index is virtual_stage * pp + stage, layer numbers are inclusive."""

    index: int
    stage: int
    virtual_stage: int
    first_layer: int
    last_layer: int
    source_pattern: str
    megatron_pattern: str


@dataclass(frozen=True)
class Mtp:
    """The multi-token prediction part: one pattern, at each of `depths`, on the last stage."""

    depths: int
    source_pattern: str
    megatron_pattern: str


@dataclass(frozen=True)
class Requires:
    """spec: ours, or None when Megatron's own serves every layer. patches: patch lane ids."""

    spec: Spec | None
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class HybridPlan:
    """What a source pattern is in Megatron.

    source_pattern: tiled to the depth, upper case, with the `|` cuts, without MTP.
    megatron_pattern: the value of --hybrid-layer-pattern, MTP included. layers: the main decoder,
    then every MTP depth. notes: what can be run but deserves a look, one sentence each.
    """

    source_pattern: str
    megatron_pattern: str
    attention: str
    dsa_ranks: tuple[int, ...]
    target: str
    mamba2: bool
    pp: int
    vpp: int
    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    mtp: Mtp | None
    requires: Requires
    notes: tuple[str, ...]

    @property
    def letters(self) -> frozenset[str]:
        """Source letters of all layers, MTP's too."""
        return frozenset(layer.letter for layer in self.layers)

    @property
    def symbols(self) -> frozenset[str]:
        """Megatron's symbols of all layers, MTP's too."""
        return frozenset(layer.symbol for layer in self.layers)

    @property
    def main_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.mtp_depth is None)

    @property
    def mtp_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.mtp_depth is not None)

    @property
    def depth(self) -> int:
        """Layers of the main decoder: Megatron's num_layers."""
        return len(self.main_layers)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Layers of the main decoder, by `source` letter and by `megatron` symbol, zeros too."""
        return _counts(self.main_layers)

    @property
    def mtp_counts(self) -> dict[str, dict[str, int]]:
        """As `counts`, over all MTP depths together."""
        return _counts(self.mtp_layers)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; the keys are a contract."""
        spec = self.requires.spec
        return {
            "source_pattern": self.source_pattern,
            "megatron_pattern": self.megatron_pattern,
            "depth": self.depth,
            "attention": self.attention,
            "dsa_ranks": list(self.dsa_ranks),
            "target": self.target,
            "mamba2": self.mamba2,
            "counts": self.counts,
            "layers": [asdict(layer) for layer in self.layers],
            "pipeline": {
                "pp": self.pp,
                "vpp": self.vpp,
                "segments": [asdict(segment) for segment in self.segments],
            },
            "mtp": asdict(self.mtp) | {"counts": self.mtp_counts} if self.mtp else None,
            "requires": {
                "spec": spec._asdict() if spec else None,
                "patches": list(self.requires.patches),
            },
            "notes": list(self.notes),
        }


def _counts(layers: Sequence[Layer]) -> dict[str, dict[str, int]]:
    letters = [layer.letter for layer in layers]
    symbols = [layer.symbol for layer in layers]
    return {
        "source": {letter: letters.count(letter) for letter in dict.fromkeys(_LETTERS + letters)},
        "megatron": {symbol: symbols.count(symbol) for symbol in dict.fromkeys(_SYMBOLS + symbols)},
    }
