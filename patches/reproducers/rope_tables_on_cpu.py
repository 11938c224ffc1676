"""MLA must work without a CUDA device, and its RoPE table must be correct."""

from _common import (
    DEFECT,
    RIGHT,
    asks_for_cuda,
    first_line,
    hide_gpu,
    mla_attention,
    one_process,
    report,
    run,
)

SEQ, BASE = 12, 10000.0


def main() -> int:
    hide_gpu()
    import torch

    one_process()
    tables = {}
    for rope_type in ("rope", "yarn"):
        try:
            attention = mla_attention(rope_type=rope_type, rotary_base=BASE)
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


run(main)
