"""The operator `mla_up` in an MLA layer: in place of the linears and mla_rope, and only where it
is named and can be."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from gather_hooks import of_data_parallelism
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer import multi_latent_attention as upstream
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mla_up import triton
from megacpp_mcore.layers import mla_up
from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
from megacpp_mcore.layers.mla import MLASelfAttention
from megacpp_mcore.layers.settings import PluginSettings, attach
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.source import RecipeError
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import single_process

HIDDEN, SEQ, BATCH = 24, 9, 2
SURFACE = REGISTRY["mla_up"]
KERNELS = SURFACE.backends[0]
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Megatron's process groups, and no CUDA random states for its checkpoints to keep."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    with single_process(0):
        yield


def build(dtype=torch.float32, operator=None, backends=None, **changes):
    """A layer; operator: as dispatch would serve it on a GPU."""
    fields = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 3, "q_lora_rank": 10,
        "kv_lora_rank": 7, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 5,
        "rope_type": "rope", "rotary_base": 100, "apply_rope_fusion": False,
        "attention_dropout": 0.0, "normalization": "RMSNorm", "use_cpu_initialization": True,
        "multi_latent_attention": True, "add_bias_linear": False,
    }  # fmt: skip
    config = attach(
        MLATransformerConfig(**(fields | changes)), PluginSettings(backends=backends or {})
    )
    submodules = upstream.MLASelfAttentionSubmodules(
        linear_proj=RowParallelLinear, q_layernorm=IdentityOp, kv_layernorm=IdentityOp,
        linear_q_proj=ColumnParallelLinear, linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
    )  # fmt: skip
    layer = MLASelfAttention(config, submodules, 1, AttnMaskType.causal).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value * parameter.shape[-1] ** -0.5)
    if operator is not None:
        layer._up = operator
    return layer


class Counted:
    """The kernels, and how often they were called."""

    calls = 0

    def __call__(self, *args, **options):
        self.calls += 1
        return triton.mla_up(*args, **options)


def run(layer, bounds=None, dtype=torch.float32):
    """Output, input gradient, parameter gradients."""
    generator = torch.Generator().manual_seed(2)
    shape = (SEQ, 1 if bounds else BATCH, HIDDEN)
    hidden = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    packed = None
    if bounds is not None:
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        offsets = torch.tensor(bounds, dtype=torch.int32)
        packed = PackedSeqParams(
            "thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    y, _ = layer(hidden, attention_mask=None, packed_seq_params=packed)
    (y * torch.randn(y.shape, generator=generator).to(dtype)).sum().backward()
    values = {"y": y.detach(), "dx": hidden.grad}
    return values | {name: p.grad for name, p in layer.named_parameters()}


def assert_near(found, expected):
    """Of a layer in float64: sums of at most SEQ * BATCH * HIDDEN terms in float32, a few after
    one another."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 8 * SEQ * BATCH * HIDDEN * torch.finfo(torch.float32).eps * value.abs().max()
        assert value.abs().max() > 0, name
        assert (found[name].double() - value).abs().max() <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 9]], ids=["rows", "documents"])
def test_a_layer_with_the_kernels_is_the_layer(bounds, changes):
    expected = run(build(torch.float64), bounds, torch.float64)
    kernels = Counted()
    assert_near(run(build(operator=kernels, **changes), bounds), expected)
    assert kernels.calls == (2 if changes else 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_weights_gradients_reach_main_grad_once(changes):
    """As of Transformer Engine's linears with gradient_accumulation_fusion: added to what is there,
    in float32, and said so; the others' stay where they were."""
    expected = run(build())
    layer = build(operator=triton.mla_up, **changes)
    linears = {n: getattr(layer, n) for n in ("linear_q_up_proj", "linear_kv_up_proj")}
    for linear in linears.values():
        linear.fuse_wgrad_accumulation = True
        linear.weight.main_grad = torch.ones(linear.weight.shape)
        linear.weight.grad_added_to_main_grad = False
    found = run(layer)
    for name, linear in linears.items():
        assert linear.weight.grad_added_to_main_grad
        found[f"{name}.weight"] = linear.weight.main_grad - 1
    assert_near(found, {name: value.double() for name, value in expected.items()})


def test_a_layer_waits_for_weights_that_are_still_gathered():
    layer = build(operator=triton.mla_up)
    waited = []
    for linear in (layer.linear_q_up_proj, layer.linear_kv_up_proj):
        linear.register_forward_pre_hook(
            of_data_parallelism(lambda module, _: waited.append(module))
        )
    layer._up = lambda *args, **options: waited.append(args[3:5])
    latents = (torch.randn(SEQ, BATCH, width) for width in (10, 7, 8))
    mla_up.apply(layer._up, layer, *latents, layer._rotary_table(SEQ, "cpu"), None)
    q, kv = layer.linear_q_up_proj, layer.linear_kv_up_proj
    assert waited[:2] == [q, kv] and waited[2][0] is q.weight and waited[2][1] is kv.weight


def test_auto_takes_the_kernels_on_a_gpu_and_the_linears_with_mla_rope_elsewhere():
    dispatch.begin()
    layer = build()
    assert layer._up is None
    (decision,) = [d for d in dispatch.decisions() if d.surface == "mla_up"]
    assert (decision.requested, decision.observed) == ("auto", "reference")
    recipe = load_recipe("nam56r")
    on_gpu = SURFACE.workload(recipe, "cuda")
    if KERNELS.supports(on_gpu) is None:  # where Triton can be imported
        chosen = dispatch.choose("mla_up", on_gpu, recipe.backends)
        assert (chosen.requested, chosen.observed) == ("auto", "triton")


NAMED = "backends.mla_up=triton"
RANKS = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
         "parallel.expert_tensor_parallel_size=1"]  # fmt: skip
FP8 = ["precision.fp8=hybrid", "precision.fp8_recipe=tensorwise"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["backends.mla_rope=triton"], "mla_rope named: this operator has its own inside"),
        (RANKS, "tensor_model_parallel_size 2: the up-projections gather and scatter tokens"),
        (["attention.qk_layernorm=true"], "qk_layernorm with te's norm, which is inside"),
        (["attention.q_lora_rank=null"], "q_lora_rank is not set: queries come from the hidden"),
        (["model.rotary_percent=0.5"], "rotary_dim 32 of 64: it turns all dims"),
        (["attention.kv_lora_rank=512"], "kv_lora_rank 512: it takes 64 at most"),
        (["attention.v_head_dim=128"], "v_head_dim 128: it takes 64 at most"),
    ],
)  # fmt: skip
def test_outside_of_its_scope_the_reference_serves_and_a_named_kernel_is_refused(overrides, reason):
    recipe = load_recipe("nam56r", overrides)
    workload = SURFACE.workload(recipe, "cuda")
    assert reason in KERNELS.supports(workload)
    decision = dispatch.choose("mla_up", workload, recipe.backends)
    assert decision.observed == "reference" and reason in decision.reason
    with pytest.raises(dispatch.DispatchError, match="is named for surface 'mla_up'"):
        dispatch.choose("mla_up", workload, {"mla_up": "triton"})
    with pytest.raises(RecipeError, match=f"backends.mla_up.*{reason}"):
        load_recipe("nam56r", [*overrides, NAMED])


def test_beside_fp8_linears_the_kernels_serve_where_they_are_named(monkeypatch):
    monkeypatch.setattr(mla_up.mla_up, "import_reason", lambda module: None)
    dispatch.forget()
    recipe = load_recipe("nam56r", [*FP8, NAMED])
    workload = SURFACE.workload(recipe, "cuda")
    named = dispatch.choose("mla_up", workload, recipe.backends)
    assert named.observed == "triton" and "in the model's dtype" in named.reason
    left = dispatch.choose("mla_up", workload)
    assert left.observed == "reference" and "triton: fp8 hybrid: it multiplies" in left.reason
    dispatch.forget()


def test_other_scopes():
    """Of a config, and of a machine."""
    config = build().config
    workload = SURFACE.workload(load_recipe("nam56r"), "cpu")
    assert "cuda only, not on cpu" in KERNELS.supports(workload)
    for name, value, reason in (
        ("fp4", "nvfp4", "nvfp4: it multiplies"),
        ("delay_wgrad_compute", True, "delay_wgrad_compute: it computes"),
        ("context_parallel_size", 2, "context_parallel_size 2"),
        ("params_dtype", torch.float16, "bfloat16, not float16"),
    ):
        fields = {**vars(config), "params_dtype": torch.bfloat16, name: value}
        asked = mla_up.mla_up.workload("cuda", SimpleNamespace(**fields), {})
        assert reason in KERNELS.supports(asked)
    own_norm = {"backends.norm": "reference"}
    words = [f"{key}={value}" for key, value in own_norm.items()]
    recipe = load_recipe("nam56r", ["attention.qk_layernorm=true", *words])
    assert "qk_layernorm" not in str(KERNELS.supports(SURFACE.workload(recipe, "cuda")))


@pytest.mark.parametrize("change", ["bias", "norm", "rows"])
def test_linears_that_do_more_than_multiply_are_refused(change, monkeypatch):
    layer = build()
    linear = layer.linear_kv_up_proj
    if change == "bias":
        linear.bias = torch.nn.Parameter(torch.zeros(len(linear.weight)))
    elif change == "norm":
        linear.layer_norm_weight = torch.nn.Parameter(torch.ones(7))
    else:
        linear.weight = torch.nn.Parameter(linear.weight[:-3].detach())
    decision = dispatch.Decision("mla_up", "triton", "triton", "", KERNELS.implementation)
    monkeypatch.setattr(dispatch, "decide", lambda *args: decision)
    with pytest.raises(MegacppError, match="linear_kv_up_proj is a ColumnParallelLinear with"):
        mla_up.decided(layer)


def test_a_plain_layer_takes_the_operator(monkeypatch):
    decision = dispatch.Decision("mla_up", "triton", "triton", "", KERNELS.implementation)
    layer = build()
    monkeypatch.setattr(dispatch, "decide", lambda *args: decision)
    assert mla_up.decided(layer) is triton.mla_up
