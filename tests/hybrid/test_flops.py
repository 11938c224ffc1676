"""Our FLOP and parameter counts against models that are built and counted."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacpp_mcore.bench.layer import weight_flops
from megacpp_mcore.hybrid.flops import PEAKS, count
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.core_attention.case import CoreAttentionCase
from megacpp_mcore.kernels.m2rnn.case import M2RNNCase
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.layers.mixer import RecurrentMixer
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process

ROWS = 2
SIZES = [
    "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=4",
    "model.seq_length=32", "model.vocab_size=264", "attention.q_lora_rank=12",
    "attention.kv_lora_rank=8", "attention.qk_head_dim=8", "attention.qk_pos_emb_head_dim=4",
    "attention.v_head_dim=6", "moe.moe_ffn_hidden_size=24",
    "moe.moe_shared_expert_intermediate_size=40", "mamba3.mamba_num_heads=6",
    "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=16", "mamba3.mamba_num_groups=2",
    "mamba3.chunk_size=8", "m2rnn.k_head_dim=8", "m2rnn.v_head_dim=4",
    "mtp.mtp_num_layers=0", "mtp.pattern=", "data.null_tokenizer_eod_id=256",
]  # fmt: skip


def recipe_of(pattern: str, *overrides: str) -> Recipe:
    return load_recipe(
        "nam56r-tiny",
        [*SIZES, f"model.pattern={pattern}", f"model.depth={len(pattern)}", *overrides],
    )


@pytest.fixture
def built(monkeypatch):
    """build(recipe) -> (model, batch), in one process whose groups live as long as the test."""
    for name in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # The definitions: what they multiply is there to be counted.
    monkeypatch.setenv("MEGACPP_BACKENDS", "core_attention=reference")
    contexts = []

    def build(recipe: Recipe):
        args = megatron_args(lower(recipe).argv)
        contexts.append(single_process(recipe.schedule.seed))
        contexts[-1].__enter__()
        tokens = torch.randint(0, 256, (ROWS, recipe.model.seq_length + 1))
        positions = torch.arange(recipe.model.seq_length).expand(ROWS, -1)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(),
                 "position_ids": positions, "attention_mask": None}  # fmt: skip
        return build_model(args, recipe), batch

    yield build
    for context in contexts:
        context.__exit__(None, None, None)


MODELS = {
    "mla": ("A", []),
    "mla-one-q": ("A", ["attention.q_lora_rank=null"]),
    "mla-norms": ("A", ["attention.qk_layernorm=true", "model.normalization=LayerNorm"]),
    "gqa": ("A", ["attention.kind=gqa", "attention.qk_layernorm=true"]),
    "gqa-dim": ("A", ["attention.kind=gqa", "attention.kv_channels=12"]),
    "moe": ("E", []),
    "moe-gate": ("E", ["moe.moe_shared_expert_gate=true", "moe.moe_router_topk=3"]),
    "moe-relu": ("E", ["model.swiglu=false", "moe.moe_shared_expert_intermediate_size=null"]),
    "mamba3": ("M", ["mamba3.rope_fraction=1.0"]),
    "mamba3-mimo": ("M", ["mamba3.variant=mimo", "mamba3.mimo_rank=2"]),
    "m2rnn": ("R", ["m2rnn.num_heads=5"]),
    "mtp": ("ER", ["mtp.mtp_num_layers=2", "mtp.pattern=EA"]),
    "tied": ("EA", ["mtp.mtp_num_layers=1", "mtp.pattern=A",
                    "model.untie_embeddings_and_output_weights=false"]),
    "repeated": ("E", ["mtp.mtp_num_layers=2", "mtp.pattern=AA",
                       "mtp.mtp_use_repeated_layer=true"]),
}  # fmt: skip


def recurrences(recipe: Recipe) -> int:
    """What no matrix product of the model shows: scans and convolutions, a token's forward."""
    m, r, total = recipe.mamba3, recipe.m2rnn, 0
    heads = r.num_heads or recipe.model.hidden_size // (r.k_head_dim + r.v_head_dim)
    for layer in recipe.plan.layers:
        if layer.letter == "M":
            rank = m.mimo_rank if m.variant == "mimo" else 1
            total += 4 * m.mamba_num_heads * m.mamba_head_dim * m.mamba_state_dim * rank
        if layer.letter == "R":
            total += heads * r.k_head_dim * r.v_head_dim * (2 * r.v_head_dim + 4)
            total += 2 * r.conv_kernel * (2 * r.k_head_dim + heads * r.v_head_dim)
    return total


@pytest.mark.parametrize("name", MODELS)
def test_products_and_parameters_are_those_of_the_model(built, name):
    """Against torch's counter in the reference model, forward and backward.

    The reference makes the scores of every pair, so that the count is asked for S keys a query.
    The scan of M multiplies whole chunks there (bmm, as attention's scores): its linears alone are
    compared, and what the recurrence needs is counted below.
    """
    pattern, overrides = MODELS[name]
    recipe = recipe_of(pattern, *overrides)
    model, batch = built(recipe)
    found = count(recipe, keys=recipe.model.seq_length)
    padding = padded(model)
    assert found.parameters == sum(p.numel() for p in model.parameters()) - padding
    with FlopCounterMode(display=False) as counter:
        losses = model(**batch)
    with FlopCounterMode(display=False) as backward:
        losses.sum().backward()
    tokens = ROWS * recipe.model.seq_length
    scans = tokens * recurrences(recipe)
    counted = counter.get_total_flops() - chunks(counter, recipe) - 2 * padding * tokens
    assert counted == found.forward * tokens - scans
    # Each product has two factors with gradients.
    counted = backward.get_total_flops() - chunks(backward, recipe) - 4 * padding * tokens
    assert counted == (found.training - found.forward) * tokens - 2 * scans


def padded(model) -> int:
    """Weights of the rows of zeros behind a mixer's projection, which are no work of the model."""
    mixers = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
    return sum(m.padding["in_proj.weight"] * m.in_proj.weight.shape[1] for m in mixers)


def chunks(counter: FlopCounterMode, recipe: Recipe) -> int:
    """The batched products of M's scan; A's scores are such products too."""
    letters = {layer.letter for layer in recipe.plan.layers}
    if "M" not in letters:
        return 0
    assert "A" not in letters, "one cannot be told from the other"
    ops = counter.get_flop_counts()["Global"]
    return sum(n for op, n in ops.items() if str(op) == "aten.bmm")


def counted(call, *args, **kwargs) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*args, **kwargs)
    return counter.get_total_flops()


def test_the_scan_of_m_is_its_recurrence_with_one_product_folded():
    """Token by token: two products v k^T, one S q. In chunks the second v k^T joins the first."""
    recipe = recipe_of("M", "mamba3.variant=mimo", "mamba3.mimo_rank=3")
    case = Mamba3ScanCase.of(recipe)
    found = counted(case.reference, **parity.drawn(case, torch.float64, "cpu", seed=0))
    assert found == case.batch * case.seq * 3 / 2 * recurrences(recipe)


def test_the_recurrence_of_r_counts_every_product():
    """The definition multiplies h W as a matrix; k v^T and q h are elementwise there."""
    recipe = recipe_of("R", "m2rnn.num_heads=5", "m2rnn.conv_kernel=1")
    case = M2RNNCase.of(recipe)
    found = counted(case.reference, **parity.drawn(case, torch.float64, "cpu", seed=0))
    state = 5 * 8 * 4
    assert found == case.batch * case.seq * 2 * 4 * state
    assert recurrences(recipe) == 2 * 4 * state + 2 * state + 2 * state + 2 * (8 + 8 + 5 * 4)


def test_deltanet_is_three_products_on_its_state():
    names = ("key_head_dim=8", "value_head_dim=4", "num_key_heads=2", "num_value_heads=6")
    recipe = recipe_of("D", *(f"attention.linear_{name}" for name in names))
    part = next(part for part in count(recipe).parts if part.name == "D")
    state, q, v = torch.zeros(6, 8, 4), torch.zeros(6, 8, 1), torch.zeros(6, 1, 4)

    def token() -> None:
        corrected = v - q.mT @ state
        torch.bmm(q.mT, state + q @ corrected)

    convolved = 2 * 16 + 24
    weights = 32 * (convolved + 24 + 2 * 6) + 24 * 32
    assert part.forward == 2 * weights + 2 * 4 * convolved + counted(token)
    assert part.parameters == weights + 4 * convolved + 2 * 6 + 4 + 32


DSA = [
    "attention.kind=dsa", "attention.dsa_indexer_n_heads=3", "attention.dsa_indexer_head_dim=8",
    "launch.device=cuda",  # where it can run
]  # fmt: skip


@pytest.mark.parametrize("topk", [1, 7, 32])
def test_dsa_sees_at_most_topk_keys_and_scores_all(topk):
    options = [*DSA, f"attention.dsa_indexer_topk={topk}"]
    trained = recipe_of("A", *options, "attention.dsa_indexer_loss_coeff=0.1")
    mla, dsa = (next(p for p in count(r).parts if p.name == "A") for r in (recipe_of("A"), trained))
    seq, heads, latent, rotary = 32, 4, 8, 4
    core = sum(2 * heads * min(t, topk) * (2 * latent + rotary) for t in range(1, seq + 1))
    scores = sum(2 * 3 * 8 * t for t in range(1, seq + 1))
    mla_core = sum(2 * heads * t * (8 + 4 + 6) for t in range(1, seq + 1))
    index = 2 * (12 * 3 * 8 + 32 * (8 + 3))
    expected = mla.forward + index + (core + scores - mla_core) / seq
    assert dsa.forward == pytest.approx(expected, rel=1e-12)
    # The indexer's inputs are detached: its projections have gradients of weights alone.
    assert dsa.backward == pytest.approx(2 * expected - index, rel=1e-12)
    assert dsa.parameters == mla.parameters + index // 2 + 2 * 8
    recipe = recipe_of("A", *options, "attention.dsa_indexer_loss_coeff=0.0")
    untrained = next(p for p in count(recipe).parts if p.name == "A")
    assert untrained.forward == dsa.forward
    assert untrained.backward == pytest.approx(2 * (expected - index - scores / seq), rel=1e-12)


def test_layers_that_share_an_index_have_no_indexer():
    options = ["dsa_indexer_topk=8", "dsa_indexer_topk_freq=2", "dsa_indexer_loss_coeff=0.1"]
    recipe = recipe_of("AAAA", *DSA, *(f"attention.{option}" for option in options))
    parts = [p for p in count(recipe).parts if p.name == "A"]
    assert [part.layers for part in parts] == [2, 2]
    assert parts[0].parameters - parts[1].parameters == 12 * 3 * 8 + 32 * (8 + 3) + 2 * 8


def test_causal_attention_counts_the_pairs_of_its_mask():
    recipe = recipe_of("A")
    part, without = (
        next(p for p in count(recipe, keys=keys).parts if p.name == "A") for keys in (None, 0.0)
    )
    case = CoreAttentionCase.of(recipe)
    assert (part.forward - without.forward) * case.batch * case.seq == case.flops()


def test_weights_of_grouped_experts_are_counted_in_a_bench():
    """Transformer Engine's grouped linear has a weight0, weight1, ... and no `weight`."""
    recipe = recipe_of("E")
    experts = torch.nn.Module()
    for number in range(4):
        experts.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(24, 32)))
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    assert weight_flops(layer, recipe, 10) == 2 * 10 * recipe.moe.moe_router_topk * 24 * 32


def test_nam56r():
    """The quarter model has the parameters that the H200 run counted in Megatron's model."""
    quarter, whole = (count(load_recipe(name)) for name in ("nam56r-quarter", "nam56r"))
    assert quarter.parameters == 1_695_841_000
    main = sum(p.layers * p.parameters for p in whole.parts if not p.name.startswith("MTP"))
    assert main == pytest.approx(4.88e9, rel=0.002)
    assert whole.active < whole.parameters / 2


def test_the_yardstick_has_mamba2_for_m():
    recipe = load_recipe("nam56r", ["model.pattern=AEMEAEMEAEMM"])
    ours, native = (
        {p.name: p for p in count(recipe, mamba2=mamba2).parts}["M"] for mamba2 in (False, True)
    )
    inner, states = 3584, 2 * 8 * 64
    weights = 3584 * (2 * inner + states + 56) + inner * 3584
    assert native.parameters == weights + 5 * (inner + states) + 3 * 56 + inner + 3584
    assert native.forward == 2 * weights + 4 * inner * 64 + 8 * (inner + states)
    assert ours.layers == native.layers == 17


def test_a_peak_is_that_of_the_data_sheet():
    """Dense bf16: half of the H100's and H200's 1,978.9 TFLOP/s with sparsity; the A100's 312."""
    assert PEAKS == {
        "NVIDIA H200": 989.4e12,
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
    }
