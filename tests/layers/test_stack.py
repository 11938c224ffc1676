"""Our specs inside Megatron's real HybridModel, built by its own builder from its own argv."""

import os
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from megatron.core.transformer.spec_utils import ModuleSpec

from megacpp_mcore import dispatch
from megacpp_mcore.layers import hooked_arguments
from megacpp_mcore.layers.hooked_arguments import HookedArgumentError
from megacpp_mcore.layers.hybrid_stack import MegacppStack
from megacpp_mcore.layers.settings import SettingsError, plugin_settings
from megacpp_mcore.recipe import Recipe, RecipeError, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu.megatron_setup import (
    build_model,
    megatron_args,
    quiet,
    single_process,
)
from megacpp_mcore.training.cpu.optimizer import build_optimizer, build_scheduler
from megacpp_mcore.training.cpu.step import Trainer

SMALL = [
    "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=4",
    "model.seq_length=32", "attention.q_lora_rank=8", "attention.kv_lora_rank=8",
    "attention.qk_head_dim=8", "attention.qk_pos_emb_head_dim=8", "attention.v_head_dim=8",
    "moe.moe_ffn_hidden_size=32", "moe.moe_shared_expert_intermediate_size=32",
    "mamba3.mamba_num_heads=4", "mamba3.mamba_head_dim=8", "mamba3.mamba_state_dim=8",
    "mamba3.mamba_num_groups=2", "mamba3.chunk_size=8", "m2rnn.k_head_dim=8", "m2rnn.v_head_dim=8",
]  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """Launch variables of one model, taken back at the test's end."""
    names = ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def small(*overrides: str) -> Recipe:
    return load_recipe("nam56r-tiny", [*SMALL, *overrides])


def batch(recipe: Recipe, rows: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 256, (rows, recipe.model.seq_length + 1))
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(rows, recipe.model.seq_length),
        "position_ids": torch.arange(recipe.model.seq_length).expand(rows, -1),
    }


def gradients_after_one_step(recipe: Recipe) -> dict[str, torch.Tensor]:
    """name -> gradient of every parameter after one real training step."""
    args = megatron_args(lower(recipe).argv)
    with single_process(recipe.schedule.seed):
        model = build_model(args, recipe)
        optimizer = build_optimizer(model, args)
        trainer = Trainer(model, optimizer, build_scheduler(optimizer, args), args)
        trainer.step([batch(recipe)])
        return {name: p.grad for name, p in model.named_parameters()}


def test_every_letter_of_nam56r_is_there_and_every_parameter_gets_a_gradient(environment):
    gradients = gradients_after_one_step(small())
    dead = [name for name, g in gradients.items() if g is None or not g.abs().max() > 0]
    assert dead == []
    modules = {
        "A": "self_attention.linear_kv_up_proj", "E": "mlp.experts", "M": "mixer.dt_bias",
        "R": "self_attention.A_log", "MTP": "mtp.layers.0",
    }  # fmt: skip
    for letter, part in modules.items():
        assert any(part in name for name in gradients), letter


def test_no_block_asks_megatron_for_a_plain_sum(environment):
    """Which torch.compile makes, in seconds, at the first step of a run on GPUs."""
    from megatron.core.fusions import fused_bias_dropout

    for name in ("bias_dropout_add_fused_train", "bias_dropout_add_unfused"):
        environment.setattr(fused_bias_dropout, name, None)
    assert gradients_after_one_step(small())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["attention.kind=gqa", "attention.num_query_groups=2"], id="gqa"),
        pytest.param(["mamba3.variant=mimo", "mamba3.mimo_rank=2"], id="mimo"),
        pytest.param(["mtp.mtp_num_layers=2", "mtp.pattern=MR"], id="mtp-2-MR"),
        pytest.param(["attention.qk_layernorm=true"], id="qk-layernorm"),
        pytest.param(["model.untie_embeddings_and_output_weights=false"], id="tied"),
        pytest.param(["model.normalization=LayerNorm"], id="layernorm"),
        pytest.param(["mamba3.decay=rational", "mamba3.rope_fraction=1.0"], id="rational"),
    ],
)
def test_variants_of_the_recipe_train(environment, overrides):
    gradients = gradients_after_one_step(small("model.pattern=AEMR", "model.depth=4", *overrides))
    dead = [name for name, g in gradients.items() if g is None or not g.abs().max() > 0]
    assert dead == []


@pytest.mark.parametrize(
    ("surface", "backends", "kind"),
    [
        ("core_attention", ("sdpa", "reference"), "mla"),
        ("core_attention", ("sdpa", "reference"), "gqa"),
        ("rope_qk", ("megatron", "reference"), "gqa"),
    ],
)
def test_backends_of_attention_give_the_same_gradients(environment, surface, backends, kind):
    """Through the whole model and an MTP depth: fp32 rounding apart."""
    overrides = ["model.pattern=AA", "model.depth=2", "mtp.mtp_num_layers=1", "mtp.pattern=A",
                 f"attention.kind={kind}"]  # fmt: skip
    overrides += ["attention.num_query_groups=2"] if kind == "gqa" else []
    found = {}
    for backend in backends:
        environment.setenv("MEGACPP_BACKENDS", f"{surface}={backend}")
        torch.manual_seed(7)
        found[backend] = gradients_after_one_step(small(*overrides))
        assert {d.observed for d in dispatch.decisions() if d.requested == backend} == {backend}
    # Sums of up to seq * hidden = 1024 terms in two orders: eps * sqrt(1024) = 32 eps, times the
    # four matmuls between a weight and the loss.
    tolerance = 4 * 32 * torch.finfo(torch.float32).eps
    for name, expected in found["reference"].items():
        error = (found[backends[0]][name] - expected).norm() / expected.norm()
        assert error < tolerance, name


def test_fp32_parameters_stay_fp32_in_a_bf16_model(environment):
    from megatron.core.transformer.module import Float16Module

    recipe = small("model.pattern=AEMR", "model.depth=4")
    args = megatron_args(lower(recipe).argv)
    with single_process(1):
        model = build_model(args, recipe)
        model.config.bf16 = True
        wrapped = Float16Module(model.config, model)
        kept = {n for n, p in wrapped.named_parameters() if p.dtype == torch.float32}
    ends = ("dt_bias", ".D", "B_bias", "C_bias", "A_log", "state_weight", ".W")
    assert {name.rsplit(".", 1)[1] for name in kept} >= {
        "dt_bias",
        "D",
        "B_bias",
        "C_bias",
        "A_log",
    }
    assert all(name.endswith(ends) or "router" in name for name in kept), kept


def stock_model(recipe: Recipe):
    """What Megatron's stock pretrain_hybrid.py builds of a recipe's words."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.models.hybrid import HybridModelBuilder

    args = megatron_args(lower(recipe).argv)
    with single_process(1), quiet():
        builder = HybridModelBuilder(hybrid_config_from_args(args))
        return builder.build_model(ProcessGroupCollection.use_mpu_process_groups(), True, True)


def test_stock_megatron_reads_the_recipe_that_the_environment_names(environment):
    recipe = small(
        "model.pattern=MR", "model.depth=2", "mtp.mtp_num_layers=1", "mtp.pattern=M",
        "mamba3.rope_fraction=1.0", "backends.norm=reference",
    )  # fmt: skip
    environment.setenv("MEGACPP_RECIPE", recipe.request)
    model = stock_model(recipe)
    inner = model.mtp.layers[0].mtp_model_layer.layers[0]
    for mixer in (model.decoder.layers[0].mixer, inner.mixer):
        assert plugin_settings(mixer.config).mamba3.rope_fraction == 1.0
    assert {d.requested for d in dispatch.decisions() if d.surface == "norm"} >= {"reference"}


@pytest.mark.parametrize("argument", hooked_arguments.HOOKED)
def test_stock_megatron_is_refused_what_hooks_on_modules_would_miss(environment, argument):
    """Its script hands the spec a config, and its arguments to everybody."""
    from megatron.training import global_vars

    recipe = small("model.pattern=AM", "model.depth=2")
    environment.setenv("MEGACPP_RECIPE", recipe.request)
    environment.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(**{argument: None}))
    stock_model(recipe)
    environment.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(**{argument: 5}))
    flag = "--" + argument.replace("_", "-")
    with pytest.raises(HookedArgumentError, match=f"^{flag} saves what hooks on modules see"):
        stock_model(recipe)


def test_the_spec_needs_settings(environment):
    assert "MEGACPP_RECIPE" not in os.environ  # as a launch that forgot the environment
    with pytest.raises(SettingsError, match="MEGACPP_RECIPE is not set"):
        stock_model(small("model.pattern=AEMR", "model.depth=4"))


def test_settings_of_another_recipe_are_refused(environment):
    environment.setenv("MEGACPP_RECIPE", "nam56r-tiny")
    with pytest.raises(SettingsError, match=r"model\.depth is 12 there, Megatron parsed 4"):
        stock_model(small("model.pattern=AEMR", "model.depth=4"))


def test_a_spec_refuses_a_backend_that_nothing_reads(environment):
    recipe = small(
        "model.pattern=MR", "model.depth=2", "mtp.mtp_num_layers=1", "mtp.pattern=M",
        "backends.moe_experts=reference",
    )  # fmt: skip
    environment.setenv("MEGACPP_RECIPE", recipe.request)
    with pytest.raises(dispatch.DispatchError, match="no part of this model asks for moe_experts"):
        stock_model(recipe)


def test_our_own_model_needs_no_environment_and_takes_no_notice_of_it(environment):
    environment.setenv("MEGACPP_RECIPE", "no-such-recipe")
    assert gradients_after_one_step(small("model.pattern=MR", "model.depth=2"))


def test_importing_the_spec_reads_no_recipe_and_decides_nothing(environment):
    environment.setenv("MEGACPP_RECIPE", "no-such-recipe")
    before = dispatch.decisions()
    spec = runpy.run_path(find_spec("megacpp_mcore.specs.nam56r").origin)["nam56r_stack_spec"]
    assert isinstance(spec, ModuleSpec) and spec.module is MegacppStack
    assert dispatch.decisions() == before
    with pytest.raises(RecipeError, match="no-such-recipe"):
        _ = spec.submodules


@pytest.mark.slow
def test_an_import_error_inside_the_spec_is_loud():
    """Megatron's import_module turns an ImportError into None and its default spec, silently."""
    script = (
        "import sys; from megacpp_mcore.stack import bridges; bridges.before_megatron()\n"
        "for name in [n for n in sys.modules if n.startswith('megacpp_mcore.')]:\n"
        "    sys.modules.pop(name)  # as a new Python has it\n"
        "sys.modules['megacpp_mcore.layers.m2rnn'] = None\n"
        "from megatron.core.transformer.spec_utils import import_module\n"
        "import_module(('megacpp_mcore.specs.nam56r', 'nam56r_stack_spec'))\n"
    )
    done = subprocess.run([warm.python(), "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "SpecError: megacpp_mcore.specs.nam56r cannot be used" in done.stderr


def test_the_deltanet_spec_carries_megatrons_layer():
    from megacpp_mcore.specs.nam56r import nam56r_deltanet_stack_spec, nam56r_stack_spec

    def mixer(spec):
        return spec.submodules.gdn_layer.submodules.self_attention.module.__name__

    assert mixer(nam56r_stack_spec) == "M2RNNMixer"
    assert mixer(nam56r_deltanet_stack_spec) == "GatedDeltaNet"


def test_no_module_of_ours_imports_the_top_level_folders():
    """`import specs` works in a checkout only; the wheel has them inside the package."""
    root = Path(__file__).parents[2]
    for path in [*root.glob("megacpp_mcore/**/*.py"), *root.glob("specs/*.py")]:
        for line in path.read_text().splitlines():
            assert not line.startswith(
                ("import specs", "from specs", "from recipes", "from patches")
            )
