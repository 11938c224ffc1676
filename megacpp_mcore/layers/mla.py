"""The A block as MLA: Megatron's module, with one dispatched operator between its projections and
its core attention, or where `mla_up` is named one between its latents and its core attention.

Modules, parameters and checkpoint keys are Megatron's. Training with the mla_rope backend
`megatron` uses Megatron's own path entirely. Inference with a static context keeps latents, of
kv_lora_rank + qk_pos_emb_head_dim values a token, where Megatron keeps every head's key and value.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention as upstream
from megatron.core.transformer.experimental_attention_variant import absorbed_mla as absorbed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import deprecate_inference_params
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mla_rope import RotaryTable
from megacpp_mcore.kernels.mla_rope.reference import rotate
from megacpp_mcore.layers import mla_down, mla_up
from megacpp_mcore.layers.documents import document_offsets
from megacpp_mcore.layers.inference_state import Rows, attend, check_context, rotate_at
from megacpp_mcore.layers.param_gather import needs_no_call, wait_for_param_gather
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import mla_rope
from megacpp_mcore.surfaces.support import TE
from megacpp_mcore.surfaces.workload import current_device


class MLAError(MegacppError):
    """A config or a layout that MLA does not support."""


class _DispatchedMLA(upstream.MLASelfAttention):
    """The overrides that both classes below share.

    As upstream's, it takes hidden states [s, b, h], or [t, 1, h] with packed documents, any LoRA
    rank of q and kv (q_lora_rank None included), and Transformer Engine's or Megatron's linears.
    Raises MLAError for rotary_interleaved and for packed layouts other than thd, DispatchError when
    no backend of mla_rope or the named one of mla_up supports the config, and MLAUpError.
    """

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        self._average_q_norm()
        if config.rotary_interleaved:
            raise MLAError(
                "rotary_interleaved with MLA: Megatron gives the two elements of a pair the angles "
                "of different pairs, which is not a rotation; set it to false (MLA's own "
                "interleaving of the checkpoint is always on)"
            )
        workload = mla_rope.workload(current_device(), config)
        decision = dispatch.decide("mla_rope", workload, plugin_settings(config).backends)
        is_megatrons = decision.observed == mla_rope.MEGATRON.name
        self._rope = None if is_megatrons else decision.load()
        self._up = mla_up.decided(self)
        self._table: RotaryTable | None = None

    @property
    def _is_upstreams(self) -> bool:
        """Whether everything between the projections and the core attention is Megatron's own."""
        return self._rope is None and self._up is None

    def _average_q_norm(self) -> None:
        """Megatron sums the gradient of any weight called q_layernorm over the tensor-parallel
        ranks, as that of a norm of each rank's heads. Ours is of the latent: without sequence
        parallelism every rank has the whole gradient, and the mean is that again."""
        if not self.config.sequence_parallel and self.config.q_lora_rank is not None:
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def _resolve_qk_norm_config(self, submodules):
        """Drop Q/KV norms that the spec names but the config does not use.

        With `qk_layernorm`, upstream fuses the norms into TE's up-projections; a spec with other
        linears must name norm modules, which upstream refuses without `qk_layernorm`. A spec is
        made before the config is known, so ours always names them.
        """
        if not self.config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=IdentityOp, kv_layernorm=IdentityOp)
        return super()._resolve_qk_norm_config(submodules)

    def forward(
        self, hidden_states, attention_mask, key_value_states=None, inference_context=None,
        *args, inference_params=None, packed_seq_params=None, **kwargs,
    ):  # fmt: skip
        """As upstream's, with a cache of latents under a static inference context."""
        context = deprecate_inference_params(inference_context, inference_params)
        if context is None or not context.is_static_batching():
            return super().forward(
                hidden_states, attention_mask, key_value_states, context, *args,
                packed_seq_params=packed_seq_params, **kwargs,
            )  # fmt: skip
        check_context(context, packed_seq_params)
        return self._infer(hidden_states, context)

    def _infer(self, hidden_states: Tensor, context) -> tuple[Tensor, Tensor | None]:
        """Attention of the next tokens, [s, b, h], to all that the context has latents of.

        The heads' keys and values are never made: a head's query times its key is the query times
        the key's up-projection, times the latent (DeepSeek-V2, 2.1.2), and likewise the output.
        """
        up = self.linear_kv_up_proj
        if self.tp_group.size() > 1 or hasattr(up, "layer_norm_weight"):
            raise MLAError(
                "inference with a cache of latents takes one tensor-parallel rank, and linears "
                'without a norm inside: set tensor_model_parallel_size = 1 and norm = "reference" '
                "in [backends]"
            )
        q_latent, kv_latent, k_pos = self._latents(hidden_states)
        if self.config.q_lora_rank is not None:
            q_latent = apply_module(self.q_layernorm)(q_latent)
        kv_latent = apply_module(self.kv_layernorm)(kv_latent)
        tokens, batch = hidden_states.shape[:2]
        rows = Rows(context, tokens, batch, hidden_states.device)
        angles = rotate_at(self._rotary_table(rows.capacity, k_pos.device), rows.positions)
        k_pos = rotate(k_pos.unsqueeze(2), *angles, interleaved=True).squeeze(2)
        cache = rows.store(self.layer_number, k_pos.transpose(0, 1), kv_latent.transpose(0, 1))

        compressed = self.config.q_lora_rank is not None
        q, _ = (self.linear_q_up_proj if compressed else self.linear_q_proj)(q_latent)
        heads, plain = self.num_attention_heads_per_partition, self.config.qk_head_dim
        q = q.unflatten(-1, (heads, -1))
        q_plain, q_pos = q.split([plain, q.shape[-1] - plain], dim=-1)
        q_pos = rotate(q_pos, *angles, interleaved=True)
        wide = torch.promote_types(q.dtype, torch.float32)
        weight = up.weight.to(wide).unflatten(0, (heads, -1))  # (heads, plain + v, rank)
        to_keys, to_values = weight[:, :plain], weight[:, plain:]
        q_plain = torch.einsum("sbhd,hdr->sbhr", q_plain.to(wide), to_keys)
        q = torch.cat((q_plain, q_pos.to(wide)), dim=-1).permute(1, 2, 0, 3).unsqueeze(1)
        k = torch.cat((cache.values, cache.keys), dim=-1).unsqueeze(1)
        y = attend(
            q, k, cache.values.unsqueeze(1), rows.positions, scale=self.softmax_scale
        ).squeeze(1)  # fmt: skip
        y = torch.einsum("bhsr,hvr->sbhv", y, to_values).flatten(2)
        return apply_module(self.linear_proj)(y.to(hidden_states.dtype))

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, position_ids=None, packed_seq_params=None,
        inference_context=None, *, inference_params=None,
    ):  # fmt: skip
        """q, k, v [s, b, heads, dims], and the latents of q and kv; [t, heads, dims] when packed.

        Positions restart at zero in every document of packed_seq_params. (Upstream does not restart
        them when max_seqlen_q equals the length of the row.)
        """
        if self._is_upstreams or inference_context is not None or inference_params is not None:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params,
                inference_context, inference_params=inference_params,
            )  # fmt: skip
        bounds = document_offsets(packed_seq_params)
        q_latent, kv_latent, k_pos = self._latents(hidden_states)
        if bounds is not None:
            q_latent, kv_latent, k_pos = (x.squeeze(1) for x in (q_latent, kv_latent, k_pos))
        if self.config.q_lora_rank is not None:
            q_latent = apply_module(self.q_layernorm)(q_latent)
        kv_latent = apply_module(self.kv_layernorm)(kv_latent)
        rotary = self._rotary_table(k_pos.shape[0], k_pos.device)

        def heads(q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor) -> tuple[Tensor, ...]:
            return self._heads(q_latent, kv_latent, k_pos, rotary, bounds)

        if self.recompute_up_proj:
            quantized = self.config.fp8 or self.config.fp4
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=quantized)
            q, k, v = self.qkv_up_checkpoint.checkpoint(heads, q_latent, kv_latent, k_pos)
        else:
            q, k, v = heads(q_latent, kv_latent, k_pos)
        return q, k, v, q_latent, kv_latent

    def _latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of q and kv, and k_pos.

        Under sequence parallelism the latents are of this rank's tokens, k_pos is of all tokens.
        The heads of every rank use the rotated k_pos, so its gradient is summed over the ranks.
        """
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        q_latent, kv = self._qkv_down_projection(hidden_states)
        is_split = kv.size(-1) != sum(sizes)
        if is_split:
            kv = gather_from_tensor_model_parallel_region(kv, group=self.tp_group)
        kv_latent, k_pos = kv.split(sizes, dim=-1)
        if is_split and self.config.sequence_parallel:
            kv_latent = scatter_to_sequence_parallel_region(kv_latent, group=self.tp_group)
        if self.tp_group.size() > 1:
            if self.config.sequence_parallel and not is_split:
                k_pos = gather_from_sequence_parallel_region(k_pos, group=self.tp_group)
            else:
                k_pos = copy_to_tensor_model_parallel_region(k_pos, group=self.tp_group)
        return q_latent, kv_latent, k_pos

    def _heads(
        self, q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, rotary: RotaryTable,
        bounds: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """q, k and v of this rank's heads."""
        if self._up is not None:
            return mla_up.apply(self._up, self, q_latent, kv_latent, k_pos, rotary, bounds)
        compressed = self.config.q_lora_rank is not None
        linear_q = self.linear_q_up_proj if compressed else self.linear_q_proj
        q, _ = linear_q(q_latent)
        kv, _ = self.linear_kv_up_proj(kv_latent)
        q, kv = (x.unflatten(-1, (self.num_attention_heads_per_partition, -1)) for x in (q, kv))
        assert self._rope is not None
        # What is recomputed is freed between the passes, and q's memory with it. Hooks may keep q,
        # as its linear returns it, or its gradient, as the attention does.
        kept = linear_q._forward_hooks or not needs_no_call(self.core_attention)
        return self._rope(
            q, kv, k_pos, rotary, qk_head_dim=self.config.qk_head_dim, cu_seqlens=bounds,
            in_place=self.training and not (self.recompute_up_proj or kept),
        )  # fmt: skip

    def _rotary_table(self, tokens: int, device) -> RotaryTable:
        """The table of angles, cached; it grows to the longest row seen."""
        if self._table is None or self._table.cos.shape[0] < tokens:
            result = self.rotary_pos_emb.get_emb(tokens)
            # [tokens, 1, 1, 2 * pairs] with each angle twice; YaRN also returns its mscale
            emb, mscale = result if isinstance(result, tuple) else (result, 1.0)
            angles = emb[:, 0, 0, : emb.shape[-1] // 2]
            self._table = RotaryTable.of(angles.to(device), mscale)
        return self._table

    def _run_core_attention(
        self, query, key, value, attention_mask, packed_seq_params=None, attn_mask_type=None,
        **extra,
    ):  # fmt: skip
        """As upstream's, but v is not padded for packed documents if the core needs no padding."""
        if not getattr(self.core_attention, "takes_narrow_v", False):
            return super()._run_core_attention(
                query, key, value, attention_mask, packed_seq_params, attn_mask_type, **extra
            )
        return self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params,
            attn_mask_type=attn_mask_type or self.attn_mask_type, **extra,
        )  # fmt: skip


class MLASelfAttention(_DispatchedMLA):
    """Megatron's MLASelfAttention with a dispatched `mla_rope`, and the down projections of q and
    kv in one product where they are plain linears."""

    def _qkv_down_projection(self, hidden_states):
        config = self.config
        if not self._is_upstreams and config.q_lora_rank is not None:
            linears = self.linear_q_down_proj, self.linear_kv_down_proj
            rows = config.q_lora_rank + config.kv_lora_rank + config.qk_pos_emb_head_dim
            if mla_down.can_be_one(config, *linears, rows):
                return mla_down.one_product(*linears, hidden_states)
        return super()._qkv_down_projection(hidden_states)


class FusedMLASelfAttention(_DispatchedMLA, upstream.FusedMLASelfAttention):
    """The same with the down projections of q and kv in one GEMM (mla_down_proj_fusion)."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Upstream saves the fused GEMM's extra state under both old names, and loads neither."""
        extra = [state_dict.pop(f"{prefix}linear_{x}_down_proj._extra_state", None)
                 for x in ("q", "kv")]  # fmt: skip
        state_dict.setdefault(f"{prefix}linear_qkv_down_proj._extra_state", extra[0])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class MLALayer(TransformerLayer):
    """The layer around MLA; it replaces Megatron's fused attention class with ours.

    With mla_down_proj_fusion, HybridStack puts Megatron's own class into the spec, and it builds
    MTP's layers itself, so the replacement happens here. Raises MLAError for a named backend that
    the fused layer cannot use.
    """

    def __init__(self, config, submodules, *args, **kwargs) -> None:
        attention = submodules.self_attention
        if attention.module is upstream.FusedMLASelfAttention:
            _check_fused(plugin_settings(config).backends)
            attention = replace(attention, module=FusedMLASelfAttention)
            submodules = replace(submodules, self_attention=attention)
        super().__init__(config, submodules, *args, **kwargs)


class AbsorbedMLASelfAttention(absorbed.AbsorbedMLASelfAttention):
    """Megatron's attention of DSA layers, whose heads share one latent key.

    Raises MLAError for Megatron's own linears: DSA's indexer cannot be built from them, and over
    tensor-parallel ranks the rotary part of the shared key would get one rank's gradient only.
    """

    def __init__(self, config, submodules, *args, **kwargs) -> None:
        if submodules.linear_kv_down_proj is ColumnParallelLinear:
            raise MLAError(
                "a DSA layer with Megatron's own linears: its indexer takes Transformer Engine's "
                f'only; train on cuda with linear = "{TE}", or choose another attention.kind'
            )
        super().__init__(config, submodules, *args, **kwargs)

    def _get_kv_up_weights(self) -> tuple[Tensor, Tensor]:
        """Upstream reads the weight without calling its module."""
        wait_for_param_gather(self.linear_kv_up_proj)
        return super()._get_kv_up_weights()


def _check_fused(backends: Mapping[str, str]) -> None:
    """Refuse backends that the fused projection, a TE linear with a TE norm inside, rules out."""
    for surface in ("linear", "norm"):
        if (asked := dispatch.requested(surface, backends)) not in (dispatch.AUTO, TE):
            raise MLAError(
                f'{surface} = "{asked}" is asked for, but mla_down_proj_fusion uses Transformer '
                f'Engine\'s linear with the norm inside. Set "{TE}" or remove the key, or turn the '
                "fusion off"
            )
