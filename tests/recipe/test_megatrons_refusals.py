"""What Megatron's own parser and validation refuse at once and in words: no rule of ours does.

Should an upgrade of Megatron let one of these pass, it needs a rule (megacpp_mcore.recipe.rules).
"""

import pytest
import warm

from megacpp_mcore.recipe import check, load_recipe

pytestmark = pytest.mark.slow  # Megatron parses every recipe once

TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
       "parallel.expert_model_parallel_size=4"]  # fmt: skip
CP2 = ["parallel.context_parallel_size=2", "parallel.expert_model_parallel_size=4",
       "model.pattern=AE"]  # fmt: skip
VPP = ["model.depth=48", "parallel.pipeline_model_parallel_size=2",
       "parallel.virtual_pipeline_model_parallel_size=2",
       "parallel.expert_model_parallel_size=4"]  # fmt: skip
DSA = ["attention.kind=dsa", "attention.dsa_indexer_n_heads=16",
       "attention.dsa_indexer_head_dim=64", "attention.dsa_indexer_topk=256",
       "attention.dsa_indexer_loss_coeff=1e-3"]  # fmt: skip
GQA = ["attention.kind=gqa"]
FP8 = ["precision.fp8=hybrid"]
FULL = ["parallel.recompute_granularity=full"]
UNIFORM = [*FULL, "parallel.recompute_method=uniform"]
FLEX = ["moe.moe_token_dispatcher_type=flex"]
GRAPHS = ["launch.cuda_graph_impl=local"]
NO_SHARED = ["moe.moe_shared_expert_intermediate_size=null"]
CAPACITY = ["moe.moe_expert_capacity_factor=1"]
PADS = ["moe.moe_pad_expert_input_to_capacity=true"]
BASE = ["parallel.expert_model_parallel_size=8"]

# overrides of nam56r -> words of Megatron's refusal
REFUSED = [
    # attention and sizes
    ([*TP2, "model.num_attention_heads=7"], "must be a multiple of tensor_model_parallel_size"),
    ([*GQA, *TP2, "attention.num_query_groups=7"],
     "num_query_groups (7) must be a multiple or divisor"),
    ([*GQA, "attention.rope_type=yarn"], 'only support rope_type="rope", but got yarn'),
    (["attention.apply_rope_fusion=true"], "only works with YARN RoPE"),
    (["model.max_position_embeddings=2048"],
     "max_position_embeddings (2048) must be greater than or equal to seq_length (4096)"),
    ([*DSA, *NO_SHARED, "model.add_bias_linear=true"], "requires add_bias_linear=False"),
    (["model.position_embedding_type=learned_absolute"], "position embedding types are rope and"),
    ([*GQA, "model.position_embedding_type=yarn"], "position embedding types are rope and none"),
    # experts
    (["moe.num_experts=12"], "multiple of expert model parallel_size"),
    (["model.pattern=AM", "mtp.pattern=A", "parallel.expert_model_parallel_size=1",
      "moe.num_experts=null"], "moe_ffn_hidden_size is set but num_moe_experts is None"),
    ([*TP2, *NO_SHARED, "model.add_bias_linear=true"], "Bias in Moe is only supported when ETP==1"),
    (["moe.moe_router_score_function=softmax"], "only supports 'sigmoid' and 'sqrtsoftplus'"),
    (["moe.moe_router_topk=1", "moe.moe_router_score_function=softmax",
      "moe.moe_router_enable_expert_bias=false"], "use --moe-router-pre-softmax when topk is 1"),
    (["moe.moe_router_group_topk=2"], "moe_router_num_groups must be specified"),
    (["moe.moe_router_group_topk=2", "moe.moe_router_num_groups=3"],
     "num_moe_experts (16) should be divisible by moe_router_num_groups (3)"),
    (["moe.moe_router_topk=8", "moe.moe_router_group_topk=8", "moe.moe_router_num_groups=4"],
     "moe_router_group_topk (8) should be smaller than moe_router_num_groups (4)"),
    (["moe.moe_shared_expert_overlap=true", "moe.moe_token_dispatcher_type=allgather"],
     "only works with alltoall or flex token dispatcher"),
    (PADS, "moe_expert_capacity_factor must be set"),
    ([*CAPACITY, "moe.moe_router_load_balancing_type=sinkhorn", "moe.moe_aux_loss_coeff=0"],
     "only works with aux_loss, seq_aux_loss, global_aux_loss or none"),
    (["moe.moe_router_padding_for_quantization=true", "moe.moe_router_fusion=false"],
     "fp8/fp4 must be specified when moe_router_padding_for_quantization"),
    ([*FP8, "moe.moe_router_padding_for_quantization=true", "moe.moe_router_fusion=false",
      "moe.moe_token_dispatcher_type=allgather"],
     "does not support moe_router_padding_for_quantization"),
    # the world
    ([*TP2, "parallel.expert_tensor_parallel_size=1", "parallel.expert_model_parallel_size=1",
      "launch.nproc_per_node=3"], "world size (3) is not divisible by total_model_size"),
    ([*CP2, "model.seq_length=4098"], "seq-length should be a multiple of 2 * context-parallel"),
    (["parallel.tp_comm_overlap=true"], "only when sequence parallelism is enabled"),
    (["parallel.use_distributed_optimizer=false"],
     "--overlap-param-gather only supported with distributed optimizer"),
    (["parallel.overlap_grad_reduce=false"],
     "Must use --overlap-param-gather with --overlap-grad-reduce"),
    ([*VPP, "parallel.overlap_p2p_comm=false"], "pipeline-model-parallel size should be greater"),
    ([*TP2, "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=8"],
     "environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1"),
    # recomputation
    (FULL, "recompute_method must be"),
    ([*UNIFORM, "mtp.mtp_num_layers=0", "mtp.pattern=null"],
     "recompute_num_layers must be between 1 and"),
    (["parallel.distribute_saved_activations=true"], "across tensor model parallel groups"),
    ([*TP2, "parallel.distribute_saved_activations=true"], "full recompute granularity"),
    ([*TP2, *UNIFORM, "parallel.recompute_num_layers=1",
      "parallel.distribute_saved_activations=true"], "false when sequence parallel is enabled"),
    (["recompute.moe=shared_experts", "moe.moe_shared_expert_overlap=true"],
     "cannot work with --moe-shared-expert-overlap"),
    ([*GQA, "recompute.attention=up_proj"], "only supported with multi_latent_attention"),
    # precision and optimizer
    (["precision.cross_entropy_fusion_impl=te"], "--cross-entropy-fusion-impl native"),
    (["precision.deterministic_mode=true"], "requires: cross_entropy_loss_fusion=False"),
    ([*TP2, "precision.deterministic_mode=true", "precision.cross_entropy_loss_fusion=false",
      "parallel.tp_comm_overlap=true"], "requires: tp_comm_overlap=False"),
    (["precision.bf16=false", "model.fp32_residual_connection=true"], "fp16 or bf16"),
    (["precision.fp8_param_gather=true"], "must be used together with fp8 mode"),
    ([*FP8, "precision.fp8_param_gather=true", "parallel.use_distributed_optimizer=false",
      "parallel.overlap_param_gather=false"], "only supported with distributed optimizer"),
    ([*FP8, "precision.first_last_layers_bf16=true"], "Delayed scaling does not support first"),
    ([*FP8, "recompute.layernorm=true"], "Delayed scaling does not support moe_act and layernorm"),
    ([*FP8, "recompute.moe=act"], "Delayed scaling does not support moe_act and layernorm"),
    (["optimizer.optimizer_cpu_offload=true"], "--use-precision-aware-optimizer"),
    (["schedule.lr_warmup_fraction=0.1"], "only specify one of lr-warmup-fraction and lr-warmup-"),
    # CUDA graphs
    ([*GRAPHS, "launch.cuda_graph_modules=mlp"], "mlp cuda graph is only supported for dense"),
    ([*GRAPHS, "launch.cuda_graph_modules=moe"], "only supported with drop-padding MoE"),
    ([*GRAPHS, *PADS, *CAPACITY, 'launch.cuda_graph_modules=["moe", "moe_router"]'],
     "must not contain both moe and moe_router"),
    ([*GRAPHS, *UNIFORM, "parallel.recompute_num_layers=1"],
     "full recompute is only supported with full iteration CUDA graph"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals() -> list[str | None]:
    """Of every recipe, from one process that has imported Megatron once."""
    recipes = [load_recipe("nam56r", [*BASE, *overrides]) for overrides, _ in REFUSED]
    with warm.as_sys_executable():
        reports = check.check(recipes)
    return [report.refused for report in reports]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda n: REFUSED[n][1][:50])
def test_megatron_refuses_it_in_words(refusals, case):
    assert refusals[case] is not None and REFUSED[case][1] in refusals[case]
