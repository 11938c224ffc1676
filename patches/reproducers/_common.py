"""Shared by the reproducers: exit codes, a process without a GPU, a tiny model.

A reproducer runs as `python SCRIPT` with PYTHONPATH naming the tree under test. It prints one line
with its observation and exits 0 (correct), 1 (the defect is there), 77 (cannot run here) or 78
(inapplicable: the tree's internals are not those it was written for, so nothing was seen).
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial

RIGHT, DEFECT, CANNOT_RUN, INAPPLICABLE = 0, 1, 77, 78


def run(main: Callable[[], int]) -> None:
    """Exit with what main returns; with INAPPLICABLE, the reason and a traceback when it raises."""
    try:
        code = main()
    except BaseException as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}, {frame.name}"
        said = " ".join(str(error).split()) or frame.line
        code = report(INAPPLICABLE, f"{type(error).__name__} in {where}: {said}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads occasionally abort an interpreter that exits normally


def report(code: int, saw: str) -> int:
    """Print the observation and return the code."""
    print(saw, flush=True)
    return code


def hide_gpu(hide_transformer_engine: bool = True) -> None:
    """Hide GPUs from this process; call it before torch or Megatron is imported."""
    warnings.simplefilter("ignore")  # a dozen optional packages that Megatron misses
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron compiles elementwise functions on import, which on a CPU takes seconds of C++ builds.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if hide_transformer_engine:
        sys.modules["transformer_engine"] = None


def asks_for_cuda(error: BaseException) -> bool:
    """Whether torch raised this because there is no CUDA device."""
    return any(word in str(error) for word in ("CUDA", "NVIDIA", "cuda"))


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split(". ")[0]


def place_on_cpu() -> None:
    """Let torch.cuda.current_device() answer "cpu".

    Megatron asks it where to put the router's weights, MTP's counters and logged losses. The
    reproducers that call this are about other defects.
    """
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")


def without_inference_layers() -> None:
    """Let MTP of 0.20 be built without Transformer Engine.

    It asks whether a linear is one of two inference classes, which are None without it.
    """
    from megatron.core.transformer import multi_token_prediction as mtp

    if hasattr(mtp, "is_inference_column_parallel_linear"):
        mtp.is_inference_column_parallel_linear = lambda module: False


def one_process() -> None:
    """Initialize torch.distributed and Megatron's process groups for this process alone."""
    import torch
    from megatron.core import parallel_state

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def tiny_config(mla: bool = False, **changes):
    """A config on the CPU: hidden size 32, 4 heads, 4 experts of which each token takes 2."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    values = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "moe_aux_loss_coeff": 1.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "is_hybrid_model": True,
        "bias_dropout_fusion": False,
        "add_bias_linear": False,
    }
    if mla:
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
        }
    return (MLATransformerConfig if mla else TransformerConfig)(**(values | changes))


def stack_spec(stack: type | None = None, **params):
    """A hybrid stack of Megatron's own torch modules: MLP (-) and MoE (E) layers, and MTP.

    It has no final norm, for which the unpatched tree needs Transformer Engine.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayerSubmodules,
    )

    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    residual = {"pre_mlp_layernorm": WrappedTorchNorm, "mlp_bda": get_bias_dropout_add}
    mtp_layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            layer_norm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
        ),
    )
    submodules = HybridStackSubmodules(
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp), **residual
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                mlp=get_moe_module_spec(use_te=False, num_experts=4), **residual
            ),
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[mtp_layer]),
        ),
    )
    return ModuleSpec(
        module=stack or HybridStack,
        params={"post_layer_norm": False, **params},
        submodules=submodules,
    )


def mla_attention(**config):
    """Megatron's MLASelfAttention of its own torch linears, with an attention core of torch's."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import (
        MLASelfAttention,
        MLASelfAttentionSubmodules,
    )

    class CausalAttention(torch.nn.Module):
        """Megatron's own torch core does not take MLA's k_channels."""

        def __init__(self, config, **kwargs) -> None:
            super().__init__()

        def forward(self, query, key, value, *args, **kwargs):
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return MLASelfAttention(
        config=tiny_config(mla=True, **config),
        submodules=submodules,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
    )


def hybrid_model(pattern: str, spec=None, **config):
    """A HybridModel of the pattern, vocabulary 64, sequence 16, on the CPU and in training mode."""
    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    place_on_cpu()
    without_inference_layers()
    main, *mtp = pattern.split("/")
    config = {"num_layers": len(main), "mtp_num_layers": len(mtp) or None} | config
    torch.manual_seed(0)
    return HybridModel(
        config=tiny_config(**config),
        hybrid_stack_spec=spec or stack_spec(),
        vocab_size=64,
        max_sequence_length=16,
        hybrid_layer_pattern=pattern,
    ).train()


def forward(model, padding_mask=None):
    """The per-token loss [batch 2, sequence 16] on random tokens."""
    import torch

    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    return model(
        input_ids=tokens[:, :-1],
        position_ids=positions,
        attention_mask=None,
        labels=tokens[:, 1:],
        padding_mask=padding_mask,
    )
