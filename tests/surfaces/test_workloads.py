"""The workload that the catalog asks about is the one that the layers ask about."""

import json
import subprocess

import pytest
import warm

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import current_device

# Builds a recipe's model as `megacpp train` does, and prints every workload that dispatch is asked.
_BUILD = """
import json, sys
from megacpp_mcore import dispatch
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process

asked, decide = {}, dispatch.decide

def spy(surface, workload, requests=None):
    sizes = dict(workload.sizes)
    asked.setdefault(surface, []).append([workload.device, workload.dtype, sizes])
    return decide(surface, workload, requests)

dispatch.decide = spy
recipe = load_recipe("nam56r-tiny", sys.argv[1:])
args = megatron_args(lower(recipe).argv)
with single_process(seed=1):
    build_model(args, recipe)
print(json.dumps(asked))
"""


@pytest.mark.slow
def test_a_models_layers_ask_what_its_recipe_answers():
    overrides = ["mamba3.variant=mimo", "mamba3.mimo_rank=2", "m2rnn.chunk_size=48"]
    done = subprocess.run(
        [warm.python(), "-c", _BUILD, *overrides], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    asked = json.loads(done.stdout.splitlines()[-1])
    recipe = load_recipe("nam56r-tiny", overrides)
    assert asked.keys() >= {"linear", "norm", "core_attention", "mamba3_scan", "m2rnn"}
    for name, layers in asked.items():
        workload = REGISTRY[name].workload(recipe, current_device())
        expected = json.loads(json.dumps([workload.device, workload.dtype, dict(workload.sizes)]))
        assert expected in layers, name
        if name != "core_attention":  # which is asked about packed documents, too
            assert layers[-1] == expected, name


def test_nam56r_at_full_size():
    recipe = load_recipe("nam56r")
    asked = {name: surface.workload(recipe, "cuda") for name, surface in REGISTRY.items()}
    attention, scan, m2rnn = (dict(asked[n].sizes) for n in ("core_attention", "mamba3_scan",
                                                              "m2rnn"))  # fmt: skip
    assert attention == {
        "dqk": 128, "dv": 64, "heads": 56, "context_parallel_size": 1, "layout": "sbhd",
        "needs": (),
    }  # fmt: skip
    assert (scan["heads"], scan["groups"], scan["state_dim"], scan["angles"]) == (56, 8, 64, 16)
    assert m2rnn == {"heads": 44, "k_head_dim": 64, "v_head_dim": 16, "chunk_size": 32}
    assert {asked[n].dtype for n in ("core_attention", "mamba3_scan", "m2rnn")} == {"bfloat16"}


def test_tensor_parallel_ranks_ask_for_their_own_heads():
    sizes = ["tensor_model_parallel_size=4", "expert_tensor_parallel_size=1"]
    changes = [f"parallel.{size}" for size in [*sizes, "sequence_parallel=true"]]
    recipe = load_recipe("nam56r", changes)
    assert REGISTRY["mamba3_scan"].workload(recipe, "cuda").size("heads") == 14
    assert REGISTRY["m2rnn"].workload(recipe, "cuda").size("heads") == 11
    mla = REGISTRY["mla_rope"].workload(recipe, "cuda")
    assert mla.size("heads") == 14
    verdicts = {b.name: b.supports(mla) for b in REGISTRY["mla_rope"].backends}
    assert "tensor_model_parallel_size 4: Megatron" in verdicts["megatron"]
    assert verdicts["reference"] is None


def test_the_dims_that_mla_turns():
    def rotary(*overrides):
        return (
            REGISTRY["mla_rope"]
            .workload(load_recipe("nam56r", overrides), "cpu")
            .size("rotary_dim")
        )

    assert rotary() == 64
    # As Megatron's table has them: a frequency for every other one of 64 * 0.3 = 19 dims.
    assert rotary("model.rotary_percent=0.3") == 20
    assert rotary("attention.rope_type=yarn") == 64


def test_grouped_queries_take_the_models_head_dim():
    recipe = load_recipe("nam56r", ["attention.kind=gqa"])
    sizes = dict(REGISTRY["core_attention"].workload(recipe, "cpu").sizes)
    assert (sizes["dqk"], sizes["dv"]) == (64, 64)
    recipe = load_recipe("nam56r", ["attention.kind=gqa", "attention.kv_channels=80"])
    assert REGISTRY["core_attention"].workload(recipe, "cpu").size("dqk") == 80


def test_a_surface_that_the_pattern_does_not_have_has_no_workload():
    recipe = load_recipe("nam56r", ["model.pattern=AE", "model.depth=2"])
    absent = {n for n, s in REGISTRY.items() if s.workload(recipe, "cpu") is None}
    assert {"mamba3_scan", "m2rnn"} <= absent and "core_attention" not in absent
