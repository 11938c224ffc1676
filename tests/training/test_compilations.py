"""What a run has compiled, and how long that took."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import triton

from megacpp_mcore.training.gpu import compilations


@pytest.fixture
def listener(monkeypatch):
    """Triton's, as a compilation calls it; and what an earlier listener has heard."""
    heard = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **told: heard.append(told["cache_hit"])
    )
    compilations._triton.cache_clear()
    compilations.compilations()

    def compiled(name: str, seconds: float, cache_hit: bool = False) -> None:
        triton.knobs.compilation.listener(
            src=SimpleNamespace(name=name), metadata={}, metadata_group={},
            times=SimpleNamespace(total=int(seconds * 1e6)), cache_hit=cache_hit,
        )  # fmt: skip

    yield compiled, heard
    compilations._triton.cache_clear()


def test_kernels_are_counted_with_their_times_and_those_of_a_cache_are_not(listener):
    compiled, heard = listener
    before = compilations.compilations()
    nothing = compilations.compile_times()
    assert nothing["triton_kernels_compiled"] == nothing["triton_compile_s"] == 0
    assert "slowest_kernels_compiled" not in nothing
    for number in range(1, 8):
        compiled(f"k{number}", number / 2)
    compiled("read", 100.0, cache_hit=True)
    assert compilations.compilations() == before + 7 and heard == [False] * 7 + [True]
    found = compilations.compile_times()
    assert found["triton_kernels_compiled"] == 7 and found["triton_compile_s"] == 14
    assert found["slowest_kernels_compiled"] == "k7 3.5 s, k6 3.0 s, k5 2.5 s, k4 2.0 s, k3 1.5 s"


def test_the_time_of_torch_compile_is_in_it():
    """In a process of its own: what imports Megatron here disables torch.compile."""
    program = (
        "import torch; from megacpp_mcore.training.gpu.compilations import compile_times;"
        "torch.compile(lambda x: x.sin() + 1, backend='eager')(torch.ones(3));"
        "print(compile_times()['torch_compile_s'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert float(done.stdout) > 0, done.stderr
