"""The tiles of a cluster of the experts' products: csrc/tiles.cuh, compiled for the host."""

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from megacpp_mcore.kernels.moe_experts import hopper_products

_SOURCE = Path(__file__).with_name("moe_tiles.cpp")
_WIDTH = 256  # columns of a tile


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    folder = hopper_products.LIBRARY.source.parent
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run([compiler, *flags, "-o", path, _SOURCE], check=True)
    return ctypes.CDLL(str(path))


def walks(function, ends, *sizes, clusters):
    """Every cluster's tiles: (expert, column, ((first row, end of the rows) of both blocks))."""
    out = (ctypes.c_int * 600_000)()
    found = []
    for cluster in range(clusters):
        count = function((ctypes.c_int * len(ends))(*ends), *sizes, cluster, clusters, out)
        rows = [out[6 * i : 6 * i + 6] for i in range(count)]
        found.append([(e, c, ((a, b), (x, y))) for e, c, a, b, x, y in rows])
    return found


def drawn(experts, most):
    return list(accumulate(128 * random.randint(0, most) for _ in range(experts)))


CASES = {
    "nam56r": ([4096 + 128 * (e % 2) for e in range(16)], 7, 66),
    "none": ([0, 0, 0], 2, 3),
    "odd": ([128, 0, 384, 640], 3, 5),
    "one-cluster": ([128, 256, 384], 2, 1),
    "more-clusters-than-tiles": ([128, 256], 1, 66),
}


@pytest.mark.parametrize("case", [*CASES, *range(40)])
def test_every_value_is_computed_once_and_no_cluster_has_much_more(case, tiles):
    if case in CASES:
        sizes, across, clusters = CASES[case]
        ends = list(accumulate(sizes))
    else:
        ends = drawn(random.randint(1, 30), random.choice([1, 3, 40]))
        across, clusters = random.randint(1, 14), random.choice([1, 2, 7, 54, 66])
    n = across * _WIDTH - random.choice([0, 32])
    found = walks(tiles.tiles_of_rows, ends, len(ends), n, clusters=clusters)
    computed = Counter()
    for expert, column, blocks in (tile for walk in found for tile in walk):
        begin = ends[expert - 1] if expert else 0
        for first, end in blocks:
            assert begin <= first and end <= ends[expert]
            computed.update((row, column) for row in range(first, end, 64))
    columns = range(0, across * _WIDTH, _WIDTH)
    assert computed == Counter((row, c) for row in range(0, ends[-1], 64) for c in columns)
    # In units of 64 rows a block: a pair of tiles takes two, and so are they dealt out.
    loads = [sum((b - a) // 64 for _, _, ((a, b), _) in walk) for walk in found]
    assert max(loads) - min(loads) <= 2
    assert max(loads) <= -(-sum(loads) // clusters) + 1


@pytest.mark.parametrize("span", [(0, 5), (2, 5), (0, 1)])
def test_weights_have_pairs_alone(span, tiles):
    ends, m, n, clusters = drawn(5, 3), 384, 512, 3
    found = walks(tiles.tiles_of_weights, ends, *span, m, n, clusters=clusters)
    pairs = [(e, c, a) for walk in found for e, c, ((a, _), (b, _)) in walk if b == a + 128]
    rows, columns = range(0, m, 256), range(0, n, _WIDTH)
    wanted = [(e, c, row) for e in range(*span) for row in rows for c in columns]
    assert sorted(pairs) == sorted(wanted) and sum(map(len, found)) == len(wanted)
    assert [len(walk) for walk in found] == [len(wanted[i::clusters]) for i in range(clusters)]
