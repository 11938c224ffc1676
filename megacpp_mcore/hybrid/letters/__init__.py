"""The block letters of a source pattern: one file a letter, and the table that lists them.

The translator, the plan, FLOPs, recipe rules, the layout planner, the stack spec, export and the
command line read the table; a letter of your own is one more entry of it (`register`;
examples/own_block.py). Nothing here imports torch.
"""

import importlib.metadata
from collections.abc import Iterable
from functools import cache

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.letters import attention, deltanet, experts, m2rnn, mamba3
from megacpp_mcore.hybrid.letters.letter import BlockLetter, Cost, Experts, Planning, Slot, Spec

__all__ = [
    "BlockLetter", "Cost", "Experts", "LetterError", "Planning", "Slot", "Spec", "find", "known",
    "register",
]  # fmt: skip

SHIPPED = (attention.A, experts.E, mamba3.M, m2rnn.R, deltanet.D)
NAM56R_SPEC = Spec("megacpp_mcore.specs.nam56r", "nam56r_stack_spec")
ENTRY_POINTS = "megacpp_mcore.letters"  # the group in which an installed package names its letters
# Slots that an own letter may take. Attention's symbols and E turn on parts of Megatron (its
# attention flags, the router's losses) that another block has no use for.
OPEN_SLOTS = ("G", "M", "-")

_table = {entry.letter: entry for entry in SHIPPED}


class LetterError(MegacppError):
    """A block letter that cannot be registered; the message says why."""


def known() -> tuple[BlockLetter, ...]:
    """Every registered letter, the shipped ones first."""
    return tuple(_table.values())


def find(letter: str) -> BlockLetter | None:
    """The entry of an upper-case letter; None when it is neither registered nor installed.

    A letter that an installed package names among its entry points (group `megacpp_mcore.letters`,
    `X = "package.module:entry"`) is registered when it is first asked for. Raises LetterError when
    such an entry cannot be loaded or registered.
    """
    if letter in _table or not _may_be_a_letter(letter):
        return _table.get(letter)
    installed = [point for point in _installed() if point.name == letter]
    if not installed:
        return None
    if len(installed) > 1:
        raise LetterError(
            f"block letter {letter!r} is named by {len(installed)} installed packages: "
            f"{', '.join(point.value for point in installed)}; remove all but one"
        )
    [point] = installed
    try:
        entry = point.load()
    except (ImportError, AttributeError) as error:
        raise LetterError(
            f"block letter {letter!r}, entry point {point.value!r}, cannot be loaded: {error}"
        ) from error
    if not isinstance(entry, BlockLetter) or entry.letter != letter:
        raise LetterError(
            f"block letter {letter!r}, entry point {point.value!r}: it must be the BlockLetter of "
            f"that letter, not {entry!r}"
        )
    return register(entry)


def get(letter: str) -> BlockLetter:
    """As `find`. Raises LetterError, listing the known letters, when there is no entry."""
    entry = find(letter)
    if entry is None:
        names = ", ".join(entry.letter for entry in known())
        raise LetterError(f"unknown block letter {letter!r}: the known letters are {names}")
    return entry


def without_megatrons_block() -> list[str]:
    """The letters for which Megatron's own spec has no block, not even another one."""
    return [entry.letter for entry in known() if not entry.is_native]


def register(entry: BlockLetter) -> BlockLetter:
    """Add a letter of your own to the table of this process, and return it.

    Registering an equal entry again changes nothing. Raises LetterError for a letter that is no
    single A to Z or is another's, for more than one slot, for a slot that is not open to own
    letters, and without the spec that has the block.
    """
    if _table.get(entry.letter) == entry:
        return entry
    if why := _refusal(entry):
        raise LetterError(f"block letter {entry.letter!r} ({entry.title}) {why}")
    _table[entry.letter] = entry
    return entry


def collision(letters: Iterable[str]) -> tuple[BlockLetter, BlockLetter, str] | None:
    """Two of `letters` and the symbol whose slot both need; None when each has its own slot."""
    owner: dict[str, BlockLetter] = {}
    for entry in _in_table_order(letters):
        for symbol in entry.symbols:
            if symbol in owner:
                return owner[symbol], entry, symbol
            owner[symbol] = entry
    return None


def exported_kind(letter: str, symbol: str) -> str | None:
    """What an exported model calls a layer; None where generation and export refuse it."""
    return get(letter).slot(symbol).exported


def own_specs(letters: Iterable[str]) -> dict[Spec, BlockLetter]:
    """The specs that letters among `letters` bring; one model can have one of them."""
    return {entry.spec: entry for entry in _in_table_order(letters) if entry.spec}


def spec_of(letters: Iterable[str], target: str) -> Spec | None:
    """The spec that `letters` need; None when Megatron's own serves all of them."""
    letters = set(letters)
    if target == "native" or not any(get(letter).why_not_native for letter in letters):
        return None
    return next(iter(own_specs(letters)), NAM56R_SPEC)


def module_of(letter: str, symbol: str, spec: Spec | None) -> str:
    """Dotted path of the class in the layer's mixer slot, under `spec` or Megatron's own."""
    slot = get(letter).slot(symbol)
    path = slot.module if spec else slot.native
    assert path is not None, f"{letter} has no native module"
    return path


def _in_table_order(letters: Iterable[str]) -> list[BlockLetter]:
    used = {letter: get(letter) for letter in letters}
    return [entry for entry in known() if entry.letter in used]


def _may_be_a_letter(letter: str) -> bool:
    return len(letter) == 1 and letter.isascii() and letter.isalpha() and letter.isupper()


def _refusal(entry: BlockLetter) -> str | None:
    if not _may_be_a_letter(entry.letter):
        return "must be one letter, A to Z"
    if entry.letter in _table:
        return f"is taken: it stands for {_table[entry.letter].title}; choose another letter"
    if len(entry.slots) != 1 or entry.slots[0].symbol not in OPEN_SLOTS:
        return (
            f"must have one slot, {', '.join(OPEN_SLOTS)}; it has "
            f"{', '.join(entry.symbols) or 'none'}"
        )
    if entry.spec is None:
        return (
            "needs spec=Spec(module, name): the stack spec with the block in it, as Megatron's "
            "--spec names it"
        )
    return None


@cache
def _installed() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))
