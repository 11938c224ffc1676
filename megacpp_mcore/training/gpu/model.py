"""The model of a run: Megatron's HybridModel, config and builder with our stack and losses."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.layers.embedding import choose_embedding
from megacpp_mcore.layers.hybrid_stack import MegacppStack, StackSpec
from megacpp_mcore.layers.loss import LossError, head_losses, model_chooses_heads
from megacpp_mcore.layers.param_gather import wait_for_param_gather
from megacpp_mcore.layers.settings import attach, settings_of
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges


class StackSpecError(MegacppError):
    """The model would be built from another stack spec than the recipe's."""


class MegacppHybridModel(HybridModel):
    """Megatron's HybridModel, whose losses are computed without full logits.

    The backends of the embedding and of the heads are chosen when the model is built; with
    `megatron` the heads' forward pass is Megatron's own. Raises DispatchError and LossError as
    `choose_embedding` and `head_losses`.
    """

    def __init__(self, **arguments: Any) -> None:
        model_chooses_heads(arguments["config"])
        with bridges.fused_accumulation_without_apex():
            super().__init__(**arguments)
        bridges.unfused_where_apex_is_needed(self)
        choose_embedding(self)
        self.heads = head_losses(self) if self.post_process else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None,
        decoder_input: Tensor | None = None, labels: Tensor | None = None,
        inference_context: Any = None, runtime_gather_output: bool | None = None, *,
        loss_mask: Tensor | None = None, packed_seq_params: PackedSeqParams | None = None,
        loss_weights: Tensor | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        """As Megatron's: hidden states on a stage without a head, logits [b, s, V] without labels,
        and with labels [b, s] the losses of the tokens [b, s].

        loss_weights: [b, s], for a call with labels: the result is then the scalar
        sum(loss_weights * losses), and the head's gradients are computed in the forward pass. For
        per-token losses the backward pass recomputes the logits.
        """
        inputs = {
            "input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask,
            "decoder_input": decoder_input, "inference_context": inference_context,
            "packed_seq_params": packed_seq_params, **more,
        }  # fmt: skip
        if loss_weights is not None and labels is not None and loss_weights.shape != labels.shape:
            raise LossError(
                f"loss_weights {tuple(loss_weights.shape)} for labels {tuple(labels.shape)}: the "
                "shapes must be equal"
            )
        if self.heads is None or labels is None or InferenceMode.is_active():
            output = super().forward(
                **inputs, labels=labels, runtime_gather_output=runtime_gather_output,
                loss_mask=loss_mask,
            )  # fmt: skip
            if labels is None or loss_weights is None or not self.post_process:
                return output
            return (output * loss_weights).sum()
        if runtime_gather_output:
            raise LossError("runtime_gather_output with labels: there are no logits to gather")
        hidden, weight = self._hidden_states(inputs), self._output_weight()
        if self.config.mtp_num_layers is not None and self.mtp_process:
            hidden = self.heads.with_mtp(
                hidden, weight, labels, loss_mask, packed_seq_params, self.training
            )
        if loss_weights is None:
            return self.heads.per_token(hidden, weight, labels)
        return self.heads.total(hidden, weight, labels, loss_weights)

    def next_token_logits(
        self, input_ids: Tensor, inference_context: Any = None, last_only: bool = False
    ) -> Tensor:
        """Logits of the token after each of input_ids [b, s]: [b, s, V], or with last_only of the
        last one alone, [b, 1, V]. MTP's depths do not run.

        inference_context: static; the tokens then follow those that it has states of, and the
        caller advances it. Without one, a whole forward pass.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        inputs = {
            "input_ids": input_ids, "position_ids": positions, "attention_mask": None,
            "inference_context": inference_context,
        }  # fmt: skip
        mtp, self.mtp_process = self.mtp_process, False
        try:
            hidden = self._hidden_states(inputs)
        finally:
            self.mtp_process = mtp
        weight = self._output_weight(is_called=True)
        logits, _ = self.output_layer(hidden[-1:] if last_only else hidden, weight=weight)
        return self._scale_logits(logits).transpose(0, 1)

    def _hidden_states(self, inputs: dict[str, Any]) -> Tensor:
        """Hidden states before the output layer, [s, b, h], followed by those of the MTP depths."""
        self.post_process = False  # as on a stage without a head, which returns hidden states
        try:
            return super().forward(**inputs)
        finally:
            self.post_process = True

    def _output_weight(self, is_called: bool = False) -> Tensor:
        """is_called: the layer is called with it."""
        layer = wait_for_param_gather(self.output_layer, is_called)
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return layer.weight


@dataclass(kw_only=True)
class MegacppModelConfig(HybridModelConfig):
    """Megatron's HybridModelConfig with our builder."""

    builder: ClassVar[str] = "megacpp_mcore.training.gpu.model.MegacppModelBuilder"


class YardstickBuilder(HybridModelBuilder):
    """Megatron's own builder and model; Transformer Engine fuses gradient accumulation without
    apex, as in ours."""

    def build_model(self, *args: Any, **kwargs: Any) -> HybridModel:
        with bridges.fused_accumulation_without_apex():
            model = super().build_model(*args, **kwargs)
        bridges.unfused_where_apex_is_needed(model)
        return model


@dataclass(kw_only=True)
class YardstickModelConfig(HybridModelConfig):
    """Megatron's HybridModelConfig with the yardstick's builder."""

    builder: ClassVar[str] = "megacpp_mcore.training.gpu.model.YardstickBuilder"


def model_config(
    args: Namespace, recipe: Recipe, config_class: type[HybridModelConfig] = MegacppModelConfig
) -> HybridModelConfig:
    """Megatron's config of the model, which carries the recipe to the layers.

    args: Megatron's validated arguments. The plugin's settings are attached to the config's
    TransformerConfig, and the spec that `--spec` names is made for the recipe's backends. Raises
    DispatchError when a named backend cannot serve, SpecError when the spec cannot be imported.
    """
    config = hybrid_config_from_args(args, model_config_cls=config_class)
    # Megatron synchronises the device after each exchange of pipeline stages, and no argument turns
    # it off. It was for a race of `batch_isend_irecv` that torch fixed in 2022 (pytorch #82450).
    config.transformer.batch_p2p_sync = False
    settings = settings_of(recipe)
    attach(config.transformer, settings)
    if isinstance(config.hybrid_stack_spec, StackSpec):
        config.hybrid_stack_spec = config.hybrid_stack_spec.of(settings.backends)
    return config


class MegacppModelBuilder(HybridModelBuilder):
    """Megatron's builder with our model.

    Megatron's builder has a fixed model class, and silently falls back to its default spec if the
    recipe's cannot be imported.
    """

    def build_model(
        self, pg_collection: ProcessGroupCollection, pre_process: bool | None = None,
        post_process: bool | None = None, vp_stage: int | None = None,
    ) -> MegacppHybridModel:  # fmt: skip
        """One stage of the model. Raises StackSpecError when the spec's stack is not ours."""
        config = self._model_config
        _check_stack(config.hybrid_stack_spec)
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size,
                config.make_vocab_size_divisible_by,
                config.transformer.tensor_model_parallel_size,
            )
        if pre_process is None:
            pre_process = is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_pp_last_stage(pg_collection.pp)
        as_configured = (
            "hybrid_stack_spec", "hybrid_layer_pattern", "fp16_lm_cross_entropy", "parallel_output",
            "share_embeddings_and_output_weights", "position_embedding_type", "rotary_percent",
            "rotary_base", "seq_len_interpolation_factor",
        )  # fmt: skip
        return MegacppHybridModel(
            config=config.transformer,
            vocab_size=vocab_size,
            max_sequence_length=config.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **{name: getattr(config, name) for name in as_configured},
        )


def _check_stack(spec: Any) -> None:
    if spec is None or not issubclass(spec.module, MegacppStack):
        found = "none" if spec is None else spec.module.__name__
        raise StackSpecError(
            f"the stack spec is {found}, not one of megacpp_mcore.specs.nam56r: Megatron ignores "
            "a --spec that fails to import; try `python -c 'import megacpp_mcore.specs.nam56r'`"
        )
