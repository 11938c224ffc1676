"""The R block: M2RNN as the token mixer of a Megatron TransformerLayer.

    q, k, v, g, x_f = in_proj(x)              q and k: one head, shared by all H heads of v
    q, k, v = silu(causal_conv(q, k, v))      depthwise
    f   = exp(-exp(A_log) * softplus(x_f + dt_bias))
    y   = m2rnn(q, k, v, W, f)                math: megacpp_mcore.kernels.m2rnn
    out = out_proj(RMSNorm((y + D * v) * silu(g)))

The norm runs over all H * V channels, as in the M2RNN authors' models.

Tensor parallelism: v, g, x_f and every per-head parameter are split by head. The shared q and k are
split by channel through the projection and the (depthwise) convolution, and all-gathered after it;
their gradients are summed over the heads of all ranks. No parameter is replicated. Under sequence
parallelism no gradient needs a reduction either, because each rank sees the whole sequence between
in_proj's all-gather and out_proj's reduce-scatter. The norm's sum of squares is reduced over ranks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import deprecate_inference_params
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.hybrid.block_settings import M2RNNSettings
from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout, M2RNNMixerError
from megacpp_mcore.kernels.documents import bounds_to_end, positions
from megacpp_mcore.kernels.m2rnn import m2rnn_step
from megacpp_mcore.kernels.m2rnn_core.prep import conv_and_decay, gated_norm
from megacpp_mcore.layers.documents import document_offsets
from megacpp_mcore.layers.inference_state import check_context, entry_of
from megacpp_mcore.layers.mixer import MixerSubmodules, RecurrentMixer
from megacpp_mcore.layers.settings import PluginSettings, plugin_settings
from megacpp_mcore.surfaces import m2rnn as m2rnn_surface
from megacpp_mcore.surfaces import m2rnn_core as m2rnn_core_surface
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.workload import current_device

_FP32_PARAMETERS = ("W", "A_log", "dt_bias", "D")
_A_RANGE = (1.0, 16.0)  # exp(A_log) is initialised uniformly in it, as in Mamba-2


class M2RNNState(NamedTuple):
    """What `M2RNNMixer.step` carries from one token to the next, for the heads of this rank.

    conv: (conv_kernel - 1, B, channels), the last inputs of the convolution, in the model's dtype.
    recurrent: (B, H, K, V), float32 (float64 in a float64 model).
    """

    conv: Tensor
    recurrent: Tensor

    batch_dims = (1, 0)  # where rows are joined


class M2RNNMixer(RecurrentMixer):
    """M2RNN with the constructor and forward of a TransformerLayer's `self_attention`.

    settings: None takes those of the recipe (`layers.settings.plugin_settings`), including its
    backends. cp_comm_type: passed by TransformerLayer; context parallelism itself is refused.

    W, A_log, dt_bias and D stay float32 when the model is cast to bf16 or fp16. Every rank draws
    the initial values of all heads and keeps its slice, so that initialisation does not depend on
    tensor parallelism. Raises M2RNNMixerError for unsupported sizes or parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        settings: M2RNNSettings | None = None,
        cp_comm_type: str | None = None,
        name: str | None = None,
    ) -> None:
        plugin = plugin_settings(config) if settings is None else PluginSettings(m2rnn=settings)
        super().__init__(config, pg_collection, plugin.recompute.m2rnn)
        self.layer_number = layer_number
        self.settings = settings = plugin.m2rnn
        self.layout = layout = M2RNNLayout.of(config, settings, self.tp_group.size())
        self._add_parameters()  # before in_proj, which draws a number of values that depends on tp
        self._add_in_proj(
            submodules.in_proj, config.hidden_size, layout.in_proj, name, layout.padding
        )
        self._add_out_proj(submodules.out_proj, layout.channels, config.hidden_size, name)
        self.fp32_params = _FP32_PARAMETERS
        self.sections |= {"conv1d_weight": layout.conv, "conv1d_bias": layout.conv}
        self._choose_backends(plugin)

    def _add_parameters(self) -> None:
        """Draw every parameter in full, the same on every rank, and keep this rank's slice."""
        s, dtype = self.settings, self.config.params_dtype
        heads, channels = self.layout.heads, self.layout.channels
        conv_sizes = [s.k_head_dim, s.k_head_dim, channels]
        bound = s.conv_kernel**-0.5  # torch's default for a depthwise Conv1d
        conv_weight = torch.empty(sum(conv_sizes), 1, s.conv_kernel).uniform_(-bound, bound)
        conv_bias = torch.empty(sum(conv_sizes)).uniform_(-bound, bound)
        low, high = math.log(s.dt_min), math.log(s.dt_max)
        dt = torch.empty(heads).uniform_(low, high).exp().clamp(min=s.dt_init_floor)
        self.conv1d_weight = self._shard(conv_weight.to(dtype), conv_sizes)
        self.conv1d_bias = self._shard(conv_bias.to(dtype), conv_sizes)
        self.W = self._shard(torch.eye(s.v_head_dim).repeat(heads, 1, 1))
        self.A_log = self._shard(torch.empty(heads).uniform_(*_A_RANGE).log())
        self.dt_bias = self._shard(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        # One value per channel. One-dimensional, so that Megatron exempts it from weight decay.
        self.D = self._shard(torch.ones(channels))
        self.norm_weight = self._shard(torch.ones(channels, dtype=dtype))

    def _shard(self, whole: Tensor, sections: Sequence[int] | None = None) -> torch.nn.Parameter:
        """This rank's slice of each section of `whole` along dim 0, marked as tensor-parallel."""
        parts = whole.split(sections or [whole.shape[0]])
        local = [part.chunk(self.layout.tp)[self.tp_group.rank()] for part in parts]
        on_cpu = self.config.use_cpu_initialization or not torch.cuda.is_available()
        device = "cpu" if on_cpu else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.cat(local).to(device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        if sections:
            parameter.partition_sizes = [part.shape[0] for part in local]
        return parameter

    def _choose_backends(self, plugin: PluginSettings) -> None:
        """One operator between the projections, or else plain torch around the recurrence."""
        device, requests = current_device(), plugin.backends
        sizes = self.config, self.layout, self.settings
        workload = m2rnn_core_surface.workload(device, *sizes, requests)
        core = dispatch.decide("m2rnn_core", workload, requests)
        self.fused = None if core.observed == REFERENCE else core.load()
        workload = m2rnn_surface.workload(device, *sizes)
        # The fused operator has the first backend inside; inference needs its state.
        self.m2rnn = dispatch.decide("m2rnn", workload, requests).load()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context=None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: Tensor | None = None,
        *,
        inference_params=None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] -> (output [s, b, h], bias | None).

        Under sequence parallelism s is the rank's part. The mask and the rotary embedding are
        ignored: the recurrence is causal and has no positions.

        packed_seq_params: THD documents packed into one row (b = 1); state and convolution are
        reset at the start of each document. Tokens after the last document form one more.
        inference_context: static batching only; it keeps the state between calls. Raises
        InferenceStateError for dynamic batching and for packed documents at inference, and
        M2RNNMixerError for another packed format and an attention bias.
        """
        context = deprecate_inference_params(inference_context, inference_params)
        if attention_bias is not None:
            raise M2RNNMixerError("M2RNN has no scores to add attention_bias to; pass None")
        if context is not None:
            return self._infer(hidden_states, context, packed_seq_params)
        return self._maybe_recompute("mixer", self._mixer, hidden_states, packed_seq_params)

    def _mixer(
        self, hidden_states: Tensor, packed_seq_params: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor | None]:
        projected, _ = self.in_proj(hidden_states)
        bounds = _documents(packed_seq_params, projected)
        return self.out_proj(self._maybe_recompute("core", self._core, projected, bounds))

    def _core(self, projected: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """`_mix` from a zero state, without the final state."""
        if self.fused is not None:
            return self._fused(projected, cu_seqlens)
        return self._mix(projected, cu_seqlens=cu_seqlens)[0]

    def _fused(self, projected: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        layout, settings = self.layout, self.settings
        return self.fused(
            projected, self.conv1d_weight, self.conv1d_bias, self.A_log, self.dt_bias, self.W,
            self.D, self.norm_weight, heads=layout.local_heads, k_dim=layout.k_dim,
            v_dim=layout.v_dim, eps=self.config.layernorm_epsilon, chunk_size=settings.chunk_size,
            grad_clamp=settings.grad_clamp, tanh=settings.tanh, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def _infer(
        self, hidden_states: Tensor, context, packed_seq_params: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor | None]:
        """`step` from the state that the static inference context keeps for this layer."""
        check_context(context, packed_seq_params)
        state = entry_of(context, self.layer_number) or self.zero_state(hidden_states.shape[1])
        *out, context.key_value_memory_dict[self.layer_number] = self.step(hidden_states, state)
        return tuple(out)

    def zero_state(self, batch: int) -> M2RNNState:
        """The state before the first token."""
        layout, weight = self.layout, self.conv1d_weight
        return M2RNNState(
            weight.new_zeros(weight.shape[-1] - 1, batch, weight.shape[0]),
            self.W.new_zeros(batch, layout.local_heads, layout.k_dim, layout.v_dim),
        )

    def step(
        self, hidden_states: Tensor, state: M2RNNState
    ) -> tuple[Tensor, Tensor | None, M2RNNState]:
        """Process the next tokens of a sequence, [s, b, h]: s = 1 decodes, s > 1 prefills.

        Returns what `forward` returns, and the new state; `state` is not modified. Raises
        M2RNNMixerError under sequence parallelism, which splits the tokens over ranks.
        """
        if self.config.sequence_parallel:
            raise M2RNNMixerError(
                "sequence_parallel splits the tokens over ranks, but the M2RNN mixer's step needs "
                "all of them; set it to false for inference"
            )
        projected, _ = self.in_proj(hidden_states)
        mixed, recurrent = self._mix(projected, state)
        inputs = projected[..., : state.conv.shape[-1]]
        conv = torch.cat((state.conv.to(inputs.dtype), inputs))[inputs.shape[0] :]
        return *self.out_proj(mixed), M2RNNState(conv, recurrent)

    def _mix(
        self, projected: Tensor, state: M2RNNState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Everything between the projections: [s, b, in_proj rows] -> [s, b, heads * V].

        Also returns the recurrence's final state.
        """
        parts = [*self.layout.in_proj.values(), self.layout.padding]
        *qkv, gate, x_f, _ = projected.split(parts, dim=-1)
        mixed, f = conv_and_decay(
            *qkv, x_f, self.conv1d_weight, self.conv1d_bias, self.A_log, self.dt_bias,
            history=None if state is None else state.conv,
            offset=_offsets_in_document(cu_seqlens, projected),
        )  # fmt: skip
        q, k, v = self._heads(mixed)
        if state is not None and v.shape[1] == 1:
            token = (x.squeeze(1) for x in (q, k, v))
            y, recurrent = m2rnn_step(*token, self.W, f.squeeze(1), state.recurrent)
            y = y.unsqueeze(1)
        else:
            y, recurrent = self.m2rnn(
                q, k, v, self.W, f,
                initial_state=None if state is None else state.recurrent,
                cu_seqlens=cu_seqlens,
                chunk_size=self.settings.chunk_size,
                grad_clamp=self.settings.grad_clamp,
                tanh=self.settings.tanh,
            )  # fmt: skip
        out = gated_norm(
            y, v, gate, self.D, self.norm_weight,
            channels=self.layout.channels, eps=self.config.layernorm_epsilon,
            over_ranks=self._over_ranks if self.layout.tp > 1 else None,
        )  # fmt: skip
        return out, recurrent

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, channels] -> q, k (b, s, 1, K), whole on every rank, and v (b, s, heads, V)."""
        share = self.layout.conv["query"]
        qk, v = qkv.split((2 * share, qkv.shape[-1] - 2 * share), dim=-1)
        qk = all_gather_last_dim_from_tensor_parallel_region(qk, group=self.tp_group)
        # Each rank's q, k -> all of q, all of k
        qk = qk.unflatten(-1, (-1, 2, share)).transpose(-3, -2).flatten(-2).transpose(0, 1)
        q, k = qk.split(1, dim=2)
        return q, k, v.unflatten(-1, (-1, self.layout.v_dim)).transpose(0, 1)

    def _over_ranks(self, squares: Tensor) -> Tensor:
        """Sum over ranks. Each rank uses the sum, so its gradient is summed over ranks, too."""
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(squares, group=self.tp_group)


def _documents(packed: PackedSeqParams | None, projected: Tensor) -> Tensor | None:
    """Offsets of the packed documents, ending at the last token; None for whole rows.

    Raises M2RNNMixerError for another format than thd with cu_seqlens_q and batch 1.
    """
    if packed is None:
        return None
    tokens, batch, _ = projected.shape
    offsets = document_offsets(packed)
    if batch != 1:
        raise M2RNNMixerError(f"packed_seq_params at batch {batch}; the M2RNN mixer takes batch 1")
    return bounds_to_end(offsets, tokens)


def _offsets_in_document(cu_seqlens: Tensor | None, projected: Tensor) -> Tensor | None:
    """(t, 1, 1): each token's position in its document."""
    if cu_seqlens is None:
        return None
    return positions(projected.shape[0], cu_seqlens).view(-1, 1, 1)
