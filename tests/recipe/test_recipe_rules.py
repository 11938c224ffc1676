"""Impossible combinations are refused with key, value, origin and what is allowed."""

import pytest

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.source import RecipeError

TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
       "parallel.expert_model_parallel_size=4"]  # fmt: skip
CP = ["parallel.context_parallel_size=2", "parallel.expert_model_parallel_size=4"]
CP2 = [*CP, "model.pattern=AE"]
DSA = ["attention.kind=dsa", "attention.dsa_indexer_n_heads=16",
       "attention.dsa_indexer_head_dim=64", "attention.dsa_indexer_topk=256",
       "attention.dsa_indexer_loss_coeff=1e-3"]  # fmt: skip
FP8 = ["precision.fp8=hybrid"]
TENSORWISE = [*FP8, "precision.fp8_recipe=tensorwise"]
BESIDE_FP8 = [*TENSORWISE, "backends.moe_experts=fused_moe"]
VPP = ["model.depth=48", "parallel.pipeline_model_parallel_size=2",
       "parallel.virtual_pipeline_model_parallel_size=2",
       "parallel.expert_model_parallel_size=4"]  # fmt: skip
YARN = ["attention.rope_type=yarn", "attention.apply_rope_fusion=true"]
FLEX = ["moe.moe_token_dispatcher_type=flex", "parallel.expert_model_parallel_size=8"]
FULL = ["parallel.recompute_granularity=full"]
WHOLE = ["launch.cuda_graph_impl=full_iteration"]
EP2_GATHERED = ["parallel.expert_model_parallel_size=2", "backends.moe_dispatch=allgather"]
NO_MTP = ["mtp.mtp_num_layers=0", "mtp.pattern=null"]
PER_SPLIT = ["data.data_path=null", "data.split=null", "data.train_data_path=a"]

# overrides of nam56r -> the refused key, and words of the reason
REFUSED = [
    # attention and sizes
    (["model.num_attention_heads=48"], "model.hidden_size", "num_attention_heads = 48"),
    (["attention.kind=gqa", "attention.num_query_groups=5"], "model.num_attention_heads", "= 5"),
    (["attention.kind=gqa", "attention.num_query_groups=null"], "attention.num_query_groups",
     "MHA"),
    (["attention.kind=gqa", "attention.kv_channels=3"], "attention.kv_channels", "rotates pairs"),
    (["model.position_embedding_type=yarn", "mtp.mtp_num_layers=0", "mtp.pattern=null"],
     "model.position_embedding_type", "assertion"),
    (["attention.rope_type=null"], "attention.rope_type", "silent default is yarn"),
    ([*YARN, "attention.qk_pos_emb_head_dim=62"], "attention.apply_rope_fusion", "multiple of 4"),
    (["model.position_embedding_type=none", "attention.apply_rope_fusion=true",
      "attention.kind=gqa"], "attention.apply_rope_fusion", "turn it off"),
    ([*YARN, "model.rotary_percent=0.5"], "model.rotary_percent", "rotates all of"),
    (["attention.rotary_scaling_factor=4"], "attention.rotary_scaling_factor", "\"yarn\""),
    (["attention.mscale=0.7"], "attention.mscale", "\"yarn\""),
    (["attention.mscale_all_dim=1"], "attention.mscale_all_dim", "\"yarn\""),
    (["attention.attention_backend=flash"], "attention.attention_backend",
     "backends.core_attention = \"auto\""),
    (["attention.attention_backend=flash", "model.pattern=AE"], "attention.attention_backend",
     "Transformer Engine's attention only"),
    (["model.add_bias_linear=true"], "model.add_bias_linear", "shared expert has no bias"),
    (["moe.moe_apply_probs_on_input=true"], "moe.moe_apply_probs_on_input", "one expert a token"),
    (["moe.moe_flex_dispatcher_backend=ncclep"], "moe.moe_flex_dispatcher_backend", "NCCL 2.30.4"),
    (["moe.moe_grouped_gemm=false"], "moe.moe_grouped_gemm", "are grouped"),
    # accepted by Megatron, which then ignores them
    (["moe.moe_flex_dispatcher_backend=hybridep"], "moe.moe_flex_dispatcher_backend", '"flex"'),
    (["moe.moe_router_pre_softmax=true"], "moe.moe_router_pre_softmax", '"softmax"'),
    (["moe.moe_router_num_groups=4"], "moe.moe_router_num_groups", "moe_router_group_topk"),
    (["moe.moe_token_drop_policy=position"], "moe.moe_token_drop_policy", "capacity_factor"),
    (["model.add_bias_linear=true", "moe.moe_shared_expert_intermediate_size=null",
      "backends.moe_experts=reference"], "model.add_bias_linear", "autograd refuses"),
    (["data.reset_attention_mask=true"], "data.reset_attention_mask", "reads no mask"),
    (["data.reset_position_ids=true"], "data.reset_position_ids", "reads no position"),
    (["attention.qk_pos_emb_head_dim=3"], "attention.qk_pos_emb_head_dim", "even"),
    (["attention.qk_layernorm=true", "attention.q_lora_rank=null"], "attention.qk_layernorm",
     "latents"),
    (["attention.mla_down_proj_fusion=true", "attention.q_lora_rank=null"],
     "attention.mla_down_proj_fusion", "q_lora_rank"),
    (["attention.mla_down_proj_fusion=true", "attention.kind=gqa"],
     "attention.mla_down_proj_fusion", "no MLA layer"),
    (["attention.mla_down_proj_fusion=true", "backends.norm=triton"],
     "attention.mla_down_proj_fusion", "backends.norm = \"triton\": Transformer Engine has"),
    (["attention.mla_down_proj_fusion=true", "backends.linear=reference"],
     "attention.mla_down_proj_fusion", "backends.linear = \"reference\""),
    (["model.squared_relu=true"], "model.squared_relu", "one activation"),
    (["model.rotary_percent=1.5"], "model.rotary_percent", "at most 1"),
    # DSA and DeltaNet
    (["attention.kind=dsa"], "attention.dsa_indexer_topk", "is needed"),
    (["attention.dsa_ranks=[2]"], "attention.dsa_indexer_n_heads", "is needed"),
    ([*DSA, "attention.dsa_indexer_topk=5000"], "attention.dsa_indexer_topk", "seq_length = 4096"),
    ([*DSA, *CP2], "parallel.cp_comm_type", "all_gather"),
    ([*DSA, *TP2, "parallel.sequence_parallel=false"], "parallel.sequence_parallel", "with DSA"),
    ([*DSA, "backends.linear=reference"], "backends.linear", "Transformer Engine's linears only"),
    ([*DSA, "attention.dsa_indexer_topk_freq=3"], "attention.dsa_indexer_topk_freq", "layer 5 "),
    ([*DSA, "attention.kind=mla", "attention.dsa_ranks=[2, 3]",
      "attention.dsa_indexer_topk_freq=8"], "attention.dsa_indexer_topk_freq", "layer 5 "),
    ([*DSA, *VPP[:2], "parallel.expert_model_parallel_size=4",
      "attention.dsa_indexer_topk_freq=40"], "attention.dsa_indexer_topk_freq", "stage"),
    (["model.pattern=AEMEAEMEAEMD", "attention.linear_num_value_heads=24"],
     "attention.linear_num_value_heads", "linear_num_key_heads = 16"),
    (["model.pattern=AEMEAEMEAEMD", "attention.linear_num_key_heads=1", *TP2],
     "attention.linear_num_key_heads", "tensor x context"),
    # experts
    (["moe.num_experts=null"], "moe.num_experts", "has an E"),
    (["moe.moe_ffn_hidden_size=null"], "moe.moe_ffn_hidden_size", "has an E"),
    (["moe.moe_router_topk=17"], "moe.moe_router_topk", "num_experts = 16"),
    (["moe.moe_ffn_hidden_size=895", *TP2], "moe.moe_ffn_hidden_size", "= 2"),
    (["moe.moe_shared_expert_intermediate_size=7", *TP2],
     "moe.moe_shared_expert_intermediate_size", "= 2"),
    ([TP2[0], TP2[2]], "parallel.sequence_parallel", "must be true"),
    (["model.pattern=AM", "mtp.pattern=A", "parallel.expert_model_parallel_size=8"],
     "parallel.expert_model_parallel_size", "no E"),
    (["moe.moe_aux_loss_coeff=[0.1, 0.2]"], "moe.moe_aux_loss_coeff", "one number for each"),
    (["moe.moe_aux_loss_coeff=[-0.1]"], "moe.moe_aux_loss_coeff", "at least 0"),
    (["moe.moe_router_load_balancing_type=sinkhorn"], "moe.moe_aux_loss_coeff", "must be 0"),
    (["moe.moe_router_group_topk=1", "moe.moe_router_num_groups=8"],
     "moe.moe_router_topk", "2 experts of 1 groups"),
    ([*FLEX, "parallel.expert_model_parallel_size=1"], "backends.moe_dispatch",
     "nothing to exchange"),
    (["backends.moe_dispatch=deepep", "parallel.expert_model_parallel_size=16",
      "launch.nproc_per_node=16"], "backends.moe_dispatch", "2, 4, 8 ranks"),
    (["backends.moe_dispatch=deepep", "parallel.expert_model_parallel_size=8",
      "launch.nproc_per_node=4", "launch.nnodes=4"], "backends.moe_dispatch", "on one host"),
    ([*FLEX, "moe.moe_shared_expert_overlap=true"], "backends.moe_dispatch", "anyway"),
    ([*FLEX, "moe.moe_router_dtype=null"], "backends.moe_dispatch", "float32"),
    ([*FLEX, "backends.moe_dispatch=alltoall"], "moe.moe_token_dispatcher_type",
     'must be "alltoall" with backends.moe_dispatch = "alltoall", or be left out'),
    ([*FLEX, "backends.moe_dispatch=deepep", "moe.moe_flex_dispatcher_backend=hybridep"],
     "moe.moe_flex_dispatcher_backend", 'must be "deepep"'),
    (["backends.moe_dispatch=unmoved", "parallel.expert_model_parallel_size=8"],
     "backends.moe_dispatch", "experts are on other ranks"),
    ([*FLEX, "moe.moe_flex_dispatcher_backend=ncclep"], "moe.moe_flex_dispatcher_backend", "NCCL"),
    # Mamba-3, M2RNN, MTP
    (["mamba3.mamba_num_heads=null"], "mamba3.mamba_num_heads", "has an M"),
    (["mamba3.mamba_num_heads=60"], "mamba3.mamba_num_heads", "mamba_num_groups = 8"),
    (["mamba3.mamba_num_heads=7", "mamba3.mamba_num_groups=7", *TP2], "mamba3.mamba_num_heads",
     "= 2"),
    (["mamba3.mamba_head_dim=48"], "mamba3.mamba_head_dim", "power of two"),
    (["mamba3.mamba_state_dim=96"], "mamba3.mamba_state_dim", "power of two"),
    (["mamba3.rope_fraction=1.5"], "mamba3.rope_fraction", "at most 1"),
    (["mamba3.rope_fraction=0.3"], "mamba3.rope_fraction", "even"),
    (["mamba3.dt_min=0.5"], "mamba3.dt_min", "dt_max = 0.1"),
    (["m2rnn.dt_max=1e-5"], "m2rnn.dt_min", "dt_max = 1e-05"),
    (["m2rnn.num_heads=45", *TP2], "m2rnn.num_heads", "45 heads"),
    (["m2rnn.k_head_dim=63", *TP2], "m2rnn.k_head_dim", "parallel_size = 2"),
    (["mamba3.rope_fraction=0.09375", *TP2], "mamba3.rope_fraction", "3 angles"),
    (["m2rnn.v_head_dim=4000"], "m2rnn.num_heads", "less than"),
    ([*FULL, "parallel.recompute_method=block", "parallel.recompute_num_layers=1"],
     "parallel.recompute_method", "MTP"),
    ([*FULL, "parallel.recompute_method=uniform", "parallel.recompute_num_layers=2"],
     "parallel.recompute_num_layers", "must be 1"),
    # the world
    (["launch.nproc_per_node=4", "parallel.expert_model_parallel_size=8"],
     "parallel.expert_model_parallel_size", "= 4"),
    (["parallel.expert_tensor_parallel_size=2", "parallel.expert_model_parallel_size=8"],
     "parallel.expert_model_parallel_size", "is 16"),
    (["parallel.num_distributed_optimizer_instances=3"],
     "parallel.num_distributed_optimizer_instances", "= 8"),
    (["schedule.global_batch_size=48"], "schedule.global_batch_size", "= 32"),
    ([*VPP, "schedule.global_batch_size=48"], "schedule.global_batch_size", "interleaved"),
    (CP, "parallel.context_parallel_size", "Mamba-3's state"),
    (CP, "parallel.context_parallel_size", "M2RNN's state"),
    ([*CP, "model.pattern=AR"], "parallel.context_parallel_size", "M2RNN's state"),
    ([*CP2, "backends.core_attention=sdpa"], "parallel.context_parallel_size", "'sdpa'"),
    (["parallel.sequence_parallel=true"], "parallel.sequence_parallel", "must be false"),
    ([*TP2, "model.seq_length=4097"], "model.seq_length", "context x tensor"),
    (['parallel.cp_comm_type=["p2p", "a2a"]'], "parallel.cp_comm_type", "52 layers"),
    (["parallel.overlap_p2p_comm=true"], "parallel.overlap_p2p_comm", "left out"),
    # recomputation
    (["parallel.recompute_num_layers=1"], "parallel.recompute_num_layers", "full"),
    ([*FULL, "parallel.recompute_method=uniform", "parallel.recompute_num_layers=60"],
     "parallel.recompute_num_layers", "52 layers"),
    ([*FULL, "recompute.mamba3=core"], "recompute.mamba3", "recomputes layers"),
    (["recompute.layernorm=true", "model.pattern=M", "model.depth=1", *NO_MTP,
      "parallel.expert_model_parallel_size=1"], "recompute.layernorm", "there is none"),
    (["recompute.moe=act", "moe.moe_grouped_gemm=false", "backends.moe_experts=reference"],
     "backends.moe_experts", "again"),
    (["recompute.moe=shared_experts", "moe.moe_shared_expert_intermediate_size=null"],
     "recompute.moe", "moe_shared_expert_intermediate_size"),
    (['recompute.moe=["layer", "shared_experts"]'], "recompute.moe", "layer\" alone"),
    (['recompute.moe=["act", "experts"]'], "recompute.moe", "act inside"),
    (["recompute.attention=core_attn", "model.pattern=M", *NO_MTP], "recompute.attention",
     "no attention"),
    (["recompute.m2rnn=mixer", "model.pattern=AEM"], "recompute.m2rnn", "no R"),
    (["recompute.moe=experts", "launch.cuda_graph_impl=local"], "recompute.moe", "captured"),
    (["launch.device=cpu", "recompute.moe=layer"], "recompute.moe", "random states"),
    (["model.transformer_impl=local", "recompute.layernorm=true"], "recompute.layernorm",
     "transformer_engine"),
    (["launch.device=cpu", "recompute.layernorm=true"], "recompute.layernorm", "random states"),
    # backends that the model rules out on any machine
    ([*FP8, "backends.linear=reference"], "backends.linear", "the model's dtype"),
    ([*FP8, "backends.moe_experts=grouped_mm"], "backends.moe_experts", "the model's dtype"),
    ([*FP8, "backends.moe_experts=reference"], "backends.moe_experts", "the model's dtype"),
    (["backends.moe_experts=grouped_mm", "optimizer.optimizer=muon"], "backends.moe_experts",
     "3-d tensor"),
    (["backends.moe_experts=grouped_mm", "recompute.moe=act"], "backends.moe_experts", "again"),
    (["backends.moe_experts=grouped_mm", "model.swiglu=false"], "backends.moe_experts", "SwiGLU"),
    (["backends.norm=triton", "model.normalization=LayerNorm"], "backends.norm", "RMSNorm"),
    # A whole step as one CUDA graph
    ([*WHOLE, "parallel.expert_model_parallel_size=8"], "parallel.expert_model_parallel_size",
     "must be 1 with launch.cuda_graph_impl"),
    ([*WHOLE, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
     "parallel.expert_tensor_parallel_size", "how many tokens each rank or expert gets"),
    ([*WHOLE, "parallel.pipeline_model_parallel_size=2", "model.depth=48"],
     "parallel.pipeline_model_parallel_size", "untested"),
    ([*WHOLE, "data.dataloader_inter_document_masking=true", "schedule.micro_batch_size=1"],
     "data.dataloader_inter_document_masking", "the host sizes launches by it"),
    ([*WHOLE, "backends.moe_experts=te"], "backends.moe_experts",
     'must be "fused_moe", "grouped_mm" or left out'),
    ([*WHOLE, "precision.fp8=hybrid"], "precision.fp8", "FP8 experts read their counts"),
    ([*WHOLE, *TENSORWISE], "precision.fp8", 'or name backends.moe_experts = "fused_moe"'),
    ([*WHOLE, *TENSORWISE, "backends.moe_experts=te"], "precision.fp8", "fp8_recipe = "),
    ([*WHOLE, *TENSORWISE, "backends.mla_up=triton"], "precision.fp8", "must be left out"),
    *(([*WHOLE, *BESIDE_FP8, f"precision.fp8_recipe={name}"], "precision.fp8_recipe",
       "delayed scaling keeps a history of maxima")
      for name in ("delayed", "mxfp8", "blockwise")),
    ([*WHOLE, *BESIDE_FP8, "precision.fp8_param_gather=true"], "precision.fp8_param_gather",
     "must be false with launch.cuda_graph_impl"),
    ([*WHOLE, *BESIDE_FP8, "moe.moe_shared_expert_overlap=true"],
     "moe.moe_shared_expert_overlap", "untested otherwise"),
    ([*WHOLE, *BESIDE_FP8, "moe.moe_router_padding_for_quantization=true",
      "moe.moe_router_fusion=false"], "moe.moe_router_padding_for_quantization", "any number"),
    ([*WHOLE, *BESIDE_FP8, *EP2_GATHERED], "parallel.expert_model_parallel_size", "untested"),
    ([*WHOLE, *BESIDE_FP8, "parallel.tensor_model_parallel_size=2",
      "parallel.sequence_parallel=true", "parallel.expert_tensor_parallel_size=1"],
     "parallel.tensor_model_parallel_size", "untested otherwise"),
    ([*WHOLE, *BESIDE_FP8, "parallel.context_parallel_size=2", "model.pattern=AE"],
     "parallel.context_parallel_size", "untested otherwise"),
    ([*WHOLE, *BESIDE_FP8, "attention.kind=gqa"], "attention.kind", 'must be "mla"'),
    ([*WHOLE, *BESIDE_FP8, "model.pattern=AEMEAEMEAEMD"], "model.pattern", "may not have a D"),
    ([*WHOLE, *BESIDE_FP8, "moe.moe_expert_capacity_factor=1.0"],
     "moe.moe_expert_capacity_factor", "the host has to read"),
    ([*WHOLE, *BESIDE_FP8, "optimizer.optimizer=muon"], "launch.cuda_graph_impl", "3-d tensor"),
    *(([*TENSORWISE, f"precision.{word}"], f"precision.{word.partition('=')[0]}",
       'with precision.fp8_recipe = "tensorwise": Megatron reads it for delayed')
      for word in ("fp8_wgrad=false", "fp8_amax_history_len=16", "fp8_amax_compute_algo=max")),
    ([*BESIDE_FP8, "recompute.moe=experts"], "recompute.moe", "untested"),
    ([*BESIDE_FP8, "recompute.layernorm=true"], "recompute.layernorm", "which is not in FP8"),
    ([*BESIDE_FP8, *FULL], "parallel.recompute_granularity", "which is not in FP8"),
    ([*FP8, "backends.mla_up=triton", "recompute.attention=up_proj"], "recompute.attention",
     "backends.mla_up"),
    ([*WHOLE, "precision.fp8=hybrid", "model.pattern=AMAM", "model.depth=4", "mtp.pattern=A"],
     "precision.fp8", "is untested"),
    ([*WHOLE, "moe.moe_token_dispatcher_type=flex"], "backends.moe_dispatch",
     'must be "unmoved", "local" or left out'),
    ([*WHOLE, "parallel.expert_model_parallel_size=2"],
     "parallel.expert_model_parallel_size", "must be 1 with"),
    ([*WHOLE, *EP2_GATHERED, "moe.moe_shared_expert_overlap=true"],
     "moe.moe_shared_expert_overlap", "must be false with"),
    ([*WHOLE, "schedule.check_for_nan_in_loss_and_grad=true"],
     "schedule.check_for_nan_in_loss_and_grad", "must be false"),
    ([*WHOLE, "launch.cuda_graph_modules=attn"], "launch.cuda_graph_modules", "must be left out"),
    ([*WHOLE, "launch.cuda_graph_warmup_steps=0"], "launch.cuda_graph_warmup_steps", "at least 1"),
    ([*DSA, "backends.norm=triton"], "backends.norm", "LayerNorm"),
    # precision and optimizer
    ([*FP8, "precision.bf16=false"], "precision.bf16", "fp8"),
    ([*FP8, "model.transformer_impl=local"], "model.transformer_impl", "transformer_engine"),
    ([*FP8, "precision.num_layers_at_end_in_bf16=53"], "precision.num_layers_at_end_in_bf16",
     "52 layers"),
    ([*FP8, "attention.kv_lora_rank=40"], "attention.kv_lora_rank", "multiple of 16"),
    ([*FP8, "moe.moe_ffn_hidden_size=904"], "moe.moe_ffn_hidden_size", "multiple of 16"),
    ([*FP8, *TP2, "moe.moe_shared_expert_intermediate_size=1040"],
     "moe.moe_shared_expert_intermediate_size", "16 x 2 ranks"),
    ([*FP8, "moe.moe_router_padding_for_quantization=true"],
     "moe.moe_router_padding_for_quantization", "in place"),
    ([*FP8, "model.seq_length=4095", "schedule.micro_batch_size=1"], "model.seq_length", "4095"),
    (["optimizer.min_lr=1"], "optimizer.min_lr", "optimizer.lr = 0.0003"),
    (["optimizer.exp_avg_dtype=bf16"], "optimizer.exp_avg_dtype", "precision_aware"),
    (["optimizer.use_precision_aware_optimizer=true", "optimizer.optimizer=sgd"],
     "optimizer.use_precision_aware_optimizer", "adam"),
    ([*FP8, "precision.fp8_param_gather=true", "optimizer.optimizer=muon"],
     "precision.fp8_param_gather", "muon"),
    # schedule, data, checkpoint
    (["schedule.lr_warmup_iters=100000"], "schedule.lr_warmup_iters", "100000 steps"),
    (["schedule.lr_warmup_init=1"], "schedule.lr_warmup_init", "optimizer.lr"),
    (["schedule.lr_decay_style=WSD"], "schedule.lr_wsd_decay_iters", "is needed"),
    (["data.mock_data=true"], "data.data_path", "exactly one"),
    (["data.data_path=null"], "data.data_path", "exactly one"),
    (PER_SPLIT, "data.valid_data_path", "eval_iters"),
    (["data.split=null"], "data.split", "98,1,1"),
    (["data.split=most"], "data.split", "98,1,1"),
    (["data.split=0,50,50"], "data.split", "training"),
    (["data.split=100,0,0"], "data.split", "validation"),
    (["data.tokenizer_type=HuggingFaceTokenizer"], "data.tokenizer_model", "is needed"),
    (["data.null_tokenizer_eod_id=65536"], "data.null_tokenizer_eod_id", "vocab_size"),
    (["checkpoint.save_interval=null"], "checkpoint.save_interval", "is needed"),
    (["checkpoint.keep_latest=0"], "checkpoint.keep_latest", "greater than 0"),
    (["checkpoint.keep_latest=2", "checkpoint.save_retain_interval=2000"],
     "checkpoint.keep_latest", "cannot both be set"),
    (["checkpoint.save_retain_interval=1500"], "checkpoint.save_retain_interval", "= 1000"),
    (["checkpoint.async_save=true"], "checkpoint.async_save", "persistent"),
    (["checkpoint.override_opt_param_scheduler=true",
      "checkpoint.use_checkpoint_opt_param_scheduler=true"],
     "checkpoint.override_opt_param_scheduler", "both"),
    (["checkpoint.load=null", "checkpoint.exit_on_missing_checkpoint=true"],
     "checkpoint.exit_on_missing_checkpoint", "load"),
    # words
    (["checkpoint.save=--load"], "checkpoint.save", "dash"),
    (["data.data_cache_path=a\0b"], "data.data_cache_path", "NUL"),
    (['data.data_path=["a\\u0000b"]'], "data.data_path", "NUL"),
    (["data.split=" + "9" * 400 + ",1,0"], "data.split", "weights of training"),
    (["data.split=٣,1,0"], "data.split", "weights of training"),
    (['data.data_path=["a", ""]'], "data.data_path", "empty"),
    (["data.data_path=[]"], "data.data_path", "entry"),
    (["moe.moe_router_load_balancing_type=[]"], "moe.moe_router_load_balancing_type", "entry"),
    # the machine
    (["launch.environment.WORLD_SIZE=2"], "launch.environment", "WORLD_SIZE"),
    (["launch.environment.MEGACPP_RECIPE=x"], "launch.environment", "launcher sets it"),
    (["launch.environment.A-B=2"], "launch.environment", "no variable name"),
    (['launch.cuda_graph_modules=["attn"]'], "launch.cuda_graph_modules", "is read with"),
    (["launch.device=cpu"], "launch.distributed_backend", "gloo"),
    (["data.tokenizer_sha256=abc"], "data.tokenizer_sha256", "64 digits"),
    (["schedule.seed=0"], "schedule.seed", "at least 1"),
    (["schedule.seed=4294967296"], "schedule.seed", "at most 4294967295"),
    (["launch.device=cpu"], "moe.moe_grouped_gemm", "must be false"),
]  # fmt: skip

ACCEPTED = [
    TP2,
    CP2,
    VPP,
    FP8,
    [*TENSORWISE, "precision.first_last_layers_bf16=true"],
    [*FP8, "attention.kv_lora_rank=80"],
    [*FP8, "precision.fp8_wgrad=false", "precision.fp8_amax_history_len=16"],
    [*FP8, "model.seq_length=8", "schedule.micro_batch_size=2"],
    ["optimizer.min_lr=3e-4", "optimizer.lr=3e-4"],
    [*FP8, "backends.moe_experts=fused_moe"],
    [*FP8, "backends.mla_up=triton"],
    [*WHOLE, *BESIDE_FP8],
    [*WHOLE, *BESIDE_FP8, "backends.mla_up=triton"],
    [*WHOLE, *BESIDE_FP8, "precision.fp8=e4m3", "precision.first_last_layers_bf16=true"],
    DSA,
    [*DSA, "attention.dsa_indexer_topk_freq=8"],
    [*DSA, "attention.dsa_indexer_topk_freq=12"],
    [*DSA, *CP2, "parallel.cp_comm_type=all_gather"],
    [*CP2, "backends.core_attention=te"],
    ["attention.kind=gqa"],
    ["attention.kind=gqa", "attention.apply_rope_fusion=true"],
    ["attention.kind=gqa", "attention.num_query_groups=1", *TP2],
    ["attention.rope_type=yarn"],
    [*YARN, "model.num_attention_heads=64"],
    ["model.position_embedding_type=none"],
    ["mtp.mtp_num_layers=0", "mtp.pattern=null"],
    ["mtp.mtp_num_layers=2", "mtp.mtp_use_repeated_layer=true"],
    ["model.pattern=AEMEAEMEAEMD"],
    ["moe.moe_router_group_topk=2", "moe.moe_router_num_groups=4"],
    [*FLEX],
    ["moe.moe_shared_expert_overlap=true", "parallel.expert_model_parallel_size=8"],
    ["moe.moe_router_load_balancing_type=none"],
    ['moe.moe_router_load_balancing_type=["aux_loss", "global_aux_loss"]',
     "moe.moe_aux_loss_coeff=[1e-3, 1e-3]"],
    ["mamba3.variant=mimo", "backends.mamba3_scan=mamba_ssm_mimo"],
    ["mamba3.mamba_head_dim=48", "backends.mamba3_scan=reference"],
    ['recompute.moe=["act", "shared_experts"]', 'recompute.attention=["core_attn", "up_proj"]',
     "recompute.mamba3=core", "recompute.m2rnn=mixer", "recompute.layernorm=true"],
    ["recompute.moe=layer"],
    [*FULL, "parallel.recompute_method=uniform", "parallel.recompute_num_layers=1"],
    ["optimizer.optimizer=muon"],
    ["backends.moe_experts=grouped_mm", "recompute.moe=experts", "backends.norm=reference"],
    ["optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16"],
    ["data.split=98,2"],
    [*PER_SPLIT, "data.valid_data_path=b"],
    ["data.mock_data=true", "data.data_path=null"],
    ["launch.nnodes=2"],
    ["parallel.expert_model_parallel_size=4", "parallel.expert_tensor_parallel_size=2"],
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "words"), REFUSED, ids=lambda v: str(v)[:60])
def test_refused(overrides, key, words):
    with pytest.raises(RecipeError) as error:
        load_recipe("nam56r", overrides)
    lines = str(error.value).removeprefix("recipe nam56r: ").splitlines()
    assert any(
        line.strip().startswith(f"{key} = ") and words in line.partition("): ")[2] for line in lines
    ), str(error.value)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=lambda v: str(v)[:60])
def test_accepted(overrides):
    load_recipe("nam56r", overrides)


def test_a_refusal_names_value_and_origin(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "nam56r"\n[mamba3]\nmamba_num_heads = 60\n')
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert str(error.value) == (
        f"recipe mine: mamba3.mamba_num_heads = 60 ({path}): "
        "must be a multiple of mamba3.mamba_num_groups = 8"
    )


def test_every_refusal_is_told_at_once():
    with pytest.raises(RecipeError) as error:
        load_recipe("nam56r", ["moe.moe_router_topk=17", "optimizer.min_lr=1", "data.split=x"])
    first, *lines = str(error.value).splitlines()
    assert first == "recipe nam56r: 3 keys cannot be as asked:" and len(lines) == 3


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("model.hidden_size=0", "greater than 0"),
        ("model.seq_length=-1", "greater than 0"),
        ("schedule.micro_batch_size=0", "greater than 0"),
        ("parallel.expert_model_parallel_size=0", "greater than 0"),
        ("moe.num_experts=0", "greater than 0, or leave it out"),
        ("mamba3.chunk_size=0", "greater than 0"),
        ("m2rnn.num_heads=0", "greater than 0, or leave it out"),
        ("model.hidden_dropout=1.0", "less than 1"),
        ("optimizer.adam_beta2=1.5", "less than 1"),
        ("optimizer.weight_decay=-0.1", "at least 0"),
        ("schedule.seed=-1", "at least 0"),
    ],
)
def test_numbers_out_of_range(override, allowed):
    with pytest.raises(RecipeError) as error:
        load_recipe("nam56r", [override])
    key, _, value = override.partition("=")
    assert f"{key} = {value} (--set {override}): must be {allowed}" in str(error.value)


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_a_parallel_size_of_zero(size):
    with pytest.raises(RecipeError, match=r"recipe nam56r: "):
        load_recipe("nam56r", [f"parallel.{size}_model_parallel_size=0"])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["parallel.tensor_model_parallel_size=1", "launch.nproc_per_node=2"], None),
        (["parallel.expert_model_parallel_size=2"], 'unless backends.moe_dispatch = "allgather"'),
        (EP2_GATHERED, None),
        (
            ["parallel.expert_model_parallel_size=2", "moe.moe_token_dispatcher_type=allgather"],
            None,
        ),
        ([*EP2_GATHERED, "backends.moe_experts=grouped_mm"], 'must be "fused_moe" or left out'),
        ([*EP2_GATHERED, "optimizer.optimizer=muon"], "fused_moe cannot serve: optimizer muon"),
        ([*EP2_GATHERED, "moe.moe_expert_capacity_factor=1.0"], "moe_expert_capacity_factor = 1.0"),
        (
            ["parallel.expert_model_parallel_size=2", "backends.moe_dispatch=alltoall"],
            "the host reads how many tokens each expert gets",
        ),
        (["parallel.pipeline_model_parallel_size=2"], "parallel.pipeline_model_parallel_size = 2"),
        (["data.dataloader_inter_document_masking=true"], "number of packed documents"),
        (["precision.fp8=hybrid"], "experts read their counts on the host"),
        (TENSORWISE, 'or name backends.moe_experts = "fused_moe"'),
        (BESIDE_FP8, None),
        ([*BESIDE_FP8, "precision.fp8_recipe=delayed"], "keeps a history of maxima"),
        (["backends.moe_experts=te"], "read the tokens of each expert on the host"),
        (["optimizer.optimizer=muon"], "fused_moe and grouped_mm cannot serve: optimizer muon"),
        (["schedule.check_for_nan_in_loss_and_grad=true"], "our entry checks loss and gradient"),
        (["recompute.mamba3=core"], "a captured graph"),
    ],
)
def test_a_step_is_captured_where_no_rule_is_against_it(overrides, reason):
    recipe = load_recipe("nam56r", overrides)
    origin = recipe.origins["launch.cuda_graph_impl"]
    assert recipe.launch.cuda_graph_impl == ("none" if reason else "full_iteration")
    assert reason in origin if reason else origin == "auto"


def test_what_is_asked_for_by_name_is_refused_and_not_replaced():
    named = ["launch.cuda_graph_impl=full_iteration", "parallel.pipeline_model_parallel_size=2"]
    with pytest.raises(RecipeError, match="pipeline_model_parallel_size = 2"):
        load_recipe("nam56r", named)
