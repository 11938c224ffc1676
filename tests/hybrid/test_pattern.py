"""Source patterns against Megatron's own parser, and every refusal."""

import importlib
import json
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from megatron.core.models.hybrid import hybrid_layer_allocation as megatron_allocation
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.pattern import MAX_LAYERS, PatternError, translate

NAM56R = "AEMEAEMEAEMR"


def symbols(plan):
    return "".join(layer.symbol for layer in plan.main_layers)


def megatron_segment(main_pattern, pp, vpp, stage, virtual_stage):
    """Megatron's own choice of layers and layer offset for one pipeline rank and virtual rank."""
    with (
        mock.patch("torch.distributed.get_rank", return_value=stage),
        mock.patch("torch.distributed.get_world_size", return_value=pp),
        mock.patch.object(megatron_allocation, "log_on_each_pipeline_stage"),
    ):
        return megatron_allocation.select_pipeline_segment(
            main_pattern, object(), virtual_stage if vpp > 1 else None
        )


def assert_megatron_agrees(plan):
    """Megatron reads the plan's pattern as the plan says, on every pipeline rank."""
    pattern = plan.megatron_pattern
    parsed = megatron_allocation.parse_hybrid_pattern(pattern)
    assert parsed.mtp_num_depths == (plan.mtp.depths if plan.mtp else 0)
    assert parsed.mtp_pattern == (plan.mtp.megatron_pattern if plan.mtp else None)
    assert megatron_allocation.get_hybrid_total_layer_count(pattern) == plan.depth

    total = {
        symbol: count + plan.mtp_counts["megatron"][symbol]
        for symbol, count in plan.counts["megatron"].items()
    }
    assert megatron_allocation.get_hybrid_layer_counts(pattern) == {"-": 0} | total

    # what Megatron derives from the number of pieces (training/arguments.py, "Derive VPP")
    pieces = megatron_allocation.get_hybrid_total_pipeline_segment_count(pattern)
    assert pieces == plan.pp * plan.vpp == len(plan.segments)
    seen = []
    for virtual_stage in range(plan.vpp):
        for stage in range(plan.pp):
            chosen, offset = megatron_segment(
                parsed.main_pattern, plan.pp, plan.vpp, stage, virtual_stage
            )
            mine = [
                layer
                for layer in plan.main_layers
                if (layer.stage, layer.virtual_stage) == (stage, virtual_stage)
            ]
            assert chosen, "a pipeline piece without layers"
            assert [layer.symbol for layer in mine] == chosen
            assert [layer.number for layer in mine] == [
                offset + i for i in range(1, len(chosen) + 1)
            ]
            seen += mine
    assert sorted(layer.number for layer in seen) == list(range(1, plan.depth + 1))


def assert_one_attention_family(plan):
    assert not ("*" in plan.megatron_pattern and set("+D") & set(plan.megatron_pattern))


# What a pattern becomes


def test_nam56r_at_52_layers():
    plan = translate(NAM56R, depth=52)
    assert plan.source_pattern == (NAM56R * 5)[:52]
    assert plan.megatron_pattern == ("+EME+EME+EMG" * 5)[:52]
    assert plan.counts["source"] == {"A": 13, "E": 22, "M": 13, "R": 4, "D": 0}
    assert plan.counts["megatron"] == {"+": 13, "*": 0, "D": 0, "E": 22, "M": 13, "G": 4}
    assert [layer.number for layer in plan.layers if layer.letter == "R"] == [12, 24, 36, 48]
    assert [layer.a_rank for layer in plan.layers if layer.letter == "A"] == list(range(1, 14))
    assert all(layer.a_rank is None for layer in plan.layers if layer.letter != "A")
    assert plan.requires.spec == ("megacpp_mcore.specs.nam56r", "nam56r_stack_spec")
    assert plan.requires.patches == ()
    assert plan.mtp is None and plan.notes == ()
    assert_megatron_agrees(plan)


def test_lower_case_is_the_same_plan():
    assert translate(NAM56R.lower(), depth=52) == translate(NAM56R, depth=52)


def test_without_depth_the_pattern_is_taken_once():
    assert translate("AEMR").depth == 4


@pytest.mark.parametrize(
    ("attention", "expected"), [("mla", "+EM+"), ("gqa", "*EM*"), ("dsa", "DEMD")]
)
def test_attention_chooses_the_symbol_of_a(attention, expected):
    plan = translate("AEMA", attention=attention, mtp_depths=1, mtp_pattern="A")
    assert plan.megatron_pattern == f"{expected}/{expected[0]}"


def test_dsa_ranks_count_a_layers_not_layers():
    plan = translate("EAMA", depth=8, dsa_ranks=(4, 2), mtp_depths=1, mtp_pattern="AE")
    assert plan.megatron_pattern == "E+MDE+MD/+E"
    assert plan.dsa_ranks == (2, 4)
    assert [layer.a_rank for layer in plan.main_layers if layer.symbol == "D"] == [2, 4]
    assert_megatron_agrees(plan)


def test_dsa_ranks_reach_over_pipeline_cuts():
    assert translate("AE|AE|AE", dsa_ranks=(2,)).megatron_pattern == "+E|DE|+E"


def test_mtp_layers_start_at_one_again_on_the_last_stage():
    plan = translate("AEME", pp=2, mtp_depths=2, mtp_pattern="ae")
    assert plan.megatron_pattern == "+E|ME/+E/+E"
    assert plan.mtp.source_pattern == "AE"
    assert [(layer.mtp_depth, layer.number, layer.stage) for layer in plan.mtp_layers] == [
        (1, 1, 1),
        (1, 2, 1),
        (2, 1, 1),
        (2, 2, 1),
    ]
    assert plan.depth == 4
    assert plan.counts["source"]["E"] == 2
    assert plan.mtp_counts["source"] == {"A": 2, "E": 2, "M": 0, "R": 0, "D": 0}
    assert_megatron_agrees(plan)


def test_deltanet_is_the_native_g():
    plan = translate("ADE")
    assert plan.megatron_pattern == "+GE"
    assert plan.requires.spec is None
    with_mamba3 = translate("ADM")
    assert with_mamba3.requires.spec == ("megacpp_mcore.specs.nam56r", "nam56r_deltanet_stack_spec")


@pytest.mark.parametrize(
    ("source", "mtp", "needs"),
    [("AE", "", False), ("AM", "", True), ("AR", "", True), ("AE", "M", True), ("AE", "AE", False)],
)
def test_m_and_r_need_our_spec_wherever_they_stand(source, mtp, needs):
    plan = translate(source, mtp_depths=int(bool(mtp)), mtp_pattern=mtp)
    assert (plan.requires.spec is not None) == needs


def test_native_target_takes_mamba2_when_told():
    plan = translate("AEME", target="native", mamba2=True, attention="gqa")
    assert plan.megatron_pattern == "*EME"
    assert plan.requires.spec is None
    assert plan.layers[2].module == "megatron.core.ssm.mamba_mixer.MambaMixer"


# Pipelines


def test_even_split_places_the_cuts():
    plan = translate("AEME", depth=16, pp=2, vpp=2)
    assert plan.source_pattern == "AEME|AEME|AEME|AEME"
    assert [(s.index, s.stage, s.virtual_stage) for s in plan.segments] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert [(s.first_layer, s.last_layer) for s in plan.segments] == [
        (1, 4),
        (5, 8),
        (9, 12),
        (13, 16),
    ]
    assert_megatron_agrees(plan)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (4, 1)),
        ({"pp": 4}, (4, 1)),
        ({"pp": 2}, (2, 2)),
        ({"vpp": 2}, (2, 2)),
        ({"vpp": 1}, (4, 1)),
        ({"pp": 2, "vpp": 2}, (2, 2)),
    ],
)
def test_given_cuts_are_kept_and_sizes_follow(sizes, expected):
    plan = translate("A|EM|EEE|R", **sizes)
    assert plan.megatron_pattern == "+|EM|EEE|G"
    assert (plan.pp, plan.vpp) == expected
    assert_megatron_agrees(plan)


def test_a_plan_translates_to_itself():
    plan = translate(NAM56R, depth=48, pp=2, vpp=2, dsa_ranks=(3,), mtp_depths=1, mtp_pattern="AE")
    again = translate(
        plan.source_pattern, depth=48, pp=2, dsa_ranks=(3,), mtp_depths=1, mtp_pattern="AE"
    )
    assert again == plan


# Notes


def test_note_when_the_depth_drops_letters():
    assert translate(NAM56R, depth=11).notes == (
        "depth 11 uses only the first 11 of the pattern's 12 letters",
    )


@pytest.mark.parametrize(
    ("source", "mtp", "noted"),
    [("AM|EE", "", True), ("AE|EE", "", False), ("AM|AM", "", False), ("AE|AM", "AE", False)],
)
def test_note_when_a_stage_has_no_experts(source, mtp, noted):
    notes = translate(source, mtp_depths=int(bool(mtp)), mtp_pattern=mtp).notes
    assert bool(notes) == noted
    assert not noted or notes[0].startswith("pipeline stage 0 has no E")


# Modules


def slot_modules(spec):
    """Megatron symbol -> class in the mixer slot of a stack spec."""
    parts = spec.submodules
    mixers = {
        "M": parts.mamba_layer.submodules.mixer,
        "G": parts.gdn_layer.submodules.self_attention,
        "*": parts.attention_layer.submodules.self_attention,
        "D": parts.dsa_layer.submodules.self_attention,
        "+": parts.mla_layer.submodules.self_attention,
    }
    modules = {symbol: mixer.module for symbol, mixer in mixers.items()}
    return modules | {"E": parts.moe_layer.submodules.mlp.func}


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("attention", ["mla", "gqa", "dsa"])
def test_native_modules_are_those_of_megatrons_spec(attention):
    modules = slot_modules(hybrid_stack_spec)
    for layer in translate("AEMD", target="native", mamba2=True, attention=attention).layers:
        assert named(layer.module) is modules[layer.symbol]


@pytest.mark.parametrize("source", ["AEMR", "AEMD"])
@pytest.mark.parametrize("attention", ["mla", "gqa", "dsa"])
def test_our_modules_are_those_of_our_spec(source, attention):
    plan = translate(source, attention=attention)
    modules = slot_modules(named(".".join(plan.requires.spec)))
    for layer in plan.layers:
        assert named(layer.module) is modules[layer.symbol]


# JSON


def test_to_dict_is_json_with_stable_keys():
    plan = translate(NAM56R, pp=2, dsa_ranks=(1,), mtp_depths=1, mtp_pattern="AE")
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert list(data) == [
        "source_pattern",
        "megatron_pattern",
        "depth",
        "attention",
        "dsa_ranks",
        "target",
        "mamba2",
        "counts",
        "layers",
        "pipeline",
        "mtp",
        "requires",
        "notes",
    ]
    assert data["layers"][4] == {
        "number": 5,
        "letter": "A",
        "symbol": "+",
        "a_rank": 2,
        "module": "megacpp_mcore.layers.mla.MLASelfAttention",
        "stage": 0,
        "virtual_stage": 0,
        "mtp_depth": None,
    }
    assert data["pipeline"]["segments"][1] == {
        "index": 1,
        "stage": 1,
        "virtual_stage": 0,
        "first_layer": 7,
        "last_layer": 12,
        "source_pattern": "MEAEMR",
        "megatron_pattern": "ME+EMG",
    }
    assert data["mtp"] == {
        "depths": 1,
        "source_pattern": "AE",
        "megatron_pattern": "+E",
        "counts": plan.mtp_counts,
    }
    assert data["requires"] == {
        "spec": {"module": "megacpp_mcore.specs.nam56r", "name": "nam56r_stack_spec"},
        "patches": [],
    }
    assert translate("AE").to_dict()["mtp"] is None


# Refusals

REFUSALS = [
    # the pattern
    ("", {}, "the pattern is empty"),
    ("AEX", {}, "unknown letter 'X' at position 3 of the pattern: the source letters are A "),
    ("AE ME", {}, "unknown letter ' ' at position 3"),
    ("AE\n", {}, "unknown letter U+000A at position 3"),
    ("\N{CYRILLIC CAPITAL LETTER IE}", {}, "unknown letter U+0415 at position 1"),
    ("A\N{FULLWIDTH LATIN CAPITAL LETTER E}", {}, "unknown letter U+FF25 at position 2"),
    ("A\udce9", {}, "unknown letter U+DCE9 at position 2"),
    ("A|EX", {}, "unknown letter 'X' at position 4"),
    ("+E", {}, "write A, and choose mla"),
    ("*E", {}, "write A, and choose gqa"),
    ("AgE", {}, "write D for DeltaNet, or R for M2RNN"),
    ("A-", {}, "no source letter stands for Megatron's dense MLP"),
    ("AE/AE", {}, "with --mtp-depths and --mtp-pattern"),
    # depth
    ("AE", {"depth": 0}, "depth 0: a plan has 1 to"),
    ("AE", {"depth": -3}, "depth -3: a plan has 1 to"),
    ("AE", {"depth": MAX_LAYERS + 1}, f"depth {MAX_LAYERS + 1}: a plan has 1 to {MAX_LAYERS}"),
    ("AE|ME", {"depth": 8}, "depth 8: the 2 pieces of the pattern hold 4 layers"),
    ("AE|ME", {"depth": 3}, "depth 3: the 2 pieces of the pattern hold 4 layers"),
    # pipeline pieces
    ("|AE", {}, "pipeline piece 1 of 2 is empty, at the '|' in position 1"),
    ("AE|", {}, "pipeline piece 2 of 2 is empty, at the '|' in position 3"),
    ("AE||ME", {}, "pipeline piece 2 of 3 is empty, at the '|' in position 4"),
    ("|", {}, "pipeline piece 1 of 2 is empty"),
    ("A|E|M", {"pp": 2}, "3 pipeline pieces are not divisible by pp 2"),
    ("A|E|M", {"vpp": 2}, "3 pipeline pieces are not divisible by vpp 2"),
    ("A|E|M|E", {"pp": 2, "vpp": 1}, "4 pipeline pieces over pp 2 make vpp 2, not 1"),
    ("A|E", {"pp": 2, "vpp": 2}, "pp 2 x vpp 2 needs 4"),
    ("A|E", {"pp": 4}, "2 pipeline pieces are not divisible by pp 4"),
    ("A|E", {"pp": 1}, "2 pipeline pieces with pp 1"),
    ("A|E", {"vpp": 2}, "2 pipeline pieces with pp 1"),
    ("A|E", {"pp": 0}, "pp 0: a pipeline size is 1 or more"),
    ("AE", {"vpp": -1}, "vpp -1: a pipeline size is 1 or more"),
    ("AE", {"vpp": 2}, "vpp 2 with pp 1"),
    (NAM56R, {"depth": 52, "pp": 8}, "52 layers do not split evenly into pp 8 x vpp 1 = 8 pieces"),
    ("AEM", {"pp": 3, "vpp": 2}, "3 layers do not split evenly into pp 3 x vpp 2 = 6 pieces"),
    # attention
    ("AE", {"attention": "MLA"}, "unknown attention 'MLA': choose mla, gqa, dsa"),
    ("AE", {"attention": ""}, "unknown attention ''"),
    ("AE", {"attention": "gqa", "dsa_ranks": (1,)}, "cannot combine '*' with '+' or 'D'"),
    ("AE", {"attention": "dsa", "dsa_ranks": (1,)}, "makes every A a DSA layer"),
    (NAM56R, {"depth": 52, "dsa_ranks": (14,)}, "DSA rank 14 names no A layer"),
    (NAM56R, {"depth": 52, "dsa_ranks": (14,)}, "its ranks are 1 to 13"),
    ("AE", {"dsa_ranks": (0,)}, "DSA rank 0 names no A layer"),
    ("AA", {"dsa_ranks": (-1,)}, "DSA rank -1 names no A layer"),
    ("EM", {"dsa_ranks": (1,)}, "it has none"),
    ("EM", {"dsa_ranks": (1,), "mtp_depths": 1, "mtp_pattern": "A"}, "it has none"),
    ("AA", {"dsa_ranks": (1, 2, 1)}, "DSA rank 1 is given twice"),
    # MTP
    ("AE", {"mtp_depths": 1}, "1 MTP depths without an MTP pattern"),
    ("AE", {"mtp_pattern": "AE"}, "an MTP pattern without MTP depths"),
    ("AE", {"mtp_depths": -1, "mtp_pattern": "AE"}, "-1 MTP depths"),
    ("AE", {"mtp_depths": 1, "mtp_pattern": "A|E"}, "'|' at position 2 of the MTP pattern"),
    ("AE", {"mtp_depths": 1, "mtp_pattern": "A|"}, "'|' at position 2 of the MTP pattern"),
    ("AE", {"mtp_depths": 1, "mtp_pattern": "A+"}, "letter '+' at position 2 of the MTP pattern"),
    ("AE", {"mtp_depths": MAX_LAYERS, "mtp_pattern": "AE"}, f"at most {MAX_LAYERS} layers in all"),
    # target
    ("ARD", {}, "R at position 2 of the pattern and D at position 3 of the pattern: both need"),
    ("a|ed|r", {}, "R at position 6 of the pattern and D at position 4 of the pattern"),
    ("AR", {"mtp_depths": 1, "mtp_pattern": "ED"}, "D at position 2 of the MTP pattern"),
    ("AD", {"mtp_depths": 1, "mtp_pattern": "R"}, "R at position 1 of the MTP pattern"),
    ("AE", {"target": "te"}, "unknown target 'te': the targets are nam56r, native"),
    ("AM", {"mamba2": True}, "mamba2 with target nam56r"),
    ("AER", {"target": "native"}, "R at position 3 of the pattern: Megatron has no M2RNN"),
    ("AEM", {"target": "native"}, "M at position 3 of the pattern: Megatron has no Mamba-3"),
    ("AER", {"target": "native", "mamba2": True}, "R at position 3"),
    (
        "AE",
        {"target": "native", "mtp_depths": 1, "mtp_pattern": "M"},
        "M at position 1 of the MTP pattern",
    ),
]


@pytest.mark.parametrize(("source", "options", "message"), REFUSALS)
def test_refusal(source, options, message):
    with pytest.raises(PatternError) as refusal:
        translate(source, **options)
    assert message in str(refusal.value)
    assert isinstance(refusal.value, MegacppError)


def test_letters_that_the_depth_leaves_out_do_not_count():
    plan = translate(NAM56R, depth=11, target="native", mamba2=True)
    assert plan.counts["source"]["R"] == 0
    assert translate("AER", depth=2, target="native").megatron_pattern == "+E"


# Properties

LETTER_TEXT = st.text("AEMRDaemrd", max_size=12)
CUT_TEXT = st.lists(st.text("AEMDaem", min_size=1, max_size=4), max_size=6).map("|".join)
ANY_TEXT = st.text(st.one_of(st.sampled_from("AEMRDaemrd||+*GD-/ \t"), st.characters()), max_size=8)
SOURCE = st.one_of(LETTER_TEXT, CUT_TEXT, ANY_TEXT)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "depth": st.one_of(st.none(), st.integers(1, 60), st.integers()),
        "attention": st.sampled_from(["mla"] * 5 + ["gqa", "dsa", "+", ""]),
        "dsa_ranks": st.one_of(st.just([]), st.lists(st.integers(-1, 6), max_size=3)),
        "pp": st.one_of(st.none(), st.integers(1, 4), st.integers()),
        "vpp": st.one_of(st.none(), st.integers(1, 3), st.integers()),
        "target": st.sampled_from(["nam56r"] * 4 + ["native", "other"]),
        "mamba2": st.sampled_from([False, False, False, True]),
    },
)
MTP = st.one_of(
    st.just({}),
    st.builds(
        lambda depths, pattern: {"mtp_depths": depths, "mtp_pattern": pattern},
        st.one_of(st.integers(1, 3), st.integers()),
        st.one_of(st.text("AEMaem", min_size=1, max_size=4), SOURCE),
    ),
)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(source=SOURCE, options=OPTIONS, mtp=MTP)
def test_any_text_is_translated_as_megatron_reads_it_or_refused(source, options, mtp):
    try:
        plan = translate(source, **options, **mtp)
    except PatternError as refusal:
        event("refused")
        assert str(refusal)
        return
    event("translated")
    assert_megatron_agrees(plan)
    assert_one_attention_family(plan)
    assert plan.depth == (options.get("depth") or len(source.replace("|", "")))
    again = translate(
        plan.source_pattern, **options | mtp | {"depth": None, "pp": plan.pp, "vpp": plan.vpp}
    )
    assert (again.megatron_pattern, again.layers) == (plan.megatron_pattern, plan.layers)


@st.composite
def good_requests(draw):
    """Requests with a plan, by construction; with the main layers and MTP layers they must give."""
    recurrent = draw(st.sampled_from("RD"))
    letters = draw(st.text("AEM" + recurrent, min_size=1, max_size=16))
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    depth = pp * vpp * draw(st.integers(1, 12))
    tiled = (letters * depth)[:depth]
    attention = draw(st.sampled_from(["mla", "gqa", "dsa"]))
    ranks = []
    if attention == "mla" and "A" in tiled:
        ranks = draw(st.lists(st.integers(1, tiled.count("A")), unique=True, max_size=4))
    mtp = draw(st.text("AEM" + recurrent, max_size=4))
    options = {
        "depth": depth,
        "pp": pp,
        "vpp": vpp,
        "attention": attention,
        "dsa_ranks": ranks,
        "mtp_depths": draw(st.integers(1, 3)) if mtp else 0,
        "mtp_pattern": mtp,
    }
    return letters, options, tiled, mtp * options["mtp_depths"]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(good_requests())
def test_a_sound_request_is_never_refused(request):
    letters, options, tiled, mtp = request
    plan = translate(letters, **options)
    assert_megatron_agrees(plan)
    assert_one_attention_family(plan)
    assert "".join(layer.letter for layer in plan.main_layers) == tiled
    assert "".join(layer.letter for layer in plan.mtp_layers) == mtp
    base = {"mla": "+", "gqa": "*", "dsa": "D"}[options["attention"]]
    for layer in plan.layers:
        expected = {"A": base, "E": "E", "M": "M", "R": "G", "D": "G"}[layer.letter]
        assert layer.symbol == ("D" if layer.a_rank in options["dsa_ranks"] else expected)
