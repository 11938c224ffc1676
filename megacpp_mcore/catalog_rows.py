"""The rows of the kernel catalog, as data.

Times are medians on one H200 in bf16, forward / forward + backward, 16,384 tokens of NAM56R's
shapes (hidden 3584), unless a row says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["chosen", "fallback", "vendor", "donor", "deferred", "experimental"]
Keep = Literal["keep", "borderline", "not carried"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend, or one that we deliberately do not carry (`not_carried` says why).

    blocks: letters of the block families it touches; empty: the head and the loss. role: chosen
    (what the pinned stack should run on an H200), fallback (plain torch), vendor (another package's
    that we may run), donor (a source of ideas), deferred (not written, and when it would be) or
    experimental (runs only when named). removes: the whole-path cost it takes away. layout, dtypes:
    what it takes and gives. fallback: the backend that serves when it cannot; None for a reference,
    and where nothing is registered for the surface. tests: paths in the repository. receipt: a file
    under examples/receipts/h200/, or None and `no_receipt` says why. exit_when: the condition under
    which the row is decided anew. skips: admission check, or dtype -> why it is not run.
    """

    surface: str
    backend: str
    blocks: str
    role: Role
    keep: Keep
    removes: str
    layout: str = ""
    dtypes: str = ""
    fallback: str | None = None
    tests: tuple[str, ...] = ()
    receipt: str | None = None
    no_receipt: str | None = None
    exit_when: str
    not_carried: str | None = None
    skips: Mapping[str, str] = field(default_factory=dict)


_IN_MODEL = "benched only inside the whole model so far"
_REFERENCE_EXIT = "never: it is the definition that the others are held to"
_TE_SKIPS = {
    "graph": "TE keeps torch.compile out of its modules: a break before and after each, by design",
    "float32": "TE multiplies float32 in TF32; the model runs it in bf16",
}
_NOT_IN_MODEL = {"model_slice": "the model does not ask for this surface yet"}
_GPU_TESTS = ("tests/gpu/test_kernels_gpu.py",)
_ATTENTION_TESTS = ("tests/kernels/test_core_attention.py", *_GPU_TESTS)
_NORM_TESTS = ("tests/kernels/test_norm.py", *_GPU_TESTS)
_EXPERTS_TESTS = ("tests/kernels/test_moe_experts.py", *_GPU_TESTS)
_LOSS_TESTS = ("tests/kernels/test_linear_cross_entropy.py", *_GPU_TESTS)
_RESIDUAL_TESTS = ("tests/kernels/test_residual.py", *_GPU_TESTS)
_ADMISSION = "tests/kernels/test_scan_admission.py"
_DISPATCH_TESTS = ("tests/test_dispatch.py",)  # that it is refused where it cannot serve
_STACK_TESTS = ("tests/test_dispatch.py", "tests/layers/test_stack.py")
_MAMBA3_TESTS = (
    "tests/kernels/test_mamba3_kernel.py",
    "tests/layers/test_mamba3_layer.py",
    _ADMISSION,
)

LINEAR = (
    Row(
        surface="linear",
        backend="te",
        blocks="AEMR",
        role="chosen",
        keep="keep",
        removes="FP8 casts outside the GEMM, and tensor-parallel communication that does not "
        "overlap it; in bf16 on one GPU nothing, both call cuBLAS",
        layout="[s, b, in] -> [s, b, out], weight [out, in]",
        dtypes="bf16, fp16, fp32; fp8 inside",
        fallback="reference",
        tests=_DISPATCH_TESTS,
        receipt="examples/receipts/h200/model-nam56r-quarter.json",
        exit_when="torch's linears train NAM56R at the same tokens/s, FP8 included",
    ),
    Row(
        surface="linear",
        backend="reference",
        blocks="AEMR",
        role="fallback",
        keep="keep",
        removes="nothing: Megatron's own linears in plain torch",
        layout="[s, b, in] -> [s, b, out], weight [out, in]",
        dtypes="bf16, fp16, fp32",
        tests=_STACK_TESTS,
        no_receipt=_IN_MODEL,
        exit_when=_REFERENCE_EXIT,
    ),
)

NORM = (
    Row(
        surface="norm",
        backend="te",
        blocks="AEMR",
        role="chosen",
        keep="keep",
        removes="a read and a write of the activations between the square sum and the scaling",
        layout="[..., h], normalised over h",
        dtypes="bf16, fp16, fp32; sums in fp32",
        fallback="liger",
        tests=_NORM_TESTS,
        receipt="examples/receipts/h200/norm.json",
        exit_when="torch's RMSNorm is within the noise of it over a whole step",
        skips={
            "graph": _TE_SKIPS["graph"],
            "zero_size": "TE 2.17.1 asserts that a norm's output holds data",
        },
    ),
    Row(
        surface="norm",
        backend="liger",
        blocks="AEMR",
        role="vendor",
        keep="borderline",
        removes="the same round trip as te, without te; RMSNorm only",
        layout="[..., h], normalised over h",
        dtypes="bf16, fp16, fp32; computed in fp32",
        fallback="reference",
        tests=_NORM_TESTS,
        receipt="examples/receipts/h200/norm.json",
        exit_when="te or torch is as fast in the bench of the surface",
    ),
    Row(
        surface="norm",
        backend="reference",
        blocks="AEMR",
        role="fallback",
        keep="keep",
        removes="nothing: torch.nn.RMSNorm and LayerNorm, sequence parallelism added",
        layout="[..., h], normalised over h",
        dtypes="bf16, fp16, fp32",
        tests=(*_NORM_TESTS, *_STACK_TESTS),
        receipt="examples/receipts/h200/norm.json",
        exit_when=_REFERENCE_EXIT,
    ),
    Row(
        surface="norm",
        backend="own_triton",
        blocks="AEMR",
        role="deferred",
        keep="not carried",
        removes="the same round trip that te and Liger remove already",
        fallback="te",
        not_carried="TE, Liger and torch each have one that a far larger user base tests; one of "
        "our own removes no memory traffic that theirs do not",
        exit_when="a norm fused with a neighbour that no package offers saves step time in a run",
    ),
)

MOE_EXPERTS = (
    Row(
        surface="moe_experts",
        backend="te",
        blocks="E",
        role="chosen",
        keep="keep",
        removes="one GEMM launch an expert. The whole MoE layer takes 3.14 / 9.50 ms with it, of "
        "a 5.1 ms floor: the rest is sort, permute and copies",
        layout="tokens [t, h] sorted by expert, counts [experts] on the host",
        dtypes="bf16, fp16, fp32; fp8 inside",
        fallback="grouped_mm",
        tests=_EXPERTS_TESTS,
        receipt="examples/receipts/h200/moe_experts.json",
        exit_when="a path that never writes the permuted copies wins a whole run",
        skips=_TE_SKIPS,
    ),
    Row(
        surface="moe_experts",
        backend="grouped_mm",
        blocks="E",
        role="vendor",
        keep="borderline",
        removes="one GEMM launch an expert, and the wait for the counts on the host; fc1, SwiGLU "
        "and fc2 take 2.25 / 6.83 ms. SwiGLU without bias only: another config is refused when the "
        "layer is built. Muon would train its weights, which are one 3-d tensor, with Adam",
        layout="tokens [t, h] sorted by expert, counts [experts] anywhere; h and f multiples of 8",
        dtypes="bf16; fp16 and fp32 outside torch.compile",
        fallback="reference",
        tests=_EXPERTS_TESTS,
        receipt="examples/receipts/h200/moe_experts.json",
        exit_when="te is as fast in the bench of the surface, or torch drops F.grouped_mm",
    ),
    Row(
        surface="moe_experts",
        backend="reference",
        blocks="E",
        role="fallback",
        keep="keep",
        removes="nothing: Megatron's SequentialMLP, one expert after another",
        layout="tokens [t, h] sorted by expert, counts [experts] on the host",
        dtypes="bf16, fp16, fp32",
        tests=(*_EXPERTS_TESTS, *_STACK_TESTS),
        receipt="examples/receipts/h200/moe_experts.json",
        exit_when=_REFERENCE_EXIT,
    ),
    Row(
        surface="moe_experts",
        backend="sonicmoe",
        blocks="E",
        role="donor",
        keep="not carried",
        removes="the stored expert output: router gradients come from dA' . A, so that only X and "
        "the pre-activation are kept",
        fallback="te",
        not_carried="0.1.2.post1 needs torch <= 2.9.1 and cutlass-dsl 4.4.2; its algorithm carries "
        "over, its package does not",
        exit_when="a release serves the pinned torch: then it is benched as a vendor",
    ),
)

_ATTENTION_LAYOUT = (
    "q, k [s, b, heads, dqk], v [s, b, heads, dv] -> [s, b, heads * dv]; thd packed, one document "
    "at a time"
)

CORE_ATTENTION = (
    Row(
        surface="core_attention",
        backend="te",
        blocks="A",
        role="vendor",
        keep="borderline",
        removes="the [s, s] scores, as SDPA does; and it alone serves context parallelism",
        layout="q, k [s, b, heads, dqk], v [s, b, heads, dv] -> [s, b, heads * dv]; thd packed",
        dtypes="bf16, fp16",
        fallback="sdpa_cudnn",
        tests=_ATTENTION_TESTS,
        no_receipt="cannot run a backward pass on the pinned stack: it needs cuDNN >= 9.22, torch "
        "2.11 brings 9.19",
        exit_when="SDPA is as fast on the same cuDNN and serves context parallelism",
        skips={"graph": _TE_SKIPS["graph"]},
    ),
    Row(
        surface="core_attention",
        backend="sdpa_cudnn",
        blocks="A",
        role="chosen",
        keep="keep",
        removes="the [s, s] scores of every head; dqk 128 and dv 64 as they are: 1.48 / 6.5 ms",
        layout=_ATTENTION_LAYOUT,
        dtypes="bf16, fp16",
        fallback="sdpa_flash",
        tests=_ATTENTION_TESTS,
        receipt="examples/receipts/h200/core_attention.json",
        exit_when="another backend is faster over a whole step with the same dims",
    ),
    Row(
        surface="core_attention",
        backend="sdpa_flash",
        blocks="A",
        role="vendor",
        keep="borderline",
        removes="the [s, s] scores of every head, where cuDNN cannot serve; v padded to dqk costs "
        "it 3.10 / 12.27 ms",
        layout=_ATTENTION_LAYOUT,
        dtypes="bf16, fp16",
        fallback="sdpa",
        tests=_ATTENTION_TESTS,
        receipt="examples/receipts/h200/core_attention.json",
        exit_when="torch's own choice of a kernel is as fast wherever cuDNN cannot serve",
    ),
    Row(
        surface="core_attention",
        backend="sdpa",
        blocks="A",
        role="vendor",
        keep="keep",
        removes="the [s, s] scores of every head, on a CPU and in fp32 too",
        layout=_ATTENTION_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64",
        fallback="reference",
        tests=_ATTENTION_TESTS,
        receipt="examples/receipts/h200/core_attention.json",
        exit_when="the CPU lane has another attention",
    ),
    Row(
        surface="core_attention",
        backend="reference",
        blocks="A",
        role="fallback",
        keep="keep",
        removes="nothing: softmax(q k^T) v with the scores in memory",
        layout=_ATTENTION_LAYOUT,
        dtypes="bf16, fp16, fp32, fp64; softmax in fp32 or wider",
        tests=_ATTENTION_TESTS,
        receipt="examples/receipts/h200/core_attention.json",
        exit_when=_REFERENCE_EXIT,
    ),
)

MLA = (
    Row(
        surface="mla_projection",
        backend="own_fused",
        blocks="A",
        role="deferred",
        keep="not carried",
        removes="the traffic between down projection, norm and up projection",
        not_carried="cuBLAS has caught up: the GEMMs are about 2.2 ms of the MLA layer's 13.43, "
        "while copies around RoPE cost 3 - 4 ms; and it carries a recompute contract of its own "
        "in the backward pass",
        exit_when="a run shows a compiled projection losing to it at long context, in memory or "
        "tokens/s",
    ),
    Row(
        surface="mla_rope",
        backend="megatron_fused",
        blocks="A",
        role="vendor",
        keep="not carried",
        removes="concatenations and copies around RoPE, 3 - 4 ms of the layer's 13.43",
        not_carried="megatron-core 0.19.2's kernel serves YaRN only, and its head mask forgets the "
        "block offset: at 56 heads silently wrong or an illegal access, as the autotuner picks",
        exit_when="a release passes parity at 56 heads and serves plain RoPE: then it is benched",
    ),
)

MAMBA3_SCAN = (
    Row(
        surface="mamba3_scan",
        backend="mamba_ssm",
        blocks="M",
        role="chosen",
        keep="keep",
        removes="the float32 intermediates and launches of the plain scan: 0.73 / 1.94 ms for 56 "
        "heads, N = P = 64; of it 0.09 ms are input and output in the forward pass",
        layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); SISO, N and P 32, 64 or 128",
        dtypes="bf16; dt, decay and state in fp32, angles and their sums in bf16",
        fallback="reference",
        tests=("tests/gpu/test_mamba3_gpu.py", "tests/kernels/test_mamba_ssm.py"),
        receipt="examples/receipts/h200/mamba3_scan.json",
        exit_when="a scan of our own beats it over a whole step: it moves ten times the bytes of "
        "the input and output",
    ),
    Row(
        surface="mamba3_scan",
        backend="reference",
        blocks="M",
        role="fallback",
        keep="keep",
        removes="nothing: the chunked scan in plain torch",
        layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); MIMO adds a rank dim",
        dtypes="bf16, fp16, fp32, fp64; dt, decay and state in fp32 or wider",
        tests=_MAMBA3_TESTS,
        receipt="examples/receipts/h200/mamba3_scan.json",
        exit_when=_REFERENCE_EXIT,
    ),
    Row(
        surface="mamba3_scan",
        backend="own_scan",
        blocks="M",
        role="deferred",
        keep="not carried",
        removes="rotated Q, scaled K, expanded angles and chunk states in memory: upstream's SISO "
        "kernel takes 0.73 / 1.94 ms, of 0.09 ms of input and output in the forward pass",
        fallback="reference",
        not_carried="upstream's kernel is the one to beat, and no H200 receipt shows a scan of our "
        "own that beats it over a whole step",
        exit_when="such a receipt exists",
    ),
)

_M2RNN_TESTS = ("tests/gpu/test_m2rnn_gpu.py", "tests/kernels/test_m2rnn_build.py")
_M2RNN_LAYOUT = "q, k (B, S, 1 or H, K), v (B, S, H, V) -> (B, S, H, V), state (B, H, K, V); V 16"

M2RNN = (
    Row(
        surface="m2rnn",
        backend="cuda_exact",
        blocks="R",
        role="chosen",
        keep="keep",
        removes="the launches of 4096 dependent steps: one forward, two backward, the state in "
        "registers; 1.06 / 4.59 ms at 44 heads, XMA's Triton kernels 3.41 / 14.6 in another run",
        layout=f"{_M2RNN_LAYOUT}, K a multiple of 32",
        dtypes="bf16, fp16, fp32; computed to nearly fp32: products 2^-20, tanh 2^-21",
        fallback="reference",
        tests=_M2RNN_TESTS,
        receipt="examples/receipts/h200/m2rnn-b4-h44.json",
        exit_when="upstream's kernels, at true gradients, come within a tenth of it over a whole "
        "step, or the fast ones become as exact",
    ),
    Row(
        surface="m2rnn",
        backend="cuda",
        blocks="R",
        role="experimental",
        keep="keep",
        removes="a sixth to a half of the exact kernels' time; only for whoever names it: at 4096 "
        "steps and 44 heads its gradients were 1.2e-1 off, of 4.9e-2 allowed, where W makes states "
        "diverge",
        layout=f"{_M2RNN_LAYOUT}, K 64",
        dtypes="bf16, fp16; state in fp32, products of 11-bit factors, the hardware's tanh",
        fallback="cuda_exact",
        tests=_M2RNN_TESTS,
        receipt="examples/receipts/h200/m2rnn-b4-h51.json",
        exit_when="the exact kernels are as fast, or a trained model shows that it needs them",
    ),
    Row(
        surface="m2rnn",
        backend="reference",
        blocks="R",
        role="fallback",
        keep="keep",
        removes="the per-step graph: states are kept once a chunk and made again in the backward "
        "pass",
        layout="q, k (B, S, 1 or H, K), v (B, S, H, V) -> (B, S, H, V), state (B, H, K, V)",
        dtypes="bf16, fp16, fp32, fp64; computed in fp32 or wider",
        tests=("tests/kernels/test_m2rnn_kernel.py", _ADMISSION),
        receipt="examples/receipts/h200/m2rnn-b4-h44.json",
        exit_when=_REFERENCE_EXIT,
    ),
    Row(
        surface="m2rnn",
        backend="xma",
        blocks="R",
        role="donor",
        keep="not carried",
        removes="the launches of 4096 dependent steps: 3.31 / 14.28 ms and 1.70 GiB at 44 heads",
        fallback="reference",
        not_carried="over ten times the latency floor of 0.19 - 0.30 ms, 3.4e-3 relative error in "
        "fp32 (it multiplies in tf32), and it clamps the state's gradient by default",
        exit_when="our own kernel is at the floor: then it is the figure to compare with",
    ),
)

HEAD = (
    Row(
        surface="linear_cross_entropy",
        backend="reference",
        blocks="",
        role="fallback",
        keep="keep",
        removes="nothing: logits of every token, then their cross entropy; 44.1 ms and 12.0 GiB",
        layout="hidden [s, b, h], weight [V, h], labels [s, b] -> losses [s, b]",
        dtypes="bf16, fp16, fp32, fp64; the sum and the losses in fp32 or wider",
        tests=_LOSS_TESTS,
        receipt="examples/receipts/h200/linear_cross_entropy.json",
        exit_when=_REFERENCE_EXIT,
        skips=_NOT_IN_MODEL,
    ),
    Row(
        surface="linear_cross_entropy",
        backend="own_mega_kernel",
        blocks="",
        role="deferred",
        keep="not carried",
        removes="the logits: plain linear and cross entropy 44.1 ms and 12.0 GiB, Liger 37.8 ms "
        "and 0.67 GiB, floor 31 ms",
        fallback="reference",
        not_carried="it is made of 23 TFLOP of GEMM, and cuBLAS runs those; chunked logits with "
        "one small kernel over each chunk save the same memory",
        exit_when="a chunked path cannot come within reach of the floor on an H200",
    ),
    Row(
        surface="linear_cross_entropy",
        backend="megatron_te",
        blocks="",
        role="vendor",
        keep="not carried",
        removes="a pass over the logits",
        fallback="reference",
        not_carried="Megatron's cross_entropy_fusion_impl 'te' is reported to give grad norm 0 or "
        "divergence (Megatron-LM #1627 and #1750)",
        exit_when="both reports are closed by a fix and our gradient test passes on it",
    ),
)

RESIDUAL = (
    Row(
        surface="residual",
        backend="megatron",
        blocks="AEMR",
        role="chosen",
        keep="keep",
        removes="two of three elementwise launches and their traffic: bias, dropout and addition "
        "are one kernel of torch.compile, where the recipe has bias_dropout_fusion",
        layout="x, residual [s, b, h], bias [h] -> [s, b, h]",
        dtypes="bf16, fp16, fp32; the residual's",
        fallback="reference",
        tests=_RESIDUAL_TESTS,
        receipt="examples/receipts/h200/residual.json",
        exit_when="it is no faster than the eager operations over a whole step",
    ),
    Row(
        surface="residual",
        backend="reference",
        blocks="AEMR",
        role="fallback",
        keep="keep",
        removes="nothing: bias, dropout and addition one after another",
        layout="x, residual [s, b, h], bias [h] -> [s, b, h]",
        dtypes="bf16, fp16, fp32, fp64; the residual's",
        tests=_RESIDUAL_TESTS,
        receipt="examples/receipts/h200/residual.json",
        exit_when=_REFERENCE_EXIT,
    ),
    Row(
        surface="residual",
        backend="own_triton",
        blocks="AEMR",
        role="deferred",
        keep="not carried",
        removes="elementwise launches between a block's output and the next block's input",
        fallback="megatron",
        not_carried="bias, dropout and addition are one kernel of torch.compile already; a Triton "
        "kernel would be a border that the compiler cannot fuse across",
        exit_when="torch.compile stops fusing them in the pinned stack, seen in a trace of a run",
    ),
)

ROWS: tuple[Row, ...] = (
    LINEAR + NORM + MOE_EXPERTS + CORE_ATTENTION + MLA + MAMBA3_SCAN + M2RNN + HEAD + RESIDUAL
)
