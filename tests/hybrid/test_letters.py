"""The table of block letters, and a letter of one's own on its way through plan, FLOPs and rules.

A model with such a letter is built and trained by examples/own_block.py (tests/test_examples.py).
"""

import dataclasses
import json
import subprocess
import sys

import pytest

from megacpp_mcore.bench import BenchError
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.hybrid.letters import BlockLetter, Cost, LetterError, Slot, Spec
from megacpp_mcore.hybrid.letters.letter import STACK_FIELDS
from megacpp_mcore.hybrid.pattern import PatternError, translate
from megacpp_mcore.inference.recipe import InferenceError, check_letters
from megacpp_mcore.layers.hybrid_stack import StackSpecError, stack_spec
from megacpp_mcore.recipe import RecipeError, load_recipe
from megacpp_mcore.recipe.lowering import lower

SPEC = Spec("own.specs", "own_stack_spec")


def entry(letter: str = "X", symbol: str = "G", **changes) -> BlockLetter:
    slot = Slot(
        symbol, "own.block.Own", f"{__name__}.own_layer",
        cost=lambda recipe, layer, keys: Cost(weights=7, others=2, mixing=3.0),
    )  # fmt: skip
    return BlockLetter(letter, "own block", (slot,), **{"spec": SPEC} | changes)


def own_layer(parts):
    return "own layer", parts.linears.column


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """A table of this test's own, which registering changes."""
    monkeypatch.setattr(letters, "_table", dict(letters._table))


@pytest.fixture
def x():
    return letters.register(entry())


def tiny(*overrides: str):
    return load_recipe("nam56r-tiny", [*overrides, "mtp.pattern=AE"])


# The table


def test_the_shipped_letters_without_a_spec_of_their_own_share_one():
    together = [entry.letter for entry in letters.SHIPPED if entry.spec is None]
    assert together == ["A", "E", "M", "R"]
    assert letters.collision(together) is None


def test_every_layer_of_the_table_can_be_made():
    for shipped in letters.SHIPPED:
        made = stack_spec({"linear": "reference"}, letters=shipped.letter if shipped.spec else "")
        for symbol in shipped.symbols:
            assert getattr(made.submodules, STACK_FIELDS[symbol]).submodules is not None


# Plan


def test_the_table_and_what_reads_it_import_no_torch():
    script = (
        "import sys, megacpp_mcore.hybrid.letters as t; t.known(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_plan_shows_the_letter_its_slot_and_its_module(x):
    plan = translate("aemx", mtp_depths=1, mtp_pattern="XE")
    assert plan.megatron_pattern == "+EMG/GE"
    assert [layer.module for layer in plan.layers if layer.letter == "X"] == ["own.block.Own"] * 2
    assert plan.requires.spec == SPEC
    assert plan.counts["source"] == {"A": 1, "E": 1, "M": 1, "R": 0, "D": 0, "X": 1}
    assert plan.counts["megatron"]["G"] == 1
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


def test_a_registered_letter_changes_no_other_plan():
    before = translate("AEMR").to_dict()
    letters.register(entry())
    assert translate("AEMR").to_dict() == before


def test_a_letter_is_known_only_when_registered():
    with pytest.raises(PatternError, match=r"unknown letter 'X' .* the source letters are A \("):
        translate("AEMX")
    letters.register(entry())
    with pytest.raises(PatternError, match=r"'Y' .* D \(DeltaNet\), X \(own block\)"):
        translate("AEMY")


def test_a_symbol_that_no_shipped_letter_has_is_counted_where_it_is_used():
    letters.register(entry(symbol="-"))
    plan = translate("ARX")
    assert plan.megatron_pattern == "+G-"
    assert plan.counts["megatron"] == {"+": 1, "*": 0, "D": 0, "E": 0, "M": 0, "G": 1, "-": 1}
    assert "-" not in translate("AR").counts["megatron"]


@pytest.mark.parametrize(
    ("symbol", "pattern", "message"),
    [
        (
            "G",
            "AXR",
            "R at position 3 of the pattern and X at position 2 of the pattern: both",
        ),
        ("G", "ADX", "both need Megatron's G slot, and one model has one"),
        ("M", "MX", "both need Megatron's M slot"),
        ("-", "DX", "D at position 1 of the pattern needs --spec megacpp_mcore.specs.nam56r"),
    ],
)
def test_two_letters_that_need_one_slot_or_two_specs_are_refused(symbol, pattern, message):
    letters.register(entry(symbol=symbol))
    with pytest.raises(PatternError) as refusal:
        translate(pattern)
    assert message in str(refusal.value)


def test_letters_of_ones_own_with_one_spec_stand_in_one_pattern(x):
    letters.register(entry("Y", "-"))
    assert translate("AXYM").requires.spec == SPEC


def test_megatron_alone_cannot_run_it(x):
    with pytest.raises(PatternError, match=r"X at position 2 .* Megatron has no own block"):
        translate("AX", target="native")
    assert letters.without_megatrons_block() == ["R", "X"]


# Registering


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry("R"), "'R' (own block) is taken: it stands for recurrent M2RNN"),
        (entry("x"), "must be one letter, A to Z"),
        (entry("XY"), "must be one letter"),
        (entry("\N{CYRILLIC CAPITAL LETTER HA}"), "must be one letter"),
        (entry(symbol="E"), "must have one slot, G, M, -; it has E"),
        (entry(symbol="?"), "it has ?"),
        (dataclasses.replace(entry(), slots=()), "it has none"),
        (entry(spec=None), "needs spec=Spec(module, name)"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(LetterError) as refusal:
        letters.register(wrong)
    assert message in str(refusal.value)
    assert letters.known() == letters.SHIPPED


def test_an_equal_entry_may_be_registered_again_and_another_not(x):
    assert letters.register(dataclasses.replace(x)) == x
    with pytest.raises(LetterError, match="taken"):
        letters.register(entry(packages=(("own", "own"),)))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(X="module:entry"): a package with these entry points, whose module is here."""

    def install(**points: str) -> None:
        folder = tmp_path / "own_letters-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-letters\nVersion: 1\n")
        listed = "\n".join(f"{letter} = {value}" for letter, value in points.items())
        (folder / "entry_points.txt").write_text(f"[{letters.ENTRY_POINTS}]\n{listed}\n")
        monkeypatch.syspath_prepend(tmp_path)
        letters._installed.cache_clear()

    yield install
    letters._installed.cache_clear()


INSTALLED = entry("Y")


def test_an_installed_package_names_its_letters(installed):
    installed(Y=f"{__name__}:INSTALLED")
    assert translate("AMY").requires.spec == SPEC
    assert letters.find("Y") is INSTALLED


@pytest.mark.parametrize("value", ["no_such_module:Y", f"{__name__}:NOWHERE", f"{__name__}:SPEC"])
def test_an_entry_point_that_is_no_entry_is_refused(installed, value):
    installed(Y=value)
    with pytest.raises(LetterError, match="block letter 'Y', entry point"):
        translate("AMY")


# FLOPs, recipe, stack


def test_flops_and_parameters_are_the_entrys_own(x):
    plain, own = (tiny("model.depth=3", f"model.pattern=AE{e}") for e in ("E", "X"))
    [part] = [part for part in count(own).parts if part.name == "X"]
    assert (part.forward, part.backward, part.parameters) == (17, 34, 9)
    [two, *_] = [part for part in count(plain).parts if part.name == "E"]
    [one, *_] = [part for part in count(own).parts if part.name == "E"]
    assert count(plain).forward - two.forward == count(own).forward - 17 and two.layers == 2
    assert one.forward == two.forward


def test_a_recipe_with_it_is_lowered_to_its_spec(x):
    words = lower(tiny("model.depth=4", "model.pattern=AEMX")).argv
    assert words[: words.index("--spec") + 3] == [
        "--hybrid-layer-pattern", "+EMG/+E", "--spec", "own.specs", "own_stack_spec",
    ]  # fmt: skip


def test_a_bench_of_one_layer_takes_every_letter_whose_packages_are_here(x):
    assert "model.pattern=X" in layer_overrides("X")
    letters.register(entry("Y", packages=(("no_such_module", "no-such-package"),)))
    with pytest.raises(BenchError, match="layer Y needs no-such-package, which is not installed"):
        layer_overrides("Y")
    with pytest.raises(BenchError, match=r"'Z' is unknown; choose A, \+, \*, E, M, R, D, X, Y"):
        layer_overrides("Z")


def test_a_letter_that_no_export_knows_is_refused_outside_training(x):
    recipe = tiny("model.depth=4", "model.pattern=AEMX")
    with pytest.raises(InferenceError, match="the pattern has X: only A, E, M, R"):
        check_letters(recipe)
    check_letters(tiny("model.depth=4", "model.pattern=AEMR"))


def test_a_recipe_with_an_unregistered_letter_is_refused():
    with pytest.raises(RecipeError, match="unknown letter 'X'"):
        tiny("model.depth=4", "model.pattern=AEMX")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.context_parallel_size=2", "X: its entry does not say that it can take a part"),
        ("data.dataloader_inter_document_masking=true", "X: its entry does not say that it keeps"),
    ],
)
def test_what_an_entry_does_not_promise_is_refused(monkeypatch, override, message):
    def refusals(x: BlockLetter) -> str:
        monkeypatch.setitem(letters._table, "X", x)
        with pytest.raises(RecipeError) as refusal:
            tiny("model.depth=3", "model.pattern=AEX", override)
        return str(refusal.value)

    def never(r):
        r.refuse(True, "model.depth", "is refused by every rule of this entry")

    assert message in refusals(entry(rules=never))
    assert message not in refusals(entry(rules=never, split_sequence="", packed_documents=""))


def test_rules_of_the_entry_are_asked():
    def rules(r):
        r.multiple("model.hidden_size", "seven", 7)

    letters.register(entry(rules=rules))
    with pytest.raises(RecipeError, match=r"hidden_size = .* must be a multiple of seven"):
        tiny("model.depth=3", "model.pattern=AEX")


def test_the_stack_has_it_in_its_slot_and_the_shipped_ones_in_theirs(x):
    ours = stack_spec({"linear": "reference"})
    own = stack_spec({"linear": "reference"}, letters="X")
    word, column = own.submodules.gdn_layer
    assert word == "own layer" and column.__name__ == "ColumnParallelLinear"
    for field in ("mamba_layer", "attention_layer", "mla_layer", "dsa_layer"):
        assert getattr(own.submodules, field) == getattr(ours.submodules, field)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("DX", StackSpecError, "D and X both need Megatron's G slot"),
        ("Y", LetterError, "unknown block letter 'Y': the known letters are A, E, M, R, D, X"),
        ("Z", StackSpecError, "of_no_kind, the function for own.block.Own, does not exist"),
    ],
)
def test_a_stack_that_cannot_be_made_is_refused(x, asked, error, message):
    [slot] = x.slots
    slot = dataclasses.replace(slot, symbol="-", layer=f"{__name__}.of_no_kind")
    letters.register(dataclasses.replace(entry("Z"), slots=(slot,)))
    with pytest.raises(error) as refusal:
        stack_spec({"linear": "reference"}, letters=asked)
    assert message in str(refusal.value)
