"""MLA must be buildable and runnable where there is no CUDA device, and its RoPE table be right."""

from _common import (
    DEFECT,
    RIGHT,
    asks_for_cuda,
    first_line,
    hide_gpu,
    one_process,
    report,
    run,
    tiny_config,
)

SEQ, BASE = 12, 10000.0


def main() -> int:
    hide_gpu()
    import torch

    one_process()
    tables = {}
    for rope_type in ("rope", "yarn"):
        try:
            attention = mla(rope_type)
            output, _ = attention(torch.randn(SEQ, 2, 32), attention_mask=None)
        except (AssertionError, RuntimeError) as error:
            if not asks_for_cuda(error):
                raise
            return report(DEFECT, f"MLA with rope_type={rope_type}: {first_line(error)}")
        assert output.shape == (SEQ, 2, 32) and output.isfinite().all()
        tables[rope_type] = attention.rotary_pos_emb(SEQ)
    angles = tables["rope"][:, 0, 0].double()
    frequencies = BASE ** -(torch.arange(0, 8, 2).double() / 8)
    wanted = torch.outer(torch.arange(SEQ).double(), frequencies).repeat(1, 2)
    # fp32 angles up to SEQ: the power, the reciprocal and the product each round once
    assert (angles - wanted).abs().max() <= 3 * SEQ * torch.finfo(torch.float32).eps
    devices = {angles.device.type, tables["yarn"][0].device.type}
    return report(RIGHT, f"MLA ran with rope and yarn; tables on {devices}, angles as computed")


def mla(rope_type: str):
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import (
        MLASelfAttention,
        MLASelfAttentionSubmodules,
    )

    class CausalAttention(torch.nn.Module):
        """Megatron's own torch core does not take MLA's k_channels."""

        def __init__(self, config, **kwargs) -> None:
            super().__init__()

        def forward(self, query, key, value, *args, **kwargs):
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return MLASelfAttention(
        config=tiny_config(mla=True, rope_type=rope_type, rotary_base=BASE),
        submodules=submodules,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
    )


run(main)
