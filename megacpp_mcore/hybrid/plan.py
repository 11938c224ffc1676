"""HybridPlan: a source pattern lowered to Megatron, as data. `pattern.translate` makes one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

LETTERS = {
    "A": "attention",
    "E": "mixture of experts",
    "M": "Mamba-3",
    "R": "recurrent M2RNN",
    "D": "DeltaNet",
}
SYMBOLS = ("+", "*", "D", "E", "M", "G")  # Megatron's, as far as a source letter leads to them

_CORE = "megatron.core"
# (letter, symbol) -> the class in the layer's mixer slot, under Megatron's own spec
_NATIVE_MODULES = {
    ("A", "+"): f"{_CORE}.transformer.multi_latent_attention.MLASelfAttention",
    ("A", "*"): f"{_CORE}.transformer.attention.SelfAttention",
    ("A", "D"): f"{_CORE}.transformer.experimental_attention_variant.absorbed_mla"
    ".AbsorbedMLASelfAttention",
    ("E", "E"): f"{_CORE}.transformer.moe.moe_layer.MoELayer",
    ("M", "M"): f"{_CORE}.ssm.mamba_mixer.MambaMixer",
    ("D", "G"): f"{_CORE}.ssm.gated_delta_net.GatedDeltaNet",
}
_OUR_MODULES = {
    ("A", "+"): "megacpp_mcore.layers.mla.MLASelfAttention",
    ("A", "D"): "megacpp_mcore.layers.mla.AbsorbedMLASelfAttention",
    ("A", "*"): "megacpp_mcore.layers.attention.SelfAttention",
    ("M", "M"): "megacpp_mcore.layers.mamba3.Mamba3Mixer",
    ("R", "G"): "megacpp_mcore.layers.m2rnn.M2RNNMixer",
}


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


class Spec(NamedTuple):
    """The two words after Megatron's --spec."""

    module: str
    name: str


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
        "source": {letter: letters.count(letter) for letter in LETTERS},
        "megatron": {symbol: symbols.count(symbol) for symbol in SYMBOLS},
    }


def module_of(letter: str, symbol: str, spec: Spec | None) -> str:
    """Dotted path of the class in the layer's mixer slot, under `spec` or Megatron's own."""
    ours = _OUR_MODULES if spec else {}
    return ours.get((letter, symbol)) or _NATIVE_MODULES[letter, symbol]


def spec_of(letters: str, target: str) -> Spec | None:
    """The spec of ours that M or R needs; None when Megatron's own serves all the letters."""
    if target == "native" or not set(letters) & {"M", "R"}:
        return None
    name = "nam56r_deltanet_stack_spec" if "D" in letters else "nam56r_stack_spec"
    return Spec("megacpp_mcore.specs.nam56r", name)
