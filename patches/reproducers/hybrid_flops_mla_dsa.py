"""The FLOPs of a hybrid pattern must count its MLA (+) and DSA (D) layers.

`+-` and one layer of a Transformer with MLA do the same work, so their FLOPs must be equal.
"""

from types import SimpleNamespace

from _common import DEFECT, RIGHT, hide_gpu, report, run

BATCH, SEQ, TOPK = 2, 1024, 256
MLA = {"num_attention_heads": 8, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
INDEXER = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 32, "dsa_indexer_topk": TOPK}


def main() -> int:
    hide_gpu()
    saw = []
    for q_lora_rank in (None, 96):
        transformer = flops(None, num_layers=3, q_lora_rank=q_lora_rank)
        hybrid = flops("+-+-/+-", q_lora_rank=q_lora_rank)
        saw.append(f"q_lora_rank={q_lora_rank}: hybrid {hybrid:.6g}, Transformer {transformer:.6g}")
        if not is_close(hybrid, transformer):
            return report(DEFECT, "; ".join(saw))
    # D has the projections of + (absorption only moves them) and attends in the latent space, to
    # all causal pairs when top-k selects every key; its indexer is added.
    latent, heads = 2 * 48 + 16, MLA["num_attention_heads"]
    wider = 3 * 2 * (BATCH * SEQ**2 / 2) * heads * (latent - (32 + 16 + 32))
    for loss, passes in ((None, 1), (0.01, 3)):
        more = flops("D", dsa_indexer_topk=SEQ, dsa_indexer_loss_coeff=loss) - flops("+")
        assert is_close(more, wider + passes * indexer_forward()), (more, passes)
    # Layers that reuse the top-k of another have no indexer: 2 + 1 of them here against 1 + 1.
    shared = [flops("DDDD/D", dsa_indexer_topk_freq=freq) for freq in (2, 4)]
    assert is_close(shared[0] - shared[1], indexer_forward()), shared
    saved = flops("D", dsa_indexer_topk=SEQ) - flops("D")
    pairs = sum(max(position - TOPK, 0) for position in range(1, SEQ + 1))
    # Megatron counts causal pairs as an integral, without half of the diagonal.
    assert is_close(saved, 3 * 2 * BATCH * pairs * heads * latent, 2 / (SEQ - TOPK)), saved
    saw.append(f"D with {TOPK} of {SEQ} keys saves {saved:.6g}")
    return report(RIGHT, "; ".join(saw))


class Arguments(SimpleNamespace):
    """Megatron's arguments; those that a test does not name are None, as options left out are."""

    def __getattr__(self, name: str) -> None:
        return None


def is_close(got: float, wanted: float, relative: float = 1e-9) -> bool:
    return abs(got - wanted) <= relative * abs(wanted)


def flops(pattern: str | None, **changes) -> float:
    from megatron.training.training import num_floating_point_operations

    args = {
        "hybrid_layer_pattern": pattern,
        "seq_length": SEQ,
        "hidden_size": 256,
        "ffn_hidden_size": 640,
        "multi_latent_attention": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 48,
        "group_query_attention": False,
        "num_query_groups": 8,
        "moe_router_topk": 2,
        "swiglu": True,
        "padded_vocab_size": 512,
        "dsa_indexer_topk_freq": 1,
        "dsa_indexer_skip_topk_offset": 0,
        "attention_output_gate": False,
        **dict.fromkeys(("mamba_state_dim", "mamba_num_groups", "mamba_num_heads"), 16),
        "mamba_head_dim": 16,
        **MLA,
        **INDEXER,
        **changes,
    }
    return num_floating_point_operations(Arguments(**args), BATCH)


def indexer_forward() -> float:
    """q, k and head-weight projections, and one score per causal pair, head and channel."""
    projections = 96 * 4 * 32 + 256 * (32 + 4)
    return 2 * BATCH * SEQ * projections + BATCH * SEQ**2 * 4 * 32


run(main)
