"""What kind of work a GPU's kernel does, by its name: the rows of a profile's summary."""

import re

# The first that matches. Ours are named after their surface; the others are of CUDA's libraries,
# torch, Transformer Engine, FlashAttention-4 and NCCL.
EXCHANGE = "exchange between GPUs"
_FAMILIES = (
    (EXCHANGE, r"nccl|deep_ep"),
    ("attention", r"flash|fmha|sdpa|cudnn"),
    ("Mamba-3", r"mamba3_|mimo_|siso|angle_dt|dacs"),
    ("M2RNN", r"m2rnn|rnn_"),
    ("experts' products", r"grouped"),
    ("experts' routing, activation and sums", r"^moe_|tokens::|topk|router|aux_loss|fused_score"),
    ("MLA's up-projections and RoPE", r"mla_up|mla_rope|rope_qk"),
    ("embedding, head and loss", r"embedding|cross_entropy|softmax"),
    ("optimizer", r"adam|multi_tensor|l2norm|unscale"),
    ("norms", r"norm"),
    ("other products", r"nvjet|gemm|cutlass|cublas|xmma|sm90_"),
    ("copies and fills", r"memcpy|memset|copy|fill|catarray"),
)
OTHER = "pointwise and sums of torch and Transformer Engine"
_PATTERNS = [(name, re.compile(words, re.IGNORECASE)) for name, words in _FAMILIES]


def family(kernel: str) -> str:
    """The kind of a kernel's work: one of the names above, or OTHER."""
    return next((name for name, words in _PATTERNS if words.search(kernel)), OTHER)
