"""AdamW with Megatron's parameter groups, clipping and learning-rate schedule, on the CPU.

Megatron's own optimizer (`get_megatron_optimizer`) allocates CUDA tensors when it is built, so
torch's AdamW is used here. The schedule is Megatron's OptimizerParamScheduler.
"""

from argparse import Namespace

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megacpp_mcore.training.cpu.megatron_setup import quiet


def build_optimizer(model: torch.nn.Module, args: Namespace) -> torch.optim.AdamW:
    """AdamW over the model's parameters in Megatron's two groups: with and without weight decay.

    As in Megatron, biases and one-dimensional parameters have no weight decay.
    """
    decayed, exempt = [], []
    for name, parameter in model.named_parameters():
        is_exempt = name.endswith(".bias") or parameter.dim() == 1
        (exempt if is_exempt else decayed).append(parameter)
    groups = [
        {"params": parameters, "wd_mult": wd_mult, "lr_mult": 1.0}
        for parameters, wd_mult in ((decayed, 1.0), (exempt, 0.0))
        if parameters
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=True,
    )
    # torch allocates the moments in the first step, but a checkpoint is loaded before it.
    for parameter in (p for group in groups for p in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, args: Namespace) -> OptimizerParamScheduler:
    """Megatron's schedule, counted in samples as Megatron counts it."""
    samples = args.global_batch_size
    decay_steps = (args.lr_decay_iters or args.train_iters) * samples
    if args.lr_warmup_fraction is not None:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    else:
        warmup_steps = args.lr_warmup_iters * samples
    wsd = args.lr_wsd_decay_iters
    with quiet():
        return OptimizerParamScheduler(
            optimizer,
            init_lr=args.lr_warmup_init,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=args.lr_decay_style,
            start_wd=args.start_weight_decay,
            end_wd=args.end_weight_decay,
            wd_incr_steps=args.train_iters * samples,
            wd_incr_style=args.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=args.override_opt_param_scheduler,
            wsd_decay_steps=None if wsd is None else wsd * samples,
            lr_wsd_decay_style=args.lr_wsd_decay_style,
        )
