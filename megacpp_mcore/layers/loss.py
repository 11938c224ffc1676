"""The output layer and the losses of a HybridModel (main head and MTP) without full logits.

Megatron computes the logits of every token for the main head and for each MTP depth, and keeps a
float32 softmax of each until the backward pass. Here both heads call the surface
`linear_cross_entropy` with hidden states and the output layer's weight. Loss values, logging and
gradient scaling are Megatron's (`HybridModel.forward`, `process_mtp_loss`,
`VocabParallelCrossEntropy`).

Only the model builder (`training/gpu/model.py`) can install these heads; a stack spec cannot. A
model that Megatron-LM's own pretrain_hybrid.py builds with our `--spec` keeps Megatron's heads, and
is refused when the recipe names another backend.
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

# Field of Megatron's config -> the one supported value, and why no other is supported.
_SERVED = {
    "mtp_report_acceptance": (False, "counting correct predictions needs the logits"),
    "fine_grained_activation_offloading": (
        False,
        "the heads do not support it",
    ),
    "gtp_weight_remat_size": (1, "the output layer's weight would be sharded in another way"),
}


class LossError(MegacppError):
    """A model or a call whose losses cannot be computed without logits."""


@dataclass(frozen=True)
class _Depth:
    """Targets of one MTP depth. labels, mask: [b, s]; tokens: the sum of the mask."""

    labels: Tensor
    mask: Tensor
    tokens: Tensor


class HeadLosses:
    """The losses of one model's heads, through the backend that dispatch chose for it.

    Hidden states are the last layer's output, [s, b, h]; under sequence parallelism s is this
    rank's part of the sequence. Labels, masks, weights and losses are [b, s] for the whole
    sequence; losses are float32, in nats.
    """

    def __init__(self, model: Any, decision: dispatch.Decision) -> None:
        """model: a HybridModel with an output layer, whose config does not need logits."""
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
        """The loss of every token, [b, s]. The backward pass accepts any gradient for it."""
        targets = labels.t().contiguous()
        losses = self._head.per_token(self._for_all_ranks(hidden), weight, targets, **self._options)
        return losses.t().contiguous()

    def total(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """sum(weights * losses), a scalar. Its gradient is computed in the forward pass."""
        if not torch.is_grad_enabled():
            return (self.per_token(hidden, weight, labels) * weights).sum()
        hidden = self._for_all_ranks(hidden)
        weights = _to_loss_dtype(weights.t(), hidden)
        total, _ = self._head.weighted(
            hidden, weight, labels.t().contiguous(), weights, **self._options
        )
        return total

    def with_mtp(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None, training: bool,
    ) -> Tensor:  # fmt: skip
        """Attach the MTP losses, and return the main head's hidden states, [s, b, h].

        hidden: of the main head and then of every depth, [(1 + depths) s, b, h]. The backward pass
        through the result adds MTP's gradients with Megatron's scaling: MTPLossAutoScaler's scale
        and, with calculate_per_token_loss, the ratio of the main head's tokens to the depth's
        tokens, because gradients are finally divided by the main head's tokens. In training, the
        mean loss of each depth goes to Megatron's log.
        """
        depths = self.config.mtp_num_layers
        rows = hidden.shape[0] // (1 + depths)
        hidden, ahead = hidden.split([rows, depths * rows])
        if not (training or torch.is_grad_enabled()):
            return hidden  # the losses would not be used
        if self.config.mtp_detach_heads:
            weight = weight.detach()
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        targets = self._depths(labels, mask, packed_seq_params)
        weights = torch.stack([self._weights(depth, mask) for depth in targets])
        total, losses = self._head.weighted(
            self._for_all_ranks(ahead), weight,
            self._rows(torch.stack([depth.labels for depth in targets])),
            _to_loss_dtype(self._rows(weights), hidden), **self._options,
        )  # fmt: skip
        if training:
            self._log(targets, self._depths_of(losses, depths))
        return MTPLossAutoScaler.apply(hidden, total)

    def _depths(
        self, labels: Tensor, mask: Tensor, packed_seq_params: PackedSeqParams | None
    ) -> list[_Depth]:
        """Labels and mask of each depth: shifted by one more token, within packed documents."""
        depths = []
        options = {"cp_group": self.cp_group, "packed_seq_params": packed_seq_params}
        for _ in range(self.config.mtp_num_layers):
            labels, _ = roll_tensor(labels, **options)
            mask, tokens = roll_tensor(mask, **options)
            depths.append(_Depth(labels, mask, tokens))
        return depths

    def _weights(self, depth: _Depth, mask: Tensor) -> Tensor:
        """Megatron's weights for the depth's losses, [b, s]. mask: the main head's."""
        scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        tokens = depth.tokens.clamp(min=1)
        if self.config.calculate_per_token_loss:
            return scale * depth.mask * (mask.sum() / tokens)
        return scale * depth.mask / tokens

    def _log(self, targets: list[_Depth], losses: Tensor) -> None:
        """Log the mean loss of each depth through Megatron. losses: [depths, b, s].

        Without the patch mtp-acceptance-on-request, Megatron also logs the number of correct
        predictions, which cannot be counted without logits; NaN is logged instead.
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
        """hidden of the whole sequence on every tensor-parallel rank, each of which has a part of
        the vocabulary. The backward pass sums the ranks' gradients."""
        if self.tp_group is None:
            return hidden
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def _rows(self, values: Tensor) -> Tensor:
        """[depths, b, s] -> [depths s, b], in the order of the gathered hidden states: under
        sequence parallelism, all depths of one rank's part come before the next rank's."""
        depths, batch, seq = values.shape
        values = values.transpose(1, 2).reshape(depths, self._parts, -1, batch)
        return values.transpose(0, 1).reshape(depths * seq, batch)

    def _depths_of(self, values: Tensor, depths: int) -> Tensor:
        """[depths s, b] -> [depths, b, s], the inverse of `_rows`."""
        rows, batch = values.shape
        values = values.reshape(self._parts, depths, -1, batch).transpose(0, 1)
        return values.reshape(depths, rows // depths, batch).transpose(1, 2)

    @property
    def _parts(self) -> int:
        gathered = self.tp_group is not None and self.config.sequence_parallel
        return self.tp_group.size() if gathered else 1


def _to_loss_dtype(weights: Tensor, hidden: Tensor) -> Tensor:
    """Loss weights in the dtype of the losses: float32, or float64 for a float64 model."""
    return weights.to(torch.promote_types(hidden.dtype, torch.float32)).contiguous()


_CHOSEN_BY_MODEL = "megacpp_heads_chosen_by_model"


def model_chooses_heads(config: Any) -> None:
    """Mark `config` as that of a model that calls `head_losses` for its heads."""
    setattr(config, _CHOSEN_BY_MODEL, True)


def check_requested_heads(config: Any) -> None:
    """Raise LossError if the recipe names a backend for the heads of Megatron's own HybridModel,
    which cannot use it; else record that the model has Megatron's heads."""
    if getattr(config, _CHOSEN_BY_MODEL, False):
        return
    asked = dispatch.requested(SURFACE, plugin_settings(config).backends)
    if asked not in (dispatch.AUTO, MEGATRON.name):
        raise LossError(
            f'{SURFACE} = "{asked}" is asked for, but this is Megatron\'s own HybridModel, whose '
            f'heads a stack spec cannot change. Set "{MEGATRON.name}" or remove the key, or train '
            "with `megacpp train` or `python -m megacpp_mcore.pretrain`, whose model supports it"
        )
    _record_megatrons(asked, "Megatron's own model class has its own heads")


def _record_megatrons(asked: str, reason: str) -> None:
    """Record that the model has Megatron's own heads, which dispatch did not choose."""
    decision = dispatch.Decision(SURFACE, asked, MEGATRON.name, reason, MEGATRON.implementation)
    dispatch.record(decision)


def head_losses(model: Any) -> HeadLosses | None:
    """The heads that dispatch chooses for `model`, a HybridModel; None for Megatron's own heads.

    Megatron's own heads are also the choice of `auto` when the config needs logits. Raises
    DispatchError, and LossError when a backend is named that does not support the config.
    """
    config = model.config
    backends = plugin_settings(config).backends
    asked = dispatch.requested(SURFACE, backends)
    _check_fusion(config, asked)
    needs = _needs_logits(model)
    if needs and asked == dispatch.AUTO:
        _record_megatrons(asked, "; ".join(needs))
        return None
    workload = linear_cross_entropy.workload(current_device(), config, model.vocab_size)
    decision = dispatch.decide(SURFACE, workload, backends)
    if decision.observed == MEGATRON.name:
        return None
    if needs:
        raise LossError(
            f"the losses cannot be computed without logits: {'; '.join(needs)}. Change that, or "
            f'set {SURFACE} = "{MEGATRON.name}" in [backends] for Megatron\'s own heads'
        )
    return HeadLosses(model, decision)


def _needs_logits(model: Any) -> list[str]:
    """Settings of the model that need logits, each with the reason."""
    needs = [
        f"{name} = {asked!r}: {why}"
        for name, (served, why) in _SERVED.items()
        if (asked := getattr(model.config, name, served)) != served
    ]
    if not model.parallel_output and model.tp_group.size() > 1:
        needs.append("parallel_output = False: there are no logits to gather")
    return needs


def _log_group() -> torch.distributed.ProcessGroup:
    """The ranks over which Megatron's log averages MTP's losses."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def keep_log_group() -> None:
    """Set the ranks of MTP's log again after a step that was replayed from a CUDA graph.

    Megatron resets them whenever it logs, and only the forward pass in Python sets them.
    """
    if "loss_values" in MTPLossLoggingHelper.tracker:
        MTPLossLoggingHelper.tracker["avg_group"] = _log_group()


def _check_fusion(config: Any, asked: str) -> None:
    fused = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    if fused and asked != MEGATRON.name:
        raise LossError(
            "cross_entropy_fusion_impl = 'te': its gradients are wrong in some cases. Set it to "
            f'"native", or set {SURFACE} = "{MEGATRON.name}" in [backends] to use it all the same'
        )
