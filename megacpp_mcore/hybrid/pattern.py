"""Source pattern -> HybridPlan: what a NAM56R pattern becomes in Megatron, or why it cannot.

The translator is stricter than Megatron-Core 0.19.2, which accepts empty pipeline pieces, `MM/` and
`*M/+E` (its attention check looks at each part alone) without a word. Everything here runs without
torch and without Megatron.
"""

from collections.abc import Iterable, Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters import attention as attention_letter
from megacpp_mcore.hybrid.letters import module_of, spec_of
from megacpp_mcore.hybrid.letters.letter import BlockLetter
from megacpp_mcore.hybrid.plan import HybridPlan, Layer, Mtp, Requires, Segment, Spec

ATTENTION = attention_letter.KINDS
TARGETS = ("nam56r", "native")
MOE_TRACKER_PATCH = "moe-tracker-layer-count"  # needed where only some pipeline stages have E
MAX_LAYERS = 10_000  # of the main decoder, and of all MTP depths together: stops a mistyped number

_MAIN, _MTP = "pattern", "MTP pattern"  # what a position in a message counts in
_HINTS = {
    "+": "'+' is Megatron's MLA: write A, and choose mla",
    "*": "'*' is Megatron's plain attention: write A, and choose gqa",
    "G": "'G' is Megatron's slot: write D for DeltaNet, or R for M2RNN",
    "-": "no source letter stands for Megatron's dense MLP '-'",
    "/": "the MTP part is given apart, with --mtp-depths and --mtp-pattern",
}


class PatternError(MegacppError):
    """A pattern that has no plan with the given options; the message has position and reason."""


def translate(
    source: str,
    *,
    depth: int | None = None,
    attention: str = "mla",
    dsa_ranks: Sequence[int] = (),
    mtp_depths: int = 0,
    mtp_pattern: str = "",
    pp: int | None = None,
    vpp: int | None = None,
    target: str = "nam56r",
    mamba2: bool = False,
) -> HybridPlan:
    """Translate a source pattern, in either case, with optional `|` pipeline cuts.

    Its letters are A E M R D and those of `hybrid.letters.register`.

    depth: layers of the main decoder; a pattern without `|` is tiled, or cut short, to it. None
    takes the pattern once. attention: what A becomes, mla `+`, gqa `*` or dsa `D`. dsa_ranks:
    1-based ranks among the A layers of the main decoder that become `D` while the others stay MLA.
    mtp_depths, mtp_pattern: K multi-token prediction depths of this pattern; its A follow
    `attention`. pp, vpp: pipeline and virtual pipeline size. Without `|` the layers are split
    evenly (None is 1); with `|` the cuts are kept, None is taken from their number, and a size that
    is given must fit it. target: `nam56r` puts our Mamba-3 in M and M2RNN in the G slot; `native`
    is what Megatron runs without us, where mamba2 accepts its own Mamba-2 for M.

    Raises PatternError for anything that cannot be run as asked. Positions in its messages are
    1-based and count the characters of `source` or `mtp_pattern` as typed.
    """
    _check_attention(attention, dsa_ranks)
    typed = _read(source, _MAIN)
    cut = "|" in typed
    whole = _tile(typed, depth)
    mtp_letters = _read_mtp(mtp_depths, mtp_pattern)
    pieces = whole.split("|")
    pp, vpp = _given_cuts(len(pieces), pp, vpp) if cut else _even_split(len(whole), pp, vpp)
    if not cut:
        size = len(whole) // (pp * vpp)
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]

    used = ((_MAIN, typed if cut else typed[: len(whole)]), (_MTP, mtp_letters))
    _check_target(used, target, mamba2)
    uncut = "".join(pieces)
    segments = tuple(_segments(pieces, _symbols(uncut, attention, dsa_ranks), pp))
    main = "|".join(segment.megatron_pattern for segment in segments)
    mtp_symbols = _symbols(mtp_letters, attention)
    mtp = Mtp(mtp_depths, mtp_letters, mtp_symbols) if mtp_depths else None
    spec = spec_of(uncut + mtp_letters, target)
    layers = tuple(_layers(segments, mtp, spec))
    return HybridPlan(
        source_pattern="|".join(pieces),
        megatron_pattern=main + f"/{mtp_symbols}" * mtp_depths,
        attention=attention,
        dsa_ranks=tuple(sorted(dsa_ranks)),
        target=target,
        mamba2=mamba2,
        pp=pp,
        vpp=vpp,
        layers=layers,
        segments=segments,
        mtp=mtp,
        requires=Requires(spec, (MOE_TRACKER_PATCH,) if _without_experts(layers, pp) else ()),
        notes=tuple(_notes(typed, layers, pp)),
    )


def _read(text: str, what: str) -> str:
    """The text in upper case, every character known and no `|` piece empty."""
    if not text:
        raise PatternError(f"the {what} is empty: it needs at least one of {', '.join(_names())}")
    for position, char in enumerate(text, 1):
        if char != "|" and letters.find(char.upper()) is None:
            raise PatternError(_unknown(char, position, what))
        if char == "|" and what == _MTP:
            raise PatternError(
                f"'|' at position {position} of the {what}: every MTP depth runs whole, on the "
                "last pipeline stage"
            )
    pieces = text.split("|")
    end = 0
    for number, piece in enumerate(pieces, 1):
        end += len(piece) + 1  # position of the `|` that closes this piece
        if not piece:
            raise PatternError(
                f"pipeline piece {number} of {len(pieces)} is empty, at the '|' in position "
                f"{min(end, len(text))} of the {what}: every piece needs at least one layer"
            )
    return text.upper()


def _unknown(char: str, position: int, what: str) -> str:
    # A Cyrillic or full-width letter looks like the right one: only its code point tells.
    shown = repr(char) if char.isascii() and char.isprintable() else f"U+{ord(char):04X}"
    listed = ", ".join(f"{letter} ({title})" for letter, title in _names().items())
    hint = f"; {_HINTS[char.upper()]}" if char.upper() in _HINTS else ""
    return (
        f"unknown letter {shown} at position {position} of the {what}: "
        f"the source letters are {listed}, and '|' for a pipeline cut{hint}"
    )


def _names() -> dict[str, str]:
    return {entry.letter: entry.title for entry in letters.known()}


def _tile(typed: str, depth: int | None) -> str:
    """The pattern at `depth` layers; a cut pattern stays as it is."""
    size = len(typed) - typed.count("|")
    depth = size if depth is None else depth
    if not 0 < depth <= MAX_LAYERS:
        raise PatternError(f"depth {depth}: a plan has 1 to {MAX_LAYERS} layers")
    if "|" not in typed:
        return (typed * -(-depth // size))[:depth]
    if size != depth:
        raise PatternError(
            f"depth {depth}: the {typed.count('|') + 1} pieces of the pattern hold {size} layers, "
            "and a pattern with '|' is not tiled: its pieces must add up to the depth"
        )
    return typed


def _read_mtp(depths: int, pattern: str) -> str:
    if depths < 0:
        raise PatternError(f"{depths} MTP depths: 0 (no MTP) or more")
    if not depths:
        if pattern:
            raise PatternError("an MTP pattern without MTP depths: give --mtp-depths 1 or more")
        return ""
    if not pattern:
        raise PatternError(
            f"{depths} MTP depths without an MTP pattern: give --mtp-pattern, for example AE"
        )
    typed = _read(pattern, _MTP)
    if depths * len(typed) > MAX_LAYERS:
        raise PatternError(
            f"{depths} MTP depths of {len(typed)} layers: at most {MAX_LAYERS} layers in all"
        )
    return typed


def _check_sizes(pp: int | None, vpp: int | None) -> None:
    for name, value in (("pp", pp), ("vpp", vpp)):
        if value is not None and value < 1:
            raise PatternError(f"{name} {value}: a pipeline size is 1 or more")


def _even_split(depth: int, pp: int | None, vpp: int | None) -> tuple[int, int]:
    _check_sizes(pp, vpp)
    pp, vpp = pp or 1, vpp or 1
    if vpp > 1 and pp == 1:
        raise PatternError(
            f"vpp {vpp} with pp 1: Megatron's interleaved schedule needs pp of 2 or more"
        )
    if depth % (pp * vpp):
        raise PatternError(
            f"{depth} layers do not split evenly into pp {pp} x vpp {vpp} = {pp * vpp} pieces: "
            "place the cuts yourself with '|', or choose sizes that divide the depth"
        )
    return pp, vpp


def _given_cuts(pieces: int, pp: int | None, vpp: int | None) -> tuple[int, int]:
    _check_sizes(pp, vpp)
    name, size = ("pp", pp) if pp else ("vpp", vpp or 1)
    if pieces % size:
        raise PatternError(
            f"{pieces} pipeline pieces are not divisible by {name} {size}: move the cuts, or "
            f"choose another {name}"
        )
    stages = pp or pieces // size
    if vpp not in (None, pieces // stages):
        raise PatternError(
            f"{pieces} pipeline pieces over pp {stages} make vpp {pieces // stages}, not {vpp}: "
            f"pp {stages} x vpp {vpp} needs {stages * vpp}"
        )
    if stages == 1:
        raise PatternError(
            f"{pieces} pipeline pieces with pp 1: Megatron's interleaved schedule needs pp of 2 "
            "or more; remove the '|', or choose another pp"
        )
    return stages, pieces // stages


def _find(letter: str, used: Iterable[tuple[str, str]]) -> str | None:
    for what, text in used:
        if letter in text:
            return f"position {text.index(letter) + 1} of the {what}"
    return None


def _check_target(used: Sequence[tuple[str, str]], target: str, mamba2: bool) -> None:
    if target not in TARGETS:
        raise PatternError(f"unknown target {target!r}: the targets are {', '.join(TARGETS)}")
    found = {entry: at for entry in letters.known() if (at := _find(entry.letter, used))}
    _check_one_letter_a_slot(found)
    if target == "nam56r":
        if mamba2:
            raise PatternError("mamba2 with target nam56r, whose M is Mamba-3: use target native")
        return
    # Letters that no option allows are reported first.
    for entry, at in sorted(found.items(), key=lambda item: item[0].is_native):
        if entry.why_not_native and not (mamba2 and entry.is_native):
            raise PatternError(f"{entry.letter} at {at}: {entry.why_not_native}")


def _check_one_letter_a_slot(found: dict[BlockLetter, str]) -> None:
    """found: the letters that are used -> where."""
    used = [entry.letter for entry in found]
    if two := letters.collision(used):
        one, other, symbol = two
        raise PatternError(
            f"{one.letter} at {found[one]} and {other.letter} at {found[other]}: both need "
            f"Megatron's {symbol} slot, and one model has one; use either"
        )
    specs = letters.own_specs(used)
    if len(specs) > 1:
        (first, one), (second, other), *_ = specs.items()
        raise PatternError(
            f"{one.letter} at {found[one]} needs --spec {' '.join(first)} and {other.letter} at "
            f"{found[other]} needs --spec {' '.join(second)}: one model has one stack spec; "
            "register both with a spec that has both"
        )


def _check_attention(attention: str, dsa_ranks: Sequence[int]) -> None:
    if attention not in ATTENTION:
        raise PatternError(
            f"unknown attention {attention!r}: choose {', '.join(ATTENTION)}; for MLA with some "
            "DSA layers, mla and DSA ranks"
        )
    if dsa_ranks and attention == "gqa":
        raise PatternError(
            "DSA ranks with attention gqa: Megatron cannot combine '*' with '+' or 'D' in one "
            "model; use attention mla"
        )
    if dsa_ranks and attention == "dsa":
        raise PatternError(
            "DSA ranks with attention dsa, which makes every A a DSA layer: use attention mla "
            "for the other A layers, or give no ranks"
        )


def _symbols(source: str, attention: str, dsa_ranks: Sequence[int] = ()) -> str:
    """Megatron's symbols, `D` at the A layers that dsa_ranks name."""
    table = {letter: letters.get(letter).symbols[0] for letter in set(source)}
    table["A"] = ATTENTION[attention]
    symbols = [table[letter] for letter in source]
    places = [place for place, letter in enumerate(source) if letter == "A"]
    for rank in dsa_ranks:
        if not 1 <= rank <= len(places):
            allowed = f"its ranks are 1 to {len(places)}" if places else "it has none"
            raise PatternError(f"DSA rank {rank} names no A layer of the main decoder: {allowed}")
        if symbols[places[rank - 1]] == "D":
            raise PatternError(f"DSA rank {rank} is given twice")
        symbols[places[rank - 1]] = "D"
    return "".join(symbols)


def _segments(pieces: Sequence[str], symbols: str, pp: int) -> Iterable[Segment]:
    done = 0
    for index, piece in enumerate(pieces):
        end = done + len(piece)
        yield Segment(index, index % pp, index // pp, done + 1, end, piece, symbols[done:end])
        done = end


def _layers(segments: Sequence[Segment], mtp: Mtp | None, spec: Spec | None) -> Iterable[Layer]:
    """The main decoder's layers, then those of every MTP depth, which are on the last stage."""
    pieces = [(s, s.source_pattern, s.megatron_pattern, s.first_layer, None) for s in segments]
    for depth in range(1, mtp.depths + 1) if mtp else ():
        pieces.append((segments[-1], mtp.source_pattern, mtp.megatron_pattern, 1, depth))
    rank = 0
    for segment, source, symbols, first, mtp_depth in pieces:
        for number, (letter, symbol) in enumerate(zip(source, symbols, strict=True), first):
            is_ranked = letter == "A" and mtp_depth is None
            rank += is_ranked
            yield Layer(
                number=number,
                letter=letter,
                symbol=symbol,
                a_rank=rank if is_ranked else None,
                module=module_of(letter, symbol, spec),
                stage=segment.stage,
                virtual_stage=segment.virtual_stage,
                mtp_depth=mtp_depth,
            )


def _notes(typed: str, layers: Sequence[Layer], pp: int) -> Iterable[str]:
    depth = sum(layer.mtp_depth is None for layer in layers)
    size = len(typed) - typed.count("|")
    if depth < size:
        yield f"depth {depth} uses only the first {depth} of the pattern's {size} letters"
    if without := _without_experts(layers, pp):
        yield (
            f"pipeline stage {', '.join(map(str, without))} has no E while another has: Megatron "
            "0.19.2 sizes its log of MoE losses by another count there, so that its all-reduce "
            f"over the stages aborts or hangs; apply the patch {MOE_TRACKER_PATCH}, move a cut to "
            "give every stage an E, or train without auxiliary losses"
        )


def _without_experts(layers: Sequence[Layer], pp: int) -> list[int]:
    """The pipeline stages without E, where another stage has one."""
    with_experts = {layer.stage for layer in layers if layer.letter == "E"}
    return [stage for stage in range(pp) if stage not in with_experts] if with_experts else []
