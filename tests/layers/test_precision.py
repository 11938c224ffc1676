"""FP8 around the recurrent mixers: a projection whose sizes do not fit stays in bf16."""

from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.stack import bridges

bridges.before_megatron()

from megatron.core.extensions.transformer_engine import TEQuantizationParams  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings  # noqa: E402
from megacpp_mcore.layers.m2rnn import M2RNNMixer  # noqa: E402
from megacpp_mcore.layers.mamba3 import Mamba3Mixer  # noqa: E402
from megacpp_mcore.layers.mixer import MixerSubmodules  # noqa: E402
from megacpp_mcore.training.cpu.megatron_setup import single_process  # noqa: E402


class _TransformerEngines:
    """As Megatron's TE linears: the precision is settled in `finish_init`, while they are built."""

    def __init__(self, *args, **kwargs):
        self.finish_init(None)
        precision = self.precision  # torch's Module forgets what was set before it was made
        super().__init__(*args, **kwargs)
        self.precision = precision

    def finish_init(self, quantization_config):
        parse = TEQuantizationParams.parse_from_config
        parsed = None if quantization_config is None else parse(quantization_config)
        object.__setattr__(self, "precision", parsed)


class Column(_TransformerEngines, ColumnParallelLinear):
    pass


class Row(_TransformerEngines, RowParallelLinear):
    pass


def mixers(fp8: str | None, heads: int, head_dim: int = 16):
    """An M and an R of `heads` heads of `head_dim` columns each, in a world of one."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True,
        mamba_num_heads=heads, mamba_head_dim=head_dim, mamba_state_dim=16, mamba_num_groups=1,
    )  # fmt: skip
    config.fp8 = fp8  # after the config's own check, which wants Transformer Engine
    with single_process(1):
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        yield Mamba3Mixer(
            config, MixerSubmodules(Column, Row), 32, pg_collection=groups,
            settings=Mamba3Settings(rope_fraction=1.0),
        )  # fmt: skip
        yield M2RNNMixer(
            config, MixerSubmodules(Column, Row), 1, groups,
            settings=M2RNNSettings(k_head_dim=16, v_head_dim=head_dim, num_heads=heads),
        )  # fmt: skip


def in_the_models_dtype(linear: torch.nn.Module) -> bool:
    """Whether Megatron's wrapper would switch FP8 off around this linear's product."""
    if linear.precision is None:
        return False  # whatever is around it
    recipe = linear.precision.training_recipe
    assert recipe.override_quantized_autocast and not recipe.fp8_param
    return recipe.fp8_quantization_recipe is None and recipe.fp4_quantization_recipe is None


@pytest.mark.parametrize(
    ("fp8", "heads", "head_dim", "kept"),
    [
        ("hybrid", 6, 16, False),  # 96 columns; in_proj's 250 and 230 rows are padded to fit
        ("hybrid", 5, 12, True),  # 60
        ("hybrid", 4, 12, False),  # 48
        (None, 5, 12, False),
    ],
)
def test_only_a_projection_that_does_not_fit_stays_in_the_models_dtype(fp8, heads, head_dim, kept):
    built = list(mixers(fp8, heads, head_dim))
    assert [in_the_models_dtype(mixer.in_proj) for mixer in built] == [False, False]
    assert [in_the_models_dtype(mixer.out_proj) for mixer in built] == [kept, kept]


def test_a_product_that_is_not_made_in_fp8_is_told_and_in_the_receipt(monkeypatch, capfd):
    from megacpp_mcore import dispatch

    monkeypatch.setenv("RANK", "0")
    dispatch.forget()
    for _ in range(2):  # layers of the same sizes: once
        list(mixers("hybrid", 5, 12))
    said = "megacpp: backend of linear: the model's dtype (requested fp8 hybrid; "
    assert capfd.readouterr().err.count(said) == 1
    (told,) = (d for d in dispatch.decisions() if d.surface == "linear")
    assert (told.requested, told.observed) == ("fp8 hybrid", "the model's dtype")
    assert "60 x 32 on a rank" in told.reason and "multiples of 16" in told.reason
    dispatch.forget()
    list(mixers(None, 5, 12))
    assert not [d for d in dispatch.decisions() if d.surface == "linear"]


def test_sizes_that_fit_are_those_of_one_rank():
    from megacpp_mcore.layers.precision import fp8_compatible_linear

    config = SimpleNamespace(fp8="hybrid")
    assert fp8_compatible_linear(Column, config, 32, 48) is Column
    assert fp8_compatible_linear(Column, config, 32, 24) is not Column
    assert fp8_compatible_linear(Column, config, 24, 32) is not Column
    assert fp8_compatible_linear(Column, SimpleNamespace(fp8=None), 32, 24) is Column


def test_fp8_without_transformer_engine_is_refused_before_any_layer():
    from megacpp_mcore import dispatch
    from megacpp_mcore.surfaces import linear

    workload = linear.workload("cpu", SimpleNamespace(fp8="hybrid", params_dtype=torch.bfloat16))
    with pytest.raises(dispatch.DispatchError) as error:
        dispatch.choose("linear", workload)
    assert "te: Transformer Engine runs on cuda only" in str(error.value)
    assert "reference: fp8 hybrid: it multiplies in the model's dtype" in str(error.value)


@pytest.mark.parametrize(
    ("fp8", "impl", "kept"),
    [
        ("hybrid", "full_iteration", False),
        ("hybrid", "none", True),
        (None, "full_iteration", True),
    ],
)
def test_a_captured_step_keeps_no_weight_in_fp8(monkeypatch, fp8, impl, kept):
    """Said before a linear is built, which reads it then."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    from megacpp_mcore import dispatch
    from megacpp_mcore.layers import hybrid_stack
    from megacpp_mcore.layers.settings import PluginSettings, attach

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    config.fp8, config.cuda_graph_impl = fp8, impl
    seen = []

    def build(self, config, submodules, **kwargs):
        seen.append(config.disable_parameter_transpose_cache)
        self.post_process = False

    monkeypatch.setattr(HybridStack, "__init__", build)
    monkeypatch.setattr(dispatch, "decide", lambda *question: None)
    stack = object.__new__(hybrid_stack.MegacppStack)
    stack.__init__(attach(config, PluginSettings()), None)
    assert seen == [not kept]
