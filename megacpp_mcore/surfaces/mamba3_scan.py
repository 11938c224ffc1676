"""Surface `mamba3_scan`: Mamba-3's scan, SISO or MIMO, of an M block."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import (
    SCAN_TESTS,
    always,
    cuda_only,
    import_reason,
    triton,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import Mamba3Settings
    from megacpp_mcore.hybrid.mamba3_layout import Mamba3Layout
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config, layout: "Mamba3Layout", settings: "Mamba3Settings") -> Workload:
    """heads, groups: of one tensor-parallel rank. rank: of MIMO, else 1."""
    return Workload.of(
        device,
        dtype_of(config),
        variant=settings.variant,
        heads=layout.local_heads,
        groups=layout.scan_groups,
        head_dim=layout.head_dim,
        state_dim=layout.state_dim,
        rank=layout.rank,
        angles=layout.angles,
        chunk_size=settings.chunk_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    if "M" not in recipe.plan.letters:
        return None
    from megacpp_mcore.hybrid.mamba3_layout import Mamba3Layout

    config, tp = config_of(recipe), recipe.parallel.tensor_model_parallel_size
    group = SimpleNamespace(size=lambda: tp, rank=lambda: 0)
    layout = Mamba3Layout.of(config, recipe.mamba3, SimpleNamespace(tp=group))
    return workload(device, config, layout, recipe.mamba3)


def _mamba_ssm(workload: Workload, variant: str) -> str | None:
    if reason := cuda_only("mamba-ssm's kernels run", workload):
        return reason
    if workload.dtype != "bfloat16":
        return f"mamba-ssm's kernels compute in bfloat16, not {workload.dtype}"
    if (asked := workload.size("variant")) != variant:
        return f"variant {asked}: these are the {variant.upper()} kernels"
    if (chunk_size := workload.size("chunk_size")) != 64:
        return f"chunk_size {chunk_size}: mamba-ssm's kernels are tested with 64"
    return None


def _import_reason(module: str) -> str | None:
    """`import_reason` of mamba-ssm's operators, which need not what its models import: transformers
    and Mamba-1's extension."""
    from megacpp_mcore.stack import bridges

    bridges.import_ops_only("mamba_ssm")
    return import_reason(module)


def _siso(workload: Workload) -> str | None:
    """mamba-ssm's Mamba-3 SISO kernels, as far as they are tested."""
    if reason := _mamba_ssm(workload, "siso"):
        return reason
    for name in ("state_dim", "head_dim"):
        if (size := workload.size(name)) not in (32, 64, 128):
            return f"{name} {size}: mamba-ssm's kernels take powers of two, here 32, 64 or 128"
    if (angles := workload.size("angles")) % 2:
        return f"{angles} angles: mamba-ssm's kernels take an even number"
    return _import_reason("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")


def _mimo(workload: Workload) -> str | None:
    """mamba-ssm's Mamba-3 MIMO kernels, as far as they are tested."""
    if reason := _mamba_ssm(workload, "mimo"):
        return reason
    for name, tested in (("state_dim", (64,)), ("head_dim", (64,)), ("rank", (4,))):
        if (size := workload.size(name)) not in tested:
            return f"{name} {size}: the kernels are tested with {', '.join(map(str, tested))}"
    if workload.size("state_dim") != 4 * (angles := workload.size("angles")):
        return f"{angles} angles: the kernels are tested with a quarter of state_dim"
    return _import_reason("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo")


def _ours(workload: Workload) -> str | None:
    """Our own MIMO kernels, as far as they are tested."""
    return _sizes_of_ours(workload) or triton(workload)


def _sizes_of_ours(workload: Workload) -> str | None:
    """Why the kernels cannot serve a recipe on any machine."""
    if workload.dtype != "bfloat16":
        return f"the kernels' products are of bfloat16, not {workload.dtype}"
    if (asked := workload.size("variant")) != "mimo":
        return f"variant {asked}: these are MIMO kernels; SISO's are those of mamba3_core"
    tested = {"rank": (2, 4), "head_dim": (32, 64), "state_dim": (32, 64), "chunk_size": (64,)}
    for name, sizes in tested.items():
        if (size := workload.size(name)) not in sizes:
            return f"{name} {size}: the kernels are tested with {' and '.join(map(str, sizes))}"
    return None


_KERNELS = "megacpp_mcore.kernels.mamba3"
_SISO, _MIMO = "mamba3_scan.json", "mamba3_scan-mimo.json"
MAMBA_SSM, MAMBA_SSM_MIMO = "mamba_ssm", "mamba_ssm_mimo"

SURFACE = Surface(
    "mamba3_scan",
    (
        Backend(
            MAMBA_SSM, f"{_KERNELS}.mamba_ssm:mamba3_scan", _siso,
            role="chosen",
            removes="the float32 intermediates and launches of the plain scan, for 56 heads, N = P "
            "= 64",
            layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); SISO, N and P 32, 64 or "
            "128",
            dtypes="bf16; dt, decay and state in fp32, angles and their sums in bf16",
            fallback=REFERENCE,
            tests=("tests/gpu/test_mamba3_gpu.py", "tests/kernels/test_mamba_ssm.py"),
            receipt=_SISO,
            exit_when="a scan of our own beats it over a whole step: it moves ten times the bytes "
            "of the input and output",
        ),
        Backend(
            MAMBA_SSM_MIMO, f"{_KERNELS}.mamba_ssm_mimo:mamba3_scan", _mimo,
            removes="scores and chunk states of MIMO's plain scan, at 56 heads. Upstream's own "
            "launchers trace each kernel anew in every call, 0.19 / 1.5 s of the host: we cache "
            "the traces",
            layout="q, k (B, S, 4, G, 64), v, z (B, S, H, 64) -> (B, S, H, 64); MIMO of rank 4 "
            "with skip and gate, in chunks of 16 (64 / rank); the recipe's chunk_size must be 64",
            dtypes="bf16; dt, decay and state in fp32, angles in fp32", fallback=REFERENCE,
            tests=("tests/gpu/test_mamba3_mimo_gpu.py", "tests/kernels/test_mamba_ssm_mimo.py"),
            receipt=_MIMO,
            exit_when="upstream's release after 2.3.2.post1 serves groups of any size, or a scan "
            "of our own beats it over a whole step",
            skips={
                "graph": "a TileLang launch is Python: torch.compile breaks before and after it",
            },
        ),
        Backend(
            "triton_mimo", f"{_KERNELS}.triton_mimo:mamba3_scan", _ours,
            opt_in=True, ruled_out=whatever_the_machine(_sizes_of_ours), role="experimental",
            removes="scores and chunk states of MIMO's plain scan, and copies of x, z and y for "
            "each rank: they are moved once, and only q and k have the rank. What comes before the "
            "scan, rotation above all, is plain torch",
            layout="q, k (B, S, R, G, N), v, z (B, S, H, P) -> (B, S, H, P); MIMO of rank 2 and 4 "
            "with skip and gate, N and P 32 or 64, any length; documents, or an initial and a "
            "final state, both with gradients",
            dtypes="bf16; dt, decay, state, angles and their sums in fp32", fallback=REFERENCE,
            tests=("tests/kernels/test_triton_mimo.py", "tests/gpu/test_triton_mimo_gpu.py"),
            receipt=_MIMO,
            exit_when="a whole run has trained with it: then `auto` takes it where TileLang, whose "
            "kernels are faster, is not installed",
        ),
        reference(
            f"{_KERNELS}:mamba3_scan", always,
            removes="nothing: the chunked scan in plain torch",
            layout="q, k (B, S, G, N), v, z (B, S, H, P) -> (B, S, H, P); MIMO adds a rank dim",
            dtypes="bf16, fp16, fp32, fp64; dt, decay and state in fp32 or wider",
            tests=(
                "tests/kernels/test_mamba3_kernel.py", "tests/layers/test_mamba3_layer.py",
                *SCAN_TESTS,
            ),
            receipt=_SISO,
        ),
    ),
    of_recipe,
    blocks="M",
    case="megacpp_mcore.kernels.mamba3.case:Mamba3ScanCase",
)  # fmt: skip
