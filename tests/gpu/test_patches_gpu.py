"""The patches that are about GPU kernels, with the kernels: each script of reproducers/ shows the
defect on the packages as they came, and none with the lane (patches/reproducers/ does on a CPU)."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megacpp_mcore.patching import manifest, state, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
SCRIPTS = Path(__file__).parent / "reproducers"
PATCHES = ("mla-rope-head-mask", "mimo-grouped-backward", "saved-tensors-once")


@pytest.mark.timeout(600)  # two fresh processes, which compile the scan's kernels
@pytest.mark.parametrize("name", PATCHES)
def test_the_defect_shows_on_the_gpu_without_the_lane_and_not_with_it(name):
    lane = manifest.load()
    (patch,) = lane.select([name])
    if state.read(lane, patch.package, None).installed is None:
        pytest.skip(f"{patch.package} is not installed")
    if name == "mimo-grouped-backward" and find_spec("tilelang") is None:
        pytest.skip("its kernels are TileLang's, which is not installed")
    on_gpu = replace(patch, test=str(SCRIPTS / patch.test), needs="gpu")
    changed = replace(lane, patches=tuple(on_gpu if p.id == name else p for p in lane.patches))
    (proof,) = verify.verify(changed, only=[name])
    seen = f"{proof.reason}\n{proof.pristine}\n{proof.patched}"
    assert proof.verdict == verify.PROVED, seen
    print(f"{name}: without: {proof.pristine.saw}; with: {proof.patched.saw}")
