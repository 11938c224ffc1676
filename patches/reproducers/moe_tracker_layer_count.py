"""A rank without MoE layers must give its MoE tracker the same size as ranks with MoE layers.

Ranks all-reduce their trackers over the pipeline: unequal sizes hang or fail. The logged value must
also be the mean over the MoE layers.
"""

from types import SimpleNamespace

from _common import (
    DEFECT,
    RIGHT,
    forward,
    hide_gpu,
    hybrid_model,
    one_process,
    place_on_cpu,
    report,
    run,
)

PATTERN = "-E-E-/E"
LOSS = "load_balancing_loss"


def main() -> int:
    hide_gpu()
    from megatron.core.transformer.moe import moe_logging

    one_process()
    place_on_cpu()
    # A rank with MoE layers: every token goes to all experts, so that each layer's loss is 1.
    forward(hybrid_model(PATTERN, moe_router_topk=4)).sum().backward()
    size_with = moe_logging.get_moe_metrics_tracker().metrics[LOSS].values.numel()
    mean = training_log()
    moe_logging.destroy_moe_metrics_tracker()
    training_log()  # a rank without
    size_without = moe_logging.get_moe_metrics_tracker().metrics[LOSS].values.numel()
    saw = f"{PATTERN}: tracker of {size_with} with MoE layers, {size_without} without; mean {mean}"
    return report(RIGHT if size_with == size_without and mean == 1.0 else DEFECT, saw)


def training_log() -> float:
    """Call Megatron's training_log as a rank of a hybrid model does; the mean loss it reports."""
    from megatron.training import training

    args = SimpleNamespace(
        hybrid_layer_pattern=PATTERN,
        num_layers=5,
        mtp_num_layers=1,
        mtp_use_repeated_layer=False,
        num_experts=4,
        moe_layer_freq=1,
        moe_router_load_balancing_type="aux_loss",
        moe_z_loss_coeff=None,
        moe_per_layer_logging=False,
        dsa_indexer_loss_coeff=None,
        timing_log_level=0,
        perform_rl_step=False,
        micro_batch_size=1,
        data_parallel_size=1,
        gtp_weight_remat_size=1,
        world_size=1,
        seq_length=16,
        freeze_all_layers=False,
        log_interval=2,
    )
    stand_ins = {
        "get_args": lambda: args,
        "get_num_microbatches": lambda: 1,
        "one_logger_utils": SimpleNamespace(track_app_tag=lambda *args: None),
        "reduce_max_stat_across_model_parallel_group": lambda value, group: value,
    }
    stand_ins |= dict.fromkeys(
        ("get_timers", "get_tensorboard_writer", "get_wandb_writer", "get_one_logger"),
        lambda: None,
    )
    stand_ins["get_energy_monitor"] = lambda: None
    for name, stand_in in stand_ins.items():
        assert hasattr(training, name), f"megatron.training.training has no {name}"
        setattr(training, name, stand_in)
    losses = {}
    training.training_log(
        loss_dict={},
        total_loss_dict=losses,
        learning_rate=1e-3,
        iteration=1,  # not a multiple of log_interval: nothing is printed
        loss_scale=1.0,
        report_memory_flag=False,
        skipped_iter=0,
        grad_norm=None,
        params_norm=None,
        num_zeros_in_grad=None,
        max_attention_logit=None,
    )
    return round(float(losses[LOSS]), 6)


run(main)
