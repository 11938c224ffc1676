"""The A block as grouped-query attention: Megatron's module with RoPE and norms by dispatch."""

from dataclasses import replace

import torch
from megatron.core.transformer import attention as upstream
from megatron.core.typed_torch import apply_module
from megatron.core.utils import deprecate_inference_params
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mla_rope import RotaryTable
from megacpp_mcore.kernels.rope_qk import RopeQK
from megacpp_mcore.kernels.rope_qk.reference import rotate
from megacpp_mcore.layers.core_attention import window_of
from megacpp_mcore.layers.documents import document_offsets
from megacpp_mcore.layers.inference_state import Rows, attend, check_context, rotate_at
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import rope_qk
from megacpp_mcore.surfaces.workload import current_device


class AttentionError(MegacppError):
    """Angles or a batch that the chosen RoPE backend does not support."""


class SelfAttention(upstream.SelfAttention):
    """Megatron's SelfAttention with one fused kernel that splits QKV and rotates Q and K.

    Upstream splits the projection, copies the queries into one tensor, and rotates queries and keys
    in separate calls. Here a backend of the surface `rope_qk` does all of this on the GEMM's output
    in get_query_key_value_tensors, and upstream's forward receives no angles to apply. Upstream's
    own path runs when dispatch chose `megatron`, and without RoPE. Under a static inference context
    the layer has a cache of keys and values, for any number of next tokens.

    A spec is made before the config is known, so it may name Q/K norms that only a config with
    qk_layernorm uses; they are dropped otherwise.
    """

    def __init__(self, config, submodules, *args, **kwargs) -> None:
        if config.qk_l2_norm or not config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=None, k_layernorm=None)
        super().__init__(config, submodules, *args, **kwargs)
        workload = rope_qk.workload(current_device(), config)
        decision = dispatch.decide("rope_qk", workload, plugin_settings(config).backends)
        self.rope: RopeQK | None = None
        if decision.observed != rope_qk.MEGATRON.name:
            self.rope = decision.load()
        self._angles: Tensor | None = None
        self._offsets: Tensor | None = None

    def forward(
        self, hidden_states, attention_mask, key_value_states=None, inference_context=None,
        rotary_pos_emb=None, *args, packed_seq_params=None, inference_params=None, **kwargs,
    ):  # fmt: skip
        """As upstream's; Megatron passes every argument after rotary_pos_emb by name.

        Raises AttentionError when angles differ between queries and keys or between the rows of a
        batch, and when a document is longer than the table of angles.
        """
        context = deprecate_inference_params(inference_context, inference_params)
        if context is not None and context.is_static_batching():
            check_context(context, packed_seq_params)
            return self._infer(hidden_states, context, rotary_pos_emb)
        fused = self.rope is not None and self._uses_rope() and rotary_pos_emb is not None
        if fused and context is None:
            self._angles = self._table(rotary_pos_emb)
            self._offsets = _offsets(packed_seq_params, self._angles)
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states, attention_mask, key_value_states, context, rotary_pos_emb, *args,
                packed_seq_params=packed_seq_params, **kwargs,
            )  # fmt: skip
        finally:
            self._angles = self._offsets = None

    def _infer(
        self, hidden_states: Tensor, context, rotary_pos_emb
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the next tokens, [s, b, h], to all that the context has keys of."""
        if self.config.attention_output_gate or self.config.softmax_type != "vanilla":
            raise AttentionError(
                f"attention_output_gate {self.config.attention_output_gate} and softmax_type "
                f"{self.config.softmax_type!r} are not supported at inference; only false and "
                "'vanilla' are"
            )
        q, k, v = super().get_query_key_value_tensors(hidden_states)[:3]
        rows = Rows(context, *hidden_states.shape[:2], hidden_states.device)
        if rotary_pos_emb is not None and self._uses_rope():
            angles = self._table(rotary_pos_emb)
            mscale = self._yarn_concentration_factor
            table = RotaryTable.of(angles.to(torch.promote_types(q.dtype, torch.float32)), mscale)
            angles = rotate_at(table, rows.positions)
            q, k = (rotate(x, *angles, self.config.rotary_interleaved) for x in (q, k))
        cache = rows.store(self.layer_number, k.transpose(0, 1), v.transpose(0, 1))
        k, v = (x.transpose(1, 2) for x in cache)  # (b, g, t, d)
        q = q.permute(1, 2, 0, 3).unflatten(1, (k.shape[1], -1))
        scale = self.config.softmax_scale or self.config.kv_channels**-0.5
        window = window_of(self.config, self.layer_number)
        y = attend(q, k, v, rows.positions, scale=scale, window=window)
        y = y.flatten(1, 2).permute(2, 0, 1, 3).flatten(2)
        return apply_module(self.linear_proj)(y.to(hidden_states.dtype))

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True
    ):
        """As upstream's, but with Q and K already rotated when forward stored the angles."""
        if self._angles is None:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate, split_qkv
            )
        norms = self.q_layernorm is not None or self.k_layernorm is not None
        projected = super().get_query_key_value_tensors(hidden_states, split_qkv=norms)
        options = {
            "cu_seqlens": self._offsets,
            "interleaved": self.config.rotary_interleaved,
            "mscale": self._yarn_concentration_factor,
        }
        packed = self._offsets is not None
        if norms:
            q, k, v = projected
            q, k = (x.squeeze(1) for x in (q, k)) if packed else (q, k)
            q, k = self.rope.apart(q, k, self._angles, **options)
            return (q.unsqueeze(1), k.unsqueeze(1), v) if packed else (q, k, v)
        qkv = projected[0].squeeze(1) if packed else projected[0]
        heads = self.num_attention_heads_per_partition
        rotated = self.rope.projected(qkv, self._angles, heads=heads, **options)
        return tuple(x.unsqueeze(1) for x in rotated) if packed else rotated

    def _uses_rope(self) -> bool:
        skipped = self.config.no_rope_freq
        return not (skipped and skipped[self.layer_number - 1])

    def _table(self, rotary_pos_emb: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """(positions, rotary_dim / 2) of Megatron's (positions, 1, 1, rotary_dim)."""
        table = rotary_pos_emb
        if isinstance(table, tuple):
            if table[0] is not table[1]:
                raise AttentionError(
                    "queries and keys have angles of their own, and rope_qk takes one table for "
                    f"both; set rope_qk = '{rope_qk.MEGATRON.name}' in [backends]"
                )
            table = table[0]
        if table.dim() != 4 or table.shape[1:3] != (1, 1):
            raise AttentionError(
                f"rotary_pos_emb is {tuple(table.shape)}; rope_qk takes (positions, 1, 1, "
                "rotary_dim), one table for all rows and heads; set rope_qk = 'megatron'"
            )
        table = table[:, 0, 0]
        if self.config.rotary_interleaved:
            return table[:, 0::2]
        return table[:, : table.shape[1] // 2]


def _offsets(packed_seq_params, angles: Tensor) -> Tensor | None:
    """Offsets of packed documents, none longer than the table of angles; None for whole rows."""
    offsets = document_offsets(packed_seq_params)
    if offsets is None:
        return None
    longest = packed_seq_params.max_seqlen_q
    if longest is not None and longest > angles.shape[0]:
        raise AttentionError(
            f"max_seqlen_q is {longest}, rotary_pos_emb has {angles.shape[0]} positions; "
            "pack shorter documents"
        )
    return offsets
