"""What a row of the kernel catalog says, and what several rows say alike."""

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


IN_MODEL = "benched only inside the whole model so far"
REFERENCE_EXIT = "never: it is the definition that the others are held to"
TE_SKIPS = {
    "graph": "TE keeps torch.compile out of its modules: a break before and after each, by design",
    "float32": "TE multiplies float32 in TF32; the model runs it in bf16",
}
GPU_TESTS = ("tests/gpu/test_kernels_gpu.py",)
ATTENTION_TESTS = (
    "tests/kernels/test_core_attention.py",
    "tests/gpu/test_attention_gpu.py",
    *GPU_TESTS,
)
NORM_TESTS = ("tests/kernels/test_norm.py", *GPU_TESTS)
EXPERTS_TESTS = ("tests/kernels/test_moe_experts.py", *GPU_TESTS)
LOSS_TESTS = (
    "tests/kernels/test_linear_cross_entropy.py",
    "tests/gpu/test_linear_cross_entropy_gpu.py",
    *GPU_TESTS,
)
SPLIT_LOSS_TESTS = (*LOSS_TESTS, "tests/kernels/test_linear_cross_entropy_parallel.py")
RESIDUAL_TESTS = ("tests/kernels/test_residual.py", *GPU_TESTS)
ADMISSION = "tests/kernels/test_scan_admission.py"
DISPATCH_TESTS = ("tests/test_dispatch.py",)  # that it is refused where it cannot serve
STACK_TESTS = ("tests/test_dispatch.py", "tests/layers/test_stack.py")
MAMBA3_TESTS = (
    "tests/kernels/test_mamba3_kernel.py",
    "tests/layers/test_mamba3_layer.py",
    ADMISSION,
)
