"""The output layer and the losses of a HybridModel, main head and MTP, without the logits.

Megatron makes the logits of every token for the main head, and again for every MTP depth, and keeps
a softmax of each in float32 until the backward pass. Here both heads are calls of the surface
`linear_cross_entropy`, which is given hidden states and the output layer's weight. The losses, what
is logged of them and what they add to the gradient are Megatron's (`HybridModel.forward`,
`process_mtp_loss`, `VocabParallelCrossEntropy`).

A stack spec has no say in this, only the model's builder (`training/gpu_model.py`): a model that
Megatron-LM's own pretrain_hybrid.py builds with our `--spec` keeps Megatron's heads, and is refused
where others are asked for.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    roll_tensor,
)
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.linear_cross_entropy import Head
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.patching import applied
from megacpp_mcore.surfaces import linear_cross_entropy
from megacpp_mcore.surfaces.linear_cross_entropy import MEGATRON
from megacpp_mcore.surfaces.workload import current_device

SURFACE = linear_cross_entropy.SURFACE.name

# Field of Megatron's config -> the one value that is served, and why no other is.
_SERVED = {
    "mtp_report_acceptance": (False, "counting right predictions takes the logits"),
    "fine_grained_activation_offloading": (False, "its bookkeeping of the head is not done"),
    "gtp_weight_remat_size": (1, "the output layer's weight would be a shard of another kind"),
}


class LossError(MegacppError):
    """A model or a call whose losses cannot be made without logits."""


@dataclass(frozen=True)
class _Depth:
    """What one MTP depth learns. labels, mask: [b, s]; tokens: how many the mask counts."""

    labels: Tensor
    mask: Tensor
    tokens: Tensor


class HeadLosses:
    """The losses of one model's heads, through the backend that dispatch chose for it.

    Hidden states come as the last layer leaves them: [s, b, h], of this rank's part of the sequence
    under sequence parallelism. Labels, masks, weights and losses are [b, s] of the whole sequence,
    losses in nats, float32.
    """

    def __init__(self, model: Any, decision: dispatch.Decision) -> None:
        """model: a HybridModel that has its output layer, and nothing that takes logits."""
        self.config = model.config
        self.cp_group = model.pg_collection.cp
        self.tp_group = model.tp_group if model.tp_group.size() > 1 else None
        self._head: Head = decision.load()
        scaled = self.config.use_mup and self.config.mup_output_mult != 1.0
        self._options = {
            "tp_group": self.tp_group,
            "logit_scale": self.config.mup_output_mult if scaled else 1.0,
        }
        self._counts_are_optional = "mtp-acceptance-on-request" in applied("megatron-core")

    def per_token(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss of every token, [b, s]. Any gradient may come back for them."""
        targets = labels.t().contiguous()
        losses = self._head.per_token(self._for_all_ranks(hidden), weight, targets, **self._options)
        return losses.t().contiguous()

    def total(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """sum(weights * losses), a scalar: its gradient is made in the forward pass."""
        if not torch.is_grad_enabled():
            return (self.per_token(hidden, weight, labels) * weights).sum()
        hidden = self._for_all_ranks(hidden)
        total, _ = self._head.weighted(
            hidden, weight, labels.t().contiguous(), _wide(weights.t(), hidden), **self._options
        )
        return total

    def with_mtp(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None, training: bool,
    ) -> Tensor:  # fmt: skip
        """The main head's hidden states out of those of all depths, [(1 + depths) s, b, h].

        The backward pass through them adds MTP's gradients, scaled as Megatron scales them: by
        MTPLossAutoScaler's scale, and by the main head's tokens over the depth's own where the
        gradients are divided by the main head's tokens in the end (calculate_per_token_loss). In
        training the mean loss of each depth goes to Megatron's log.
        """
        depths = self.config.mtp_num_layers
        rows = hidden.shape[0] // (1 + depths)
        hidden, ahead = hidden.split([rows, depths * rows])
        if not (training or torch.is_grad_enabled()):
            return hidden  # nothing would be done with the losses
        if self.config.mtp_detach_heads:
            weight = weight.detach()
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        targets = self._depths(labels, mask, packed_seq_params)
        weights = torch.stack([self._weights(depth, mask) for depth in targets])
        total, losses = self._head.weighted(
            self._for_all_ranks(ahead), weight,
            self._rows(torch.stack([depth.labels for depth in targets])),
            _wide(self._rows(weights), hidden), **self._options,
        )  # fmt: skip
        if training:
            self._log(targets, self._depths_of(losses, depths))
        return MTPLossAutoScaler.apply(hidden, total)

    def _depths(
        self, labels: Tensor, mask: Tensor, packed_seq_params: PackedSeqParams | None
    ) -> list[_Depth]:
        """Depth by depth, labels and mask one token further, within documents where packed."""
        found = []
        how = {"cp_group": self.cp_group, "packed_seq_params": packed_seq_params}
        for _ in range(self.config.mtp_num_layers):
            labels, _ = roll_tensor(labels, **how)
            mask, tokens = roll_tensor(mask, **how)
            found.append(_Depth(labels, mask, tokens))
        return found

    def _weights(self, depth: _Depth, mask: Tensor) -> Tensor:
        """What Megatron multiplies the depth's losses by, [b, s]. mask: the main head's."""
        scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        tokens = depth.tokens.clamp(min=1)
        if self.config.calculate_per_token_loss:
            return scale * depth.mask * (mask.sum() / tokens)
        return scale * depth.mask / tokens

    def _log(self, targets: list[_Depth], losses: Tensor) -> None:
        """Give Megatron's log the mean loss of each depth. losses: [depths, b, s].

        Without the patch mtp-acceptance-on-request it takes a count of right predictions too, for
        which the logits are missing: it is given NaN, which no one can take for a rate.
        """
        counts = (None, None)
        if not self._counts_are_optional:
            counts = (losses.new_full((), torch.nan), losses.new_zeros(()))
        for number, (depth, its_losses) in enumerate(zip(targets, losses, strict=True)):
            mean = (depth.mask * its_losses).sum() / depth.tokens.clamp(min=1)
            MTPLossLoggingHelper.save_metrics_to_tracker(
                mean, *counts, number, len(targets), avg_group=_log_group()
            )

    def _for_all_ranks(self, hidden: Tensor) -> Tensor:
        """hidden where every tensor-parallel rank needs it, for its part of the vocabulary: all of
        the sequence. The ranks' gradients are summed on the way back."""
        if self.tp_group is None:
            return hidden
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def _rows(self, values: Tensor) -> Tensor:
        """[depths, b, s] -> [depths s, b], in the order of the gathered hidden states: under
        sequence parallelism a rank's part of every depth before the next rank's."""
        depths, batch, seq = values.shape
        values = values.transpose(1, 2).reshape(depths, self._parts, -1, batch)
        return values.transpose(0, 1).reshape(depths * seq, batch)

    def _depths_of(self, values: Tensor, depths: int) -> Tensor:
        """[depths s, b] -> [depths, b, s]: `_rows` undone."""
        rows, batch = values.shape
        values = values.reshape(self._parts, depths, -1, batch).transpose(0, 1)
        return values.reshape(depths, rows // depths, batch).transpose(1, 2)

    @property
    def _parts(self) -> int:
        gathered = self.tp_group is not None and self.config.sequence_parallel
        return self.tp_group.size() if gathered else 1


def _wide(weights: Tensor, hidden: Tensor) -> Tensor:
    """Loss weights in the losses' dtype: float32, or float64 for float64."""
    return weights.to(torch.promote_types(hidden.dtype, torch.float32)).contiguous()


_CHOSEN_BY_MODEL = "megacpp_heads_chosen_by_model"


def chosen_by_model(config: Any) -> None:
    """Say that the model of `config` asks `head_losses` for its heads."""
    setattr(config, _CHOSEN_BY_MODEL, True)


def check_asked_for(config: Any) -> None:
    """Raise LossError where heads are named that a model of Megatron's own class would not have;
    record that it has its own."""
    if getattr(config, _CHOSEN_BY_MODEL, False):
        return
    asked = dispatch.requested(SURFACE, plugin_settings(config).backends)
    if asked not in (dispatch.AUTO, MEGATRON.name):
        raise LossError(
            f'{SURFACE} = "{asked}" is asked for, and this is Megatron\'s own HybridModel, whose '
            f'heads no stack spec can change. Name "{MEGATRON.name}" or nothing, or train with '
            "`megacpp train` or `python -m megacpp_mcore.pretrain`, whose model has them"
        )
    reason = "a model of Megatron's own class has its own heads"
    _record_megatrons(asked, reason)


def _record_megatrons(asked: str, reason: str) -> None:
    """Megatron's own heads serve, which was not ours to choose."""
    decision = dispatch.Decision(SURFACE, asked, MEGATRON.name, reason, MEGATRON.implementation)
    dispatch.record(decision)


def head_losses(model: Any) -> HeadLosses | None:
    """What dispatch chooses for `model`, a HybridModel; None where that is Megatron's own heads,
    as it is, unless another backend is named, where the config takes the logits.

    Raises DispatchError, and LossError for a config that the named backend cannot serve.
    """
    config = model.config
    backends = plugin_settings(config).backends
    asked = dispatch.requested(SURFACE, backends)
    _check_fusion(config, asked)
    takers = _takes_logits(model)
    if takers and asked == dispatch.AUTO:
        _record_megatrons(asked, "; ".join(takers))
        return None
    workload = linear_cross_entropy.workload(current_device(), config, model.vocab_size)
    decision = dispatch.decide(SURFACE, workload, backends)
    if decision.observed == MEGATRON.name:
        return None
    if takers:
        raise LossError(
            f"the losses cannot be made without logits: {'; '.join(takers)}. Change that, or name "
            f'{SURFACE} = "{MEGATRON.name}" in [backends] for Megatron\'s own heads'
        )
    return HeadLosses(model, decision)


def _takes_logits(model: Any) -> list[str]:
    """What of the model needs logits, each with why."""
    takers = [
        f"{name} = {asked!r}: {why}"
        for name, (served, why) in _SERVED.items()
        if (asked := getattr(model.config, name, served)) != served
    ]
    if not model.parallel_output and model.tp_group.size() > 1:
        takers.append("parallel_output = False: there are no logits to gather")
    return takers


def _log_group() -> torch.distributed.ProcessGroup:
    """The ranks over which Megatron's log averages MTP's losses."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def keep_log_group() -> None:
    """Name the ranks of MTP's log again after a step that was replayed from a CUDA graph.

    Megatron forgets them whenever it logs, and only the forward pass in Python names them.
    """
    if "loss_values" in MTPLossLoggingHelper.tracker:
        MTPLossLoggingHelper.tracker["avg_group"] = _log_group()


def _check_fusion(config: Any, asked: str) -> None:
    fused = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    if fused and asked != MEGATRON.name:
        raise LossError(
            "cross_entropy_fusion_impl = 'te': its gradients are wrong at times. Take \"native\", "
            f'or name {SURFACE} = "{MEGATRON.name}" in [backends] for Megatron\'s own heads'
        )
