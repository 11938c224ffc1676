"""Catalog rows of the token mixers: the glue of MLA, Mamba-3, M2RNN.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens of NAM56R's
shapes (hidden 3584), unless a row says otherwise.
"""

from functools import partial

from megacpp_mcore.catalog.row import (
    ADMISSION,
    GPU_TESTS,
    MAMBA3_TESTS,
    REFERENCE_EXIT,
    Row,
)

_MLA_ROPE_LAYOUT = (
    "q, kv [s, b, heads, dims], k_pos [s, b, pos] -> q, k, v [s, b, heads, dims], or packed thd; "
    "any dims, heads and rotated share, pairs side by side or half the dims apart"
)
_MLA_ROPE_TESTS = (
    "tests/kernels/test_mla_rope.py",
    "tests/layers/test_mla.py",
    "tests/layers/test_mla_parallel.py",
    "tests/gpu/test_mla_rope_gpu.py",
    *GPU_TESTS,
)
_MLA_ROPE_RECEIPT = "examples/receipts/h200/mla_rope.json"

_mla_rope = partial(Row, surface="mla_rope", blocks="A")

MLA = (
    _mla_rope(
        backend="triton",
        role="chosen",
        keep="keep",
        removes="every copy around RoPE, 4.3 ms of the unfused layer's 13.0: 0.277 / 0.556 ms, 89 "
        "% of what a copy moves, and the layer takes 9.2. q, kv and k_pos are read once and q, k "
        "and v written once, and the same with their gradients. 8 documents a row cost 1 % more; "
        "their layer takes 8.1 on torch's varlen attention",
        layout=_MLA_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32; turned and summed over heads in fp32, rounded once",
        fallback="reference",
        tests=_MLA_ROPE_TESTS,
        receipt=_MLA_ROPE_RECEIPT,
        exit_when="an attention core takes the rotary part apart from the rest",
    ),
    _mla_rope(
        backend="megatron",
        role="vendor",
        keep="borderline",
        removes="nothing: Megatron's own operations, one after another, 2.13 / 4.31 ms; the "
        "unfused layer to compare with. Refused with tensor parallelism, where it leaves other "
        "ranks out of k's rotary gradient, without the patch mla-k-pos-gradient",
        layout=_MLA_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; cos, sin and every step rounded to it",
        fallback="reference",
        tests=_MLA_ROPE_TESTS,
        receipt=_MLA_ROPE_RECEIPT,
        exit_when="nobody needs the figures of the unfused layer any more",
    ),
    _mla_rope(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: the definition in plain torch",
        layout=_MLA_ROPE_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; turned in fp32 or wider, rounded once",
        tests=_MLA_ROPE_TESTS,
        receipt=_MLA_ROPE_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _mla_rope(
        backend="megatron_fused",
        role="vendor",
        keep="not carried",
        removes="concatenations and copies around RoPE, as triton does",
        fallback="reference",
        not_carried="megatron-core 0.19.2's kernel serves YaRN only, and its head mask forgets the "
        "block offset: at 56 heads silently wrong or an illegal access, as the autotuner picks",
        exit_when="a release passes parity at 56 heads and serves plain RoPE: then it is benched",
    ),
    Row(
        surface="mla_projection",
        backend="own_fused",
        blocks="A",
        role="deferred",
        keep="not carried",
        removes="q and kv in memory between up projection and RoPE, and their gradients: of the "
        "layer's 9.2 ms at most 0.5, were its kernels as fast as a copy of what they must move",
        not_carried="measured in the layer: up projections 0.15 ms forward and 0.24 backward, RoPE "
        "0.28 each; one kernel forward writes q, k and v, 0.14 at best, two backward read their "
        "gradients, 0.28. For half of that, as such kernels go, it would replace TE's linears: "
        "FP8, sequence parallelism's gathers and fused gradient accumulation, each once more. The "
        "down projections in one product, Megatron's own option, are worth 0.17 (layer 9.07)",
        exit_when="the attention core takes so little that 0.5 ms are a tenth of the layer",
    ),
)

_scan = partial(Row, surface="mamba3_scan", blocks="M")
_SCAN_RECEIPT = "examples/receipts/h200/mamba3_scan.json"

MAMBA3_SCAN = (
    _scan(
        backend="mamba_ssm",
        role="chosen",
        keep="keep",
        removes="the float32 intermediates and launches of the plain scan: 0.77 / 2.44 ms for 56 "
        "heads, N = P = 64; of it 0.09 ms are input and output in the forward pass",
        layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); SISO, N and P 32, 64 or 128",
        dtypes="bf16; dt, decay and state in fp32, angles and their sums in bf16",
        fallback="reference",
        tests=("tests/gpu/test_mamba3_gpu.py", "tests/kernels/test_mamba_ssm.py"),
        receipt=_SCAN_RECEIPT,
        exit_when="a scan of our own beats it over a whole step: it moves ten times the bytes of "
        "the input and output",
    ),
    _scan(
        backend="mamba_ssm_mimo",
        role="vendor",
        keep="keep",
        removes="scores and chunk states of MIMO's plain scan: 6.96 / 22.1 ms and 3.0 GiB at 56 "
        "heads, where plain torch takes 37.1 / 125.5 and 22.4. Upstream's own launchers trace each "
        "kernel anew in every call, 0.19 / 1.5 s of the host: they are made to remember",
        layout="q, k (B, S, 4, G, 64), v, z (B, S, H, 64) -> (B, S, H, 64); MIMO of rank 4 with "
        "skip and gate, in chunks of 16 whatever the recipe says",
        dtypes="bf16; dt, decay and state in fp32, angles in fp32",
        fallback="reference",
        tests=("tests/gpu/test_mamba3_mimo_gpu.py", "tests/kernels/test_mamba_ssm_mimo.py"),
        receipt="examples/receipts/h200/mamba3_scan-mimo.json",
        exit_when="upstream's release after 2.3.2.post1 serves groups of any size, or a scan of "
        "our own beats it over a whole step",
        skips={"graph": "a TileLang launch is Python: torch.compile breaks before and after it"},
    ),
    _scan(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="nothing: the chunked scan in plain torch",
        layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); MIMO adds a rank dim",
        dtypes="bf16, fp16, fp32, fp64; dt, decay and state in fp32 or wider",
        tests=MAMBA3_TESTS,
        receipt=_SCAN_RECEIPT,
        exit_when=REFERENCE_EXIT,
    ),
    _scan(
        backend="own_scan",
        role="deferred",
        keep="not carried",
        removes="rotated Q, scaled K, expanded angles and chunk states in memory: upstream's SISO "
        "kernel takes 0.77 / 2.44 ms, of 0.09 ms of input and output in the forward pass",
        fallback="reference",
        not_carried="upstream's kernel is the one to beat, and no H200 receipt shows a scan of our "
        "own that beats it over a whole step",
        exit_when="such a receipt exists",
    ),
)

_M2RNN_TESTS = (
    "tests/gpu/test_m2rnn_gpu.py",
    "tests/kernels/test_m2rnn_on_cpu.py",
    "tests/kernels/test_m2rnn_gradient_sizes.py",
    "tests/kernels/test_m2rnn_build.py",
)
_M2RNN_LAYOUT = "q, k (B, S, 1 or H, K), v (B, S, H, V) -> (B, S, H, V), state (B, H, K, V); V 16"

_PREP_TESTS = (
    "tests/kernels/test_mixer_prep.py",
    "tests/kernels/test_mixer_prep_admission.py",
    "tests/layers/test_compiled.py",
    "tests/gpu/test_compiled_gpu.py",
    *GPU_TESTS,
)
_prep = partial(
    Row,
    tests=_PREP_TESTS,
    dtypes="bf16, fp16, fp32, fp64; computed in fp32 or wider, rounded once",
)
_mamba3_prep = partial(
    _prep,
    surface="mamba3_prep",
    blocks="M",
    receipt="examples/receipts/h200/layer-mamba3-prep.json",
    layout="B, C (b, s, G R N), dt, A (b, s, H) -> q, k (b, s, [R,] G, N), adt, dt (b, s, H)",
)
_m2rnn_prep = partial(
    _prep,
    surface="m2rnn_prep",
    blocks="R",
    receipt="examples/receipts/h200/layer-m2rnn-prep.json",
    layout="q, k, v, decay (s, b, ...) -> (s, b, 2 K + H V), f (b, s, H); y, v (b, s, H, V), gate "
    "(s, b, H V) -> (s, b, H V)",
)
_PREP_EXIT = (
    "a whole step is faster with it beyond the spread: then auto takes it. One of nam56r-quarter, "
    "off, with R's, with M's and with both in turns, was not: 322.0 ms, with ratios of 0.93 .. "
    "1.06, 0.92 .. 1.06 and 0.95 .. 1.08 (model-nam56r-quarter-compile.json)"
)
_PREP_REFERENCE = "nothing: the definition in plain torch, which serves unless inductor is named"

PREP = (
    _mamba3_prep(
        backend="inductor",
        role="experimental",
        keep="borderline",
        removes="reads and writes between the norms of B and C, the steps and the decays, one "
        "graph of torch.compile each way: the layer takes 10.17 ms for 10.76 forward and backward",
        fallback="reference",
        exit_when=_PREP_EXIT,
    ),
    _mamba3_prep(
        backend="reference",
        role="fallback",
        keep="keep",
        removes=_PREP_REFERENCE,
        exit_when=REFERENCE_EXIT,
    ),
    _m2rnn_prep(
        backend="inductor",
        role="experimental",
        keep="borderline",
        removes="reads and writes in the convolution, the decay and the gated norm, two graphs of "
        "torch.compile each way, three with tensor parallelism: the layer takes 5.89 ms for 8.05 "
        "forward and backward, and 0.75 GiB for 0.87",
        fallback="reference",
        exit_when=_PREP_EXIT,
    ),
    _m2rnn_prep(
        backend="reference",
        role="fallback",
        keep="keep",
        removes=_PREP_REFERENCE,
        exit_when=REFERENCE_EXIT,
    ),
)

_m2rnn = partial(Row, surface="m2rnn", blocks="R")

M2RNN = (
    _m2rnn(
        backend="cuda",
        role="chosen",
        keep="keep",
        removes="the launches of 4096 dependent steps: one forward, two backward, the state in "
        "registers, the backward pass's states and sums beside its recurrence; 0.48 / 1.55 ms at "
        "44 heads; a step of nam56r-quarter takes 303 ms for the reference's 755 "
        "(model-nam56r-quarter-m2rnn.json)",
        layout=f"{_M2RNN_LAYOUT}, K a multiple of 32",
        dtypes="bf16, fp16: h to 11 bits where it is multiplied, tanh 2^-16 (2^-20 is an option); "
        "fp32: products 2^-20",
        fallback="reference",
        tests=_M2RNN_TESTS,
        receipt="examples/receipts/h200/m2rnn-b4-h44.json",
        exit_when="upstream's kernels, at true gradients, come within a tenth of it over a whole "
        "step",
    ),
    _m2rnn(
        backend="reference",
        role="fallback",
        keep="keep",
        removes="the per-step graph: states are kept once a chunk and made again in the backward "
        "pass",
        layout="q, k (B, S, 1 or H, K), v (B, S, H, V) -> (B, S, H, V), state (B, H, K, V)",
        dtypes="bf16, fp16, fp32, fp64; computed in fp32 or wider",
        tests=("tests/kernels/test_m2rnn_kernel.py", ADMISSION),
        no_receipt="not timed beside the kernels, which it would keep waiting; a step is, in "
        "model-nam56r-quarter-m2rnn.json",
        exit_when=REFERENCE_EXIT,
    ),
    _m2rnn(
        backend="xma",
        role="donor",
        keep="not carried",
        removes="the launches of 4096 dependent steps: 3.31 / 14.28 ms and 1.70 GiB at 44 heads",
        fallback="reference",
        not_carried="over ten times the latency floor of 0.19 - 0.30 ms, 3.4e-3 relative error in "
        "fp32 (it multiplies in tf32), and it clamps the state's gradient by default",
        exit_when="our own kernel is at the floor: then it is the figure to compare with",
    ),
)
