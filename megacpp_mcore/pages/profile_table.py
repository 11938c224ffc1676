"""The table of a profiled step."""

import collections
from pathlib import Path

from megacpp_mcore.pages.tables import link, table
from megacpp_mcore.receipts.kernel_families import family
from megacpp_mcore.receipts.reader import Receipt, read


def profile(words: str, folder: Path) -> str:
    """What the kernels of a profiled step do, a row a kind of work. words: the run's receipt."""
    name = words.strip()
    run = read(folder / f"{name}.json")
    found, kinds = run["profile"], collections.defaultdict(lambda: [0.0, 0])
    for kernel in found["kernels"]:
        total = kinds[family(kernel["name"])]
        total[0] += kernel["ms"]
        total[1] += kernel["launches"]
    passes = _micro_batches(run)
    rows = [
        [kind, f"{ms / passes:.2f}", f"{launches / passes:,.1f}"]
        for kind, (ms, launches) in sorted(kinds.items(), key=lambda kind: -kind[1][0])
    ]
    idle = found["span_ms"] - found["busy_ms"]
    rows += [
        ["an exchange between GPUs and nothing else",
         f"{(found['busy_ms'] - found['compute_ms']) / passes:.2f}", ""],
        ["nothing", f"{idle / passes:.2f}", ""],
        ["from the first to the last", f"{found['span_ms'] / passes:.2f}", ""],
    ]  # fmt: skip
    head = ["kernels", "ms a micro batch", "launches a micro batch"]
    return f"{link('Its receipt', name)}, step {found['step']}:\n\n{table(head, rows)}"


def _micro_batches(run: Receipt) -> int:
    """Of one rank, in a step."""
    schedule, ranks = run["recipe"]["content"]["schedule"], run["topology"]["dp"]
    return schedule["global_batch_size"] // (schedule["micro_batch_size"] * ranks)
