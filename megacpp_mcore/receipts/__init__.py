"""Receipts: one JSON file per training run or bench, evidence that others can check.

`writer` and `run` make them, `reader` reads them, `checks` and the JSON Schema say what is valid;
`show`, `compare` (by the rules of `judge`) and `plot` are what `megacpp report` prints and draws.
"""

from megacpp_mcore.receipts.checks import ReceiptError, schema, validate
from megacpp_mcore.receipts.reader import read, receipt_of
from megacpp_mcore.receipts.writer import (
    ReceiptWriteError,
    bench_receipt,
    bench_row,
    plan_entry,
    receipt_head,
    recipe_entry,
    write,
)

__all__ = [
    "ReceiptError", "ReceiptWriteError", "bench_receipt", "bench_row", "plan_entry", "read",
    "receipt_head", "receipt_of", "recipe_entry", "schema", "validate", "write",
]  # fmt: skip
