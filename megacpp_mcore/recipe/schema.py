"""The recipe schema: one frozen dataclass a section, one field a key.

A key has the name of its value in Megatron's argument namespace and Megatron's own default; a key
without a default must be given. None stands for "not given": Megatron decides. Numbers are greater
than 0 unless their bounds say otherwise. What the choices mean is in Megatron's `--help`; comments
here say only what is ours.
"""
# ruff: noqa: RUF009  to_flag, to_off_flag and to are dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings, RecomputeSettings
from megacpp_mcore.recipe.fields import (
    BELOW_ONE,
    FROM_ZERO,
    SEED,
    UP_TO_ONE,
    Target,
    to,
    to_flag,
    to_off_flag,
)

_Dtype = Literal["fp32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes and the layer pattern."""

    pattern: str = to(Target.PLAN)  # source letters A E M R D and |
    depth: int = to(Target.PLAN)  # layers, MTP apart
    hidden_size: int = to_flag()
    ffn_hidden_size: int | None = to_flag(None)
    num_attention_heads: int = to_flag()
    vocab_size: int = to_flag()
    make_vocab_size_divisible_by: int = to_flag(128)
    seq_length: int = to_flag()
    max_position_embeddings: int | None = to_flag(None)  # None: seq_length, filled in on loading
    # MLA does not read it: attention.rope_type and attention.qk_pos_emb_head_dim are for its own
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = to_flag(
        "learned_absolute"
    )
    rotary_base: int = to_flag(10000)
    rotary_percent: float = to_flag(1.0, UP_TO_ONE)
    normalization: Literal["LayerNorm", "RMSNorm"] = to_flag("LayerNorm")
    layernorm_epsilon: float = to_flag(1e-5, flag="--norm-epsilon")
    untie_embeddings_and_output_weights: bool = to_flag(False)
    add_bias_linear: bool = to_off_flag(True, "--disable-bias-linear")
    swiglu: bool = to_flag(False)
    squared_relu: bool = to_flag(False)
    hidden_dropout: float = to_flag(0.1, BELOW_ONE)
    attention_dropout: float = to_flag(0.1, BELOW_ONE)
    init_method_std: float = to_flag(0.02, FROM_ZERO)
    embedding_init_method_std: float | None = to_flag(None, FROM_ZERO)
    fp32_residual_connection: bool = to_flag(False)
    transformer_impl: Literal["transformer_engine", "local"] = to_flag("transformer_engine")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What an A (and a D) of the pattern is."""

    kind: Literal["mla", "gqa", "dsa"] = to(Target.PLAN)
    dsa_ranks: tuple[int, ...] = to(Target.PLAN, ())  # A layers, counted from 1, that are DSA
    num_query_groups: int | None = to_flag(None)  # read when kind is "gqa"
    kv_channels: int | None = to_flag(None)
    qk_layernorm: bool = to_flag(False)
    attention_backend: Literal["flash", "fused", "unfused", "auto"] = to_flag("auto")
    apply_rope_fusion: bool = to_off_flag(True, "--no-rope-fusion")
    q_lora_rank: int | None = to_flag(None)
    kv_lora_rank: int = to_flag(32)
    qk_head_dim: int = to_flag(128)
    qk_pos_emb_head_dim: int = to_flag(64, FROM_ZERO)
    v_head_dim: int = to_flag(128)
    rope_type: Literal["rope", "yarn"] | None = to_flag(None)
    rotary_scaling_factor: float = to_flag(1.0)
    mscale: float = to_flag(1.0, FROM_ZERO)
    mscale_all_dim: float = to_flag(0.0, FROM_ZERO)
    mla_down_proj_fusion: bool = to_flag(False)
    dsa_indexer_n_heads: int | None = to_flag(None)
    dsa_indexer_head_dim: int | None = to_flag(None)
    dsa_indexer_topk: int | None = to_flag(None)
    dsa_indexer_topk_freq: int = to_flag(1)
    dsa_indexer_skip_topk_offset: int = to_flag(0, FROM_ZERO)
    dsa_indexer_loss_coeff: float | None = to_flag(None, FROM_ZERO)
    dsa_indexer_use_sparse_loss: bool = to_flag(False)
    dsa_indexer_rotate_activation: bool = to_off_flag(True, "--no-dsa-indexer-rotate-activation")
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] = to_flag("none")
    linear_conv_kernel_dim: int = to_flag(4)  # linear_*: the gated DeltaNet of a source D
    linear_key_head_dim: int = to_flag(128)
    linear_value_head_dim: int = to_flag(128)
    linear_num_key_heads: int = to_flag(16)
    linear_num_value_heads: int = to_flag(32)


_LoadBalancing = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"
]


@dataclass(frozen=True, kw_only=True)
class MoE:
    """What an E of the pattern is."""

    num_experts: int | None = to_flag(None)
    moe_router_topk: int = to_flag(2)
    moe_ffn_hidden_size: int | None = to_flag(None)
    moe_shared_expert_intermediate_size: int | None = to_flag(None)
    moe_shared_expert_gate: bool = to_flag(False)
    moe_shared_expert_overlap: bool = to_flag(False)
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = to_flag("softmax")
    moe_router_pre_softmax: bool = to_flag(False)
    moe_router_topk_scaling_factor: float | None = to_flag(None)
    moe_router_num_groups: int | None = to_flag(None)
    moe_router_group_topk: int | None = to_flag(None)
    moe_router_enable_expert_bias: bool = to_flag(False)
    moe_router_bias_update_rate: float = to_flag(1e-3, FROM_ZERO)
    moe_router_dtype: Literal["fp32", "fp64"] | None = to_flag(None)
    moe_router_load_balancing_type: tuple[_LoadBalancing, ...] = to_flag(("aux_loss",))
    moe_aux_loss_coeff: tuple[float, ...] = to_flag((0.0,), FROM_ZERO)  # one a load balancing type
    moe_z_loss_coeff: float | None = to_flag(None, FROM_ZERO)
    moe_input_jitter_eps: float | None = to_flag(None, FROM_ZERO)
    moe_router_force_load_balancing: bool = to_flag(False)
    moe_router_fusion: bool = to_flag(False)
    moe_router_padding_for_quantization: bool = to_flag(False)
    moe_grouped_gemm: bool = to_flag(False)
    moe_permute_fusion: bool = to_flag(False)
    moe_apply_probs_on_input: bool = to_flag(False)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = to_flag("allgather")
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = to_flag("deepep")
    moe_flex_dispatcher_num_sms: int | None = to_flag(None)
    moe_expert_capacity_factor: float | None = to_flag(None)
    moe_pad_expert_input_to_capacity: bool = to_flag(False)
    moe_token_drop_policy: Literal["probs", "position"] = to_flag("probs")
    moe_per_layer_logging: bool = to_flag(False)


@dataclass(frozen=True, kw_only=True)
class Mamba3(Mamba3Settings):
    """What an M of the pattern is: Megatron's sizes and the plugin's settings."""

    mamba_num_heads: int | None = to_flag(None)
    mamba_head_dim: int = to_flag(64)
    mamba_state_dim: int = to_flag(128)
    mamba_num_groups: int = to_flag(8)


@dataclass(frozen=True, kw_only=True)
class MTP:
    """Multi-token prediction: `mtp_num_layers` depths, each with the layers of `pattern`."""

    mtp_num_layers: int = to(Target.PLAN, 0, FROM_ZERO)
    pattern: str = to(Target.PLAN, "")  # source letters
    mtp_loss_scaling_factor: float = to_flag(0.1, FROM_ZERO)
    mtp_use_repeated_layer: bool = to_flag(False)
    mtp_detach_heads: bool = to_flag(False)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the model is spread over devices and memory."""

    tensor_model_parallel_size: int = to_flag(1)
    pipeline_model_parallel_size: int = to_flag(1)
    virtual_pipeline_model_parallel_size: int | None = to(Target.PLAN, None)
    context_parallel_size: int = to_flag(1)
    expert_model_parallel_size: int = to_flag(1)
    expert_tensor_parallel_size: int | None = to_flag(None)
    sequence_parallel: bool = to_flag(False)
    cp_comm_type: tuple[Literal["p2p", "all_gather", "a2a"], ...] = to_flag(("p2p",))
    use_distributed_optimizer: bool = to_flag(False)
    num_distributed_optimizer_instances: int = to_flag(1)
    overlap_grad_reduce: bool = to_flag(False)
    overlap_param_gather: bool = to_flag(False)
    overlap_p2p_comm: bool | None = to_off_flag(None, "--no-overlap-p2p-communication")
    tp_comm_overlap: bool = to_flag(False)
    ddp_bucket_size: int | None = to_flag(None)
    ddp_average_in_collective: bool = to_flag(False)
    recompute_granularity: Literal["full"] | None = to_flag(None)  # selective: [recompute]
    recompute_method: Literal["uniform", "block"] | None = to_flag(None)
    recompute_num_layers: int | None = to_flag(None)
    distribute_saved_activations: bool = to_flag(False)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How numbers are stored, multiplied and summed, and which Megatron fusions may do it."""

    bf16: bool = to_flag(False)  # false: fp32
    fp8: Literal["e4m3", "hybrid"] | None = to_flag(None, flag="--fp8-format")
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = to_flag("delayed")
    fp8_amax_history_len: int = to_flag(1)
    fp8_amax_compute_algo: Literal["most_recent", "max"] = to_flag("most_recent")
    fp8_wgrad: bool = to_off_flag(True, "--no-fp8-wgrad")
    fp8_param_gather: bool = to_flag(False)
    first_last_layers_bf16: bool = to_flag(False)
    num_layers_at_start_in_bf16: int = to_flag(1, FROM_ZERO)
    num_layers_at_end_in_bf16: int = to_flag(1, FROM_ZERO)
    grad_reduce_in_bf16: bool = to_flag(False)  # the loss ended higher: docs/performance.md
    attention_softmax_in_fp32: bool = to_flag(False)
    deterministic_mode: bool = to_flag(False)
    cross_entropy_loss_fusion: bool = to_flag(False)
    cross_entropy_fusion_impl: Literal["native", "te"] = to_flag("native")
    gradient_accumulation_fusion: bool = to_off_flag(True, "--no-gradient-accumulation-fusion")
    masked_softmax_fusion: bool = to_off_flag(True, "--no-masked-softmax-fusion")
    bias_swiglu_fusion: bool = to_off_flag(True, "--no-bias-swiglu-fusion")
    bias_dropout_fusion: bool = to_off_flag(
        True, "--no-bias-dropout-fusion"
    )  # read with dropout or a bias; else the residual is one plain addition either way
    no_persist_layer_norm: bool = to_flag(False)
    disable_jit_fuser: bool = to_flag(False)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its constants."""

    optimizer: Literal["adam", "sgd", "muon", "adaptive_muon", "lion", "soap"] = to_flag("adam")
    lr: float = to_flag()
    min_lr: float = to_flag(0.0, FROM_ZERO)
    decoupled_lr: float | None = to_flag(None)
    decoupled_min_lr: float | None = to_flag(None, FROM_ZERO)
    weight_decay: float = to_flag(0.01, FROM_ZERO)
    clip_grad: float = to_flag(1.0, FROM_ZERO)
    adam_beta1: float = to_flag(0.9, BELOW_ONE)
    adam_beta2: float = to_flag(0.999, BELOW_ONE)
    adam_eps: float = to_flag(1e-8)
    sgd_momentum: float = to_flag(0.9, BELOW_ONE)
    lion_beta1: float = to_flag(0.95, BELOW_ONE)
    lion_beta2: float = to_flag(0.98, BELOW_ONE)
    muon_momentum: float = to_flag(0.9, BELOW_ONE)
    muon_nesterov: bool = to_flag(False)
    muon_split_qkv: bool = to_off_flag(True, "--muon-no-split-qkv")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = to_flag("spectral")
    muon_num_ns_steps: int = to_flag(5)
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = to_flag("blockwise")
    muon_extra_scale_factor: float = to_flag(1.0)
    muon_scalar_optimizer: Literal["adam", "lion"] = to_flag("adam")
    use_precision_aware_optimizer: bool = to_flag(False)
    main_grads_dtype: Literal["fp32", "bf16"] = to_flag("fp32")
    main_params_dtype: Literal["fp32", "fp16"] = to_flag("fp32")
    exp_avg_dtype: _Dtype = to_flag("fp32")
    exp_avg_sq_dtype: _Dtype = to_flag("fp32")
    optimizer_cpu_offload: bool = to_flag(False)
    # Clipping, Adam and the rounding of weights in one pass, where the rest of the section allows
    # it: the receipt says.
    fused_update: bool = to(Target.PLUGIN, True)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, batches, learning rate over time, evaluation, seed."""

    train_iters: int = to_flag()
    micro_batch_size: int = to_flag()
    global_batch_size: int = to_flag()
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = to_flag(
        "linear"
    )
    lr_decay_iters: int | None = to_flag(None)
    lr_warmup_iters: int = to_flag(0, FROM_ZERO)
    lr_warmup_fraction: float | None = to_flag(None, BELOW_ONE)
    lr_warmup_init: float = to_flag(0.0, FROM_ZERO)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = to_flag(
        "exponential"
    )
    lr_wsd_decay_iters: int | None = to_flag(None)
    eval_interval: int = to_flag()  # Megatron divides by it, also with eval_iters = 0
    eval_iters: int = to_flag(100, FROM_ZERO)
    log_interval: int = to_flag(100)
    log_throughput: bool = to_flag(False)
    seed: int = to_flag(1234, SEED)
    check_for_nan_in_loss_and_grad: bool = to_off_flag(True, "--no-check-for-nan-in-loss-and-grad")
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = to_flag(
        "validate_results"
    )
    exit_duration_in_mins: int | None = to_flag(None)
    manual_gc: bool = to_flag(False)
    manual_gc_interval: int = to_flag(0, FROM_ZERO)


_Tokenizer = Literal[
    "NullTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "TikTokenizer",
]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from."""

    data_path: tuple[str, ...] | None = to_flag(None)  # prefix, or weight prefix weight prefix ...
    train_data_path: tuple[str, ...] | None = to_flag(None)
    valid_data_path: tuple[str, ...] | None = to_flag(None)
    test_data_path: tuple[str, ...] | None = to_flag(None)
    split: str | None = to_flag(None)
    mock_data: bool = to_flag(False)
    data_cache_path: str | None = to_flag(None)
    tokenizer_type: _Tokenizer = to_flag()
    tokenizer_model: str | None = to_flag(None)
    # of the tokenizer.json that the datasets were made with, as their PREFIX.json says
    tokenizer_sha256: str | None = to(Target.PLUGIN, None)
    null_tokenizer_eod_id: int | None = to_flag(None, FROM_ZERO)
    num_workers: int = to_flag(2, FROM_ZERO)
    dataloader_type: Literal["single", "cyclic"] | None = to_flag(None)
    num_dataset_builder_threads: int = to_flag(1)
    reset_position_ids: bool = to_flag(False)
    reset_attention_mask: bool = to_flag(False)
    eod_mask_loss: bool = to_flag(False)
    dataloader_inter_document_masking: bool = to_flag(False)
    create_attention_mask_in_dataloader: bool = to_off_flag(
        True, "--no-create-attention-mask-in-dataloader"
    )

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer.json that Megatron reads as `megacpp data build` does, without the package
        transformers, which would take a folder or a name of the hub; None: none."""
        model = self.tokenizer_model or ""
        named = self.tokenizer_type == "HuggingFaceTokenizer" and model.endswith(".json")
        return model if named else None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is saved, where, and what a run starts from."""

    save: str | None = to_flag(None)
    save_interval: int | None = to_flag(None)
    save_retain_interval: int | None = to_flag(None)
    keep_latest: int | None = to(Target.PLUGIN, None)  # how many complete ones stay; None: all
    verify_checksums: bool = to(Target.PLUGIN, True)  # as a checkpoint is loaded
    load: str | None = to_flag(None)
    finetune: bool = to_flag(False)
    exit_on_missing_checkpoint: bool = to_flag(False)
    ckpt_format: Literal["torch", "torch_dist"] = to_flag("torch_dist")
    ckpt_fully_parallel_load: bool = to_flag(False)
    # without it an optimizer's state can be resumed at another data-parallel size only
    dist_ckpt_optim_fully_reshardable: bool = to_flag(False)
    async_save: bool = to_flag(False)
    use_persistent_ckpt_worker: bool = to_flag(False)
    override_opt_param_scheduler: bool = to_flag(False)
    use_checkpoint_opt_param_scheduler: bool = to_flag(False)


_GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The machine: device, processes, environment, CUDA graphs."""

    device: Literal["cuda", "cpu"] = to(Target.PLUGIN, "cuda")
    # `auto` does not fall past a backend whose package is installed but broken
    strict: bool = to(Target.PLUGIN, False)
    nnodes: int = to(Target.ENVIRONMENT, 1)
    nproc_per_node: int = to(Target.ENVIRONMENT, 1)
    environment: dict[str, str] = to(Target.ENVIRONMENT, {})
    distributed_backend: Literal["nccl", "gloo"] = to_flag("nccl")
    distributed_timeout_minutes: int = to_flag(10)
    # a rank that makes no progress for so long ends the run; compiling and saving take minutes
    heartbeat_timeout_s: int | None = to(Target.PLUGIN, 1800)
    use_cpu_initialization: bool | None = to_flag(None)
    # "auto" is ours: rules.cuda_graphs puts full_iteration or none in its place
    cuda_graph_impl: Literal["auto", "none", "local", "transformer_engine", "full_iteration"] = (
        to_flag("none")
    )
    cuda_graph_modules: tuple[_GraphModule, ...] | None = to_flag(None)
    cuda_graph_warmup_steps: int = to_flag(3, FROM_ZERO)


# section -> its keys; [backends] is apart: its keys are the surfaces of megacpp_mcore.dispatch
SECTIONS: dict[str, type] = {
    "model": Model,
    "attention": Attention,
    "moe": MoE,
    "mamba3": Mamba3,
    "m2rnn": M2RNNSettings,
    "mtp": MTP,
    "parallel": Parallel,
    "recompute": RecomputeSettings,
    "precision": Precision,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "data": Data,
    "checkpoint": Checkpoint,
    "launch": Launch,
}
