"""Ranks of a training run on the CPU, over gloo: Megatron's own data-parallel wrapper, distributed
optimizer, schedules and checkpoints, which are for CUDA but need little of it.

`launch` is one run: as many processes as its recipe has ranks.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megacpp_mcore.kernels import adam
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.cpu.megatron_setup import megatron_args, quiet
from megacpp_mcore.training.cpu.step import forward_step
from megacpp_mcore.training.gpu import fused_update
from megacpp_mcore.training.gpu.gather_check import GatherCheck

_TYPE = torch.Tensor.type


@dataclass(frozen=True)
class Run:
    """overrides: of nam56r-tiny, which trains in fp32. load: a checkpoint's folder, taken with
    `weights_alone` or with the optimizer. save: a folder, and after which step. sharding: the form
    of the optimizer's checkpoints. fused: the optimizer's step in one pass. tokens: a text of which
    the model that is saved tells every next token's logits (no pipelines)."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    first_step: int = 1
    last_step: int = 1
    load: str | None = None
    weights_alone: bool = True
    save: tuple[str, int] | None = None
    bf16: bool = False
    fused: bool = False
    sharding: str = "fully_reshardable"
    tokens: tuple[int, ...] = ()


def launch(run: Run, folder: Path) -> dict[str, list[float]]:
    """The losses of every step, and the gradient norms, as all ranks together saw them; of the
    parameters that M and R keep in float32, `kept` names, and `narrowed` what is not; `logits`, as
    `Run.tokens` asks for them."""
    out = folder / f"{run.name}.json"
    ranks.start(_rank, (run, str(folder)), run.ranks)
    return json.loads(out.read_text())


def _rank(rank: int, run: Run, folder: str) -> None:
    torch.set_num_threads(1)
    bridges.install()
    _without_cuda()
    _use_an_adam_as_on_cuda()
    adam._CHUNK = adam._BLOCK = 4096  # a program of the interpreter takes every block of a chunk
    ranks.meet(rank, run.ranks)
    training = _Training(run)
    losses, norms = training.steps()
    if rank == 0:
        found = {"losses": losses, "norms": norms, "logits": training.logits, **training.walk()}
        Path(folder, f"{run.name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _without_cuda() -> None:
    """Let what Megatron places on, or asks of, a CUDA device be on the CPU."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().fork = lambda *name: contextlib.nullcontext()  # there is no dropout
    for name in ("zeros", "tensor", "empty", "ones"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *a, _make=make, device=None, **k: _make(*a, **k))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *device: self
    torch.Tensor.type = _type

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...

    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.empty_cache = lambda: None


def _use_an_adam_as_on_cuda() -> None:
    """Let Megatron take `_Adam` for Transformer Engine's, which it can load state into."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = _Adam, False
    distrib_optimizer.HAVE_APEX_OR_TE = True


class _Adam(torch.optim.Optimizer):
    """AdamW with the state of Transformer Engine's FusedAdam: the step is its group's."""

    def __init__(self, params, lr, weight_decay, betas, eps, capturable, adam_w_mode) -> None:
        assert adam_w_mode and not capturable
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(p))
                mean = state["exp_avg"].lerp_(p.grad, 1 - beta1) / (1 - beta1**step)
                square = state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2) / (1 - beta2**step)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def _type(tensor: torch.Tensor, *to: Any) -> Any:
    """Tensor.type, on a CUDA device: the optimizer takes no parameters of other types."""
    if to:
        return tensor.to(to[0])
    return _TYPE(tensor).replace("torch.", "torch.cuda.")


class _Training:
    def __init__(self, run: Run) -> None:
        from megatron.core import parallel_state
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.module import Float16Module
        from megatron.training.training import (
            get_megatron_ddp_config,
            get_megatron_optimizer_config,
        )

        from megacpp_mcore.training.gpu.model import MegacppModelBuilder, model_config

        self.run = run
        self.logits: list[list[float]] = []
        recipe = load_recipe("nam56r-tiny", run.overrides)
        os.environ.update(recipe.launch.environment)
        self.args = args = megatron_args(lower(recipe).argv)
        if run.bf16:  # no recipe for the CPU can have it
            args.bf16, args.params_dtype = True, torch.bfloat16
            args.accumulate_allreduce_grads_in_fp32 = True
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        torch.manual_seed(args.seed)
        with quiet():
            builder = MegacppModelBuilder(model_config(args, recipe))
            ddp = get_megatron_ddp_config(args)
            self.chunks = builder.build_distributed_models(
                self.groups, ddp, mixed_precision_wrapper=Float16Module if args.bf16 else None
            )
            optimizer_config, overrides = get_megatron_optimizer_config(args)
            self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks, overrides)
        fused_update.install(self.optimizer, run.fused)
        assert isinstance(self.optimizer.step, fused_update.FusedUpdate) == run.fused
        config = self.chunks[0].config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if run.load:
            self._load()

    def steps(self) -> tuple[list[float], list[float]]:
        """Train. Returns loss and gradient norm of every step, the same on all ranks."""
        losses, norms = [], []
        gathers = GatherCheck(self.chunks) if self.args.overlap_param_gather else None
        for step in range(self.run.first_step, self.run.last_step + 1):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses.append(self._forward_backward(step))
            done, norm, _ = self.optimizer.step()
            assert done
            norms.append(float(norm))
            if gathers is not None:
                gathers.finish()
                gathers = None
            if self.run.save and self.run.save[1] == step:
                self._save(self.run.save[0])
        return losses, norms

    def walk(self) -> dict[str, list[str]]:
        """Where a parameter that stays in float32 is narrower: in the wrapped model, its gradient's
        buffer, the optimizer's own copy and moments, and the checkpoint; and where its value has
        passed through the model's dtype."""
        kept, narrowed = {}, []
        for chunk in self.chunks:
            for module in chunk.modules():
                kept |= {f"{getattr(module, 'layer_number', 0)}.{name}": getattr(module, name)
                         for name in getattr(module, "fp32_params", ())}  # fmt: skip
        for name, parameter in kept.items():
            if parameter.dtype != torch.float32 or parameter.main_grad.dtype != torch.float32:
                narrowed.append(f"{name}: {parameter.dtype}, gradient {parameter.main_grad.dtype}")
            elif torch.equal(parameter, parameter.to(torch.bfloat16).float()):
                narrowed.append(f"{name}: every value is one of bfloat16")
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for copy, state in optimizer.optimizer.state.items():
                moments = [x.dtype for x in state.values() if isinstance(x, torch.Tensor)]
                if {copy.dtype, *moments} != {torch.float32}:
                    narrowed.append(f"the optimizer's {copy.shape}: {copy.dtype}, {moments}")
        names = {name.rpartition(".")[2] for name in kept}
        for chunk in self.chunks:
            for key, shard in chunk.module.sharded_state_dict().items():
                own = key.rpartition(".")[2] in names and ("mixer." in key or "attention." in key)
                if own and shard.data.dtype != torch.float32:
                    narrowed.append(f"the checkpoint's {key}: {shard.data.dtype}")
        return {"kept": sorted(kept), "narrowed": narrowed}

    def _forward_backward(self, step: int) -> float:
        ranks, rank = self.groups.dp.size(), self.groups.dp.rank()
        batches = _samples(step, self.args)[rank::ranks]
        several = len(self.chunks) > 1
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=self.args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        # Every tensor-parallel rank of the last stage has the loss; the other stages have none.
        total = torch.tensor(
            [sum(report["loss"].item() for report in reports), float(len(reports))]
        )
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def _next_token_logits(self) -> torch.Tensor:
        """Of the model as it trains, [tokens, V]: each rank of TP has a part of the vocabulary."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        model = self.chunks[0].module
        model.eval()
        part = model.next_token_logits(torch.tensor([self.run.tokens]))
        model.train()
        return gather_from_tensor_model_parallel_region(part)[0]

    def _template(self, is_loading: bool) -> dict[str, Any]:
        # As Megatron's training loop has them.
        how = {
            "distrib_optim_sharding_type": self.run.sharding, "chained_optim_avoid_prefix": True
        }  # fmt: skip
        state = {
            f"model{index}": chunk.module.sharded_state_dict(metadata=dict(how))
            for index, chunk in enumerate(self.chunks)
        }
        if is_loading and self.run.weights_alone:
            return state
        optimizer = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=how)
        return state | {"optimizer": optimizer}

    def _save(self, folder: str) -> None:
        if dist.get_rank() == 0:
            os.makedirs(folder)
        dist.barrier()
        for chunk in self.chunks if self.args.overlap_param_gather else ():
            chunk.disable_forward_pre_hook()  # waits for this step's gather, as Megatron's loop
        dist_checkpointing.save(self._template(is_loading=False), folder)
        if self.run.tokens:
            self.logits = self._next_token_logits().tolist()
        for chunk in self.chunks if self.args.overlap_param_gather else ():
            chunk.enable_forward_pre_hook()

    def _load(self) -> None:
        state = dist_checkpointing.load(self._template(is_loading=True), self.run.load)
        for index, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state[f"model{index}"])
        if self.run.weights_alone:
            self.optimizer.reload_model_params()
        else:
            self.optimizer.load_state_dict(state["optimizer"])


def _samples(step: int, args: Any) -> list[dict[str, torch.Tensor]]:
    """The global batch of a step, a row a micro batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (args.global_batch_size, 1, args.seq_length + 1)
    tokens = torch.randint(8, shape, generator=generator)  # something to learn
    return [
        {
            "tokens": row[:, :-1],
            "labels": row[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, args.seq_length),
            "position_ids": torch.arange(args.seq_length).expand(1, -1),
        }
        for row in tokens
    ]


def _forward_step(batches: Any, model: torch.nn.Module) -> tuple:
    losses, reduce = forward_step(batches, model)

    def loss(output: torch.Tensor) -> tuple:
        total, tokens, _ = reduce(output)
        return total, tokens, {"loss": total.detach() / tokens}

    return losses, loss
