"""The Triton kernels through the compiler that an H200's run uses; Triton's interpreter, which the
other tests run them in, takes what that refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.slow
def test_every_triton_kernel_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 30
