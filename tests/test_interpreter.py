"""What `interpreter` puts in the place of parts of Triton's interpreter computes what they do."""

import os
import subprocess
import sys
from pathlib import Path

import interpreter
import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter as tritons

SAMPLE = Path(__file__).with_name("interpreter_sample.py")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


def test_a_kernel_stores_the_bits_of_tritons_own_interpreter():
    import interpreter_sample

    own = subprocess.run(
        [sys.executable, str(SAMPLE)], capture_output=True, text=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert tritons._convert_float is not interpreter._convert
    assert interpreter_sample.sample() == bytes.fromhex(own.stdout)


@pytest.mark.parametrize(
    ("old", "new", "bits"),
    [(tl.float32, tl.bfloat16, np.uint32), (tl.bfloat16, tl.float32, np.uint16)],
)
def test_bfloat16_is_cut_as_tritons_interpreter_cuts_it(old, new, bits):
    """But for numbers with an exponent of zero, where Triton's makes another one."""
    width = np.iinfo(bits).bits
    drawn = np.random.default_rng(0).integers(0, 2**width, 100_000, dtype=bits)
    exponent = (drawn >> (width - 9)) & 0xFF
    drawn = drawn[exponent != 0]
    assert {0xFF, 1} <= set(exponent)  # infinities and NaN, and the smallest, are among them
    given = drawn.view(np.float32) if bits == np.uint32 else drawn
    found = tritons._convert_float(given, old, new, None)
    assert np.array_equal(found, interpreter._convert(given, old, new, None))
