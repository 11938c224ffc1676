"""The losses of a run over several ranks are those of one; its checkpoints go on at another layout,
and answer on one device.

With Megatron's own data-parallel wrapper, distributed optimizer, schedules and checkpoints, over
gloo. All runs begin at one checkpoint, and read the same samples in the same order.
"""

import functools
import math
from pathlib import Path

import pytest
import torch
from gloo_ranks import Run, launch

from megacpp_mcore.inference.loading import loaded
from megacpp_mcore.inference.trained import Trained
from megacpp_mcore.recipe import load_recipe

STEPS, SAVED = 4, 2
MODEL = (
    "model.pattern=AEMRE", "model.depth=5", "model.hidden_size=32", "model.ffn_hidden_size=64",
    "model.num_attention_heads=4", "model.seq_length=16",
    "model.make_vocab_size_divisible_by=160",  # times TP, to 320: padding has a part in every loss
    "attention.q_lora_rank=8", "attention.kv_lora_rank=8", "attention.qk_head_dim=8",
    "attention.qk_pos_emb_head_dim=8", "attention.v_head_dim=8",
    "moe.moe_ffn_hidden_size=32", "moe.moe_shared_expert_intermediate_size=32",
    "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=8",
    "mamba3.mamba_num_groups=2", "mamba3.chunk_size=8", "m2rnn.k_head_dim=8",
    "m2rnn.v_head_dim=8", "m2rnn.num_heads=2", "mtp.pattern=E",
    "data.data_path=null", "data.mock_data=true",
    "schedule.micro_batch_size=1", "schedule.global_batch_size=4",
    "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=1",
    "parallel.use_distributed_optimizer=true", "parallel.overlap_grad_reduce=true",
    "parallel.overlap_param_gather=true",
    "parallel.ddp_bucket_size=8000",  # many buckets, or there is nothing to overlap
)  # fmt: skip
TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
PP2 = ("parallel.pipeline_model_parallel_size=2",)


def ep(ranks: int) -> tuple[str, ...]:
    return (f"parallel.expert_model_parallel_size={ranks}",)


# ranks, overrides; four ranks and TP 2 alone are in RESUMED, PP 2 alone in test_stack_parallel.py
LAYOUTS = {
    "dp2": (2, ()),
    "ep2": (2, ep(2)),
    "tp2-ep2": (4, (*TP2, *ep(2))),
    "pp2-vpp2": (2, (*PP2, "model.pattern=AE|M|R|E")),
}
# from the checkpoint of one layout to another: ranks, overrides
RESUMED = {
    ("dp2", "tp2"): (2, TP2),
    ("dp2", "pp2"): (2, (*PP2, "model.pattern=AEM|RE")),
    ("ep2", "ep4"): (4, ep(4)),
    # Split experts have an optimizer of their own.
    ("dp2", "ep2"): (2, ep(2)),
    ("ep2", "dp2"): (2, ()),
}
# with a checkpoint that is asked for the logits behind these tokens
ASKED = ("dp2", "ep2", "tp2-ep2")
TOKENS = (256, 3, 7, 35, 0, 105, 2, 60)  # with TP, a multiple of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def train(folder: Path):
    """train(name, ranks, overrides): a run from the first weights; with start=NAME from the
    checkpoint of that run, which it wrote with saves=True."""

    def run(name, ranks=1, overrides=(), start=None, saves=False, **how) -> dict:
        words = (*MODEL, *overrides, f"launch.nproc_per_node={ranks}")
        how |= {"save": (str(folder / f"{name}.saved"), SAVED)} if saves else {}
        how |= {"first_step": 1 if start is None else SAVED + 1, "weights_alone": start is None}
        load = folder / f"{start or 'seed'}.saved"
        return launch(Run(name, ranks, words, last_step=STEPS, load=str(load), **how), folder)

    seed = Run("seed", 1, (*MODEL, "launch.nproc_per_node=1"), save=(str(folder / "seed.saved"), 1))
    launch(seed, folder)
    return run


@pytest.fixture(scope="module")
def trained(train):
    """trained(name): the run of one of LAYOUTS, made once."""

    @functools.cache
    def run(name: str) -> dict:
        how = {"saves": True, "tokens": TOKENS} if name in ASKED else {}
        return train(name, *LAYOUTS[name], **how)

    return run


@pytest.fixture(scope="module")
def one(train) -> dict:
    found = train("one")
    assert found["losses"][-1] < 0.95 * found["losses"][0]  # it learns
    return found


def assert_same(found: dict, expected: dict, eps: float, what: str) -> None:
    """A rounding is wrong by half an epsilon at most, and each step adds those of 64 operations or
    so in a row to the weights: after n steps the root of 64 n as much, as they are independent."""
    for key in ("losses", "norms"):
        first = len(expected[key]) - len(found[key])
        pairs = enumerate(zip(found[key], expected[key][first:], strict=True), first + 1)
        for step, (value, reference) in pairs:
            bound = eps / 2 * math.sqrt(64 * step)
            off = abs(value / reference - 1)
            assert off <= bound, f"{what}: {key} of step {step} off by {off:.1e} > {bound:.1e}"


FP32 = torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_rank(name, trained, one):
    assert_same(trained(name), one, FP32, name)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "layout"), RESUMED, ids=str)
def test_a_checkpoint_goes_on_at_another_layout(saved, layout, train, trained, one):
    trained(saved)
    found = train(f"{saved}-to-{layout}", *RESUMED[saved, layout], start=saved)
    assert len(found["losses"]) == STEPS - SAVED
    assert_same(found, one, FP32, f"{saved} to {layout}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_checkpoint_of_several_ranks_answers_on_one_device(name, trained, folder, monkeypatch):
    """As `megacpp generate` loads it: the logits are those of the ranks that saved it."""
    expected = torch.tensor(trained(name)["logits"])
    for variable in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):  # loading sets them
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    ranks, overrides = LAYOUTS[name]
    words = (*MODEL, *overrides, f"launch.nproc_per_node={ranks}")
    recipe = load_recipe("nam56r-tiny", words).to_dict()
    source = Trained(name, recipe, folder / f"{name}.saved", SAVED)
    with loaded(source, device="cpu") as found, torch.no_grad():
        logits = found.model.next_token_logits(torch.tensor([TOKENS]))[0]
    # A logit passes the model once, 64 roundings or so, each of the largest one at most.
    bound = FP32 / 2 * math.sqrt(64) * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    assert expected.std() > 100 * bound


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_bf16_with_float32_parameters_goes_on(sharding, train):
    """M and R keep parameters in float32: Megatron 0.19.2 alone can neither save nor load that.
    dp_reshardable is its default."""
    name, how = f"bf16-{sharding}", {"bf16": True, "sharding": sharding}
    two = train(name, 2, saves=True, **how)
    again = train(f"{name}-again", 2, start=name, **how)
    assert again["losses"] == two["losses"][SAVED:] and again["norms"] == two["norms"][SAVED:]
    one = train(f"{name}-one", start=name, **how)
    assert_same(one, two, torch.finfo(torch.bfloat16).eps, "bf16, DP 2 to 1")
    for found in (two, again, one):
        assert len(found["kept"]) == 4 + 4, found["kept"]  # of an M and of an R
        assert not found["narrowed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-ep2", "pp2-vpp2"])
def test_an_update_in_one_pass_is_megatrons(name, train, one):
    """Clipping bites in every step. tp2-ep2 has two optimizers with one norm."""
    assert min(one["norms"]) > 1
    assert_same(train(f"{name}-fused", *LAYOUTS[name], fused=True), one, FP32, f"{name}, fused")


@pytest.mark.slow
def test_an_update_in_one_pass_rounds_weights_and_goes_on_either_way(train):
    apart = train("bf16-apart", 2, saves=True, bf16=True)
    fused = train("bf16-fused", 2, saves=True, bf16=True, fused=True)
    # Triton's interpreter cuts weights off where a GPU rounds them: twice the error.
    eps = 2 * torch.finfo(torch.bfloat16).eps
    assert_same(fused, apart, eps, "bf16, fused")
    again = train("bf16-fused-again", 2, start="bf16-fused", bf16=True, fused=True)
    assert again["losses"] == fused["losses"][SAVED:] and again["norms"] == fused["norms"][SAVED:]
    back = train("bf16-fused-to-apart", 2, start="bf16-fused", bf16=True)
    forth = train("bf16-apart-to-fused", 2, start="bf16-apart", bf16=True, fused=True)
    assert_same(back, fused, eps, "bf16, from one pass to Megatron's")
    assert_same(forth, apart, eps, "bf16, from Megatron's to one pass")
