"""The tables of docs/kernels.md: every surface with its backends, from the catalog."""

import importlib
from typing import Any

from megacpp_mcore import catalog
from megacpp_mcore.surfaces.registry import REGISTRY


def surfaces() -> str:
    """A heading and a table a surface."""
    rows = catalog.rows()
    return "\n\n".join(_surface(name, rows) for name in REGISTRY)


def _surface(name: str, rows: list[dict[str, Any]]) -> str:
    module = importlib.import_module(f"megacpp_mcore.surfaces.{name}")
    about = " ".join(module.__doc__.partition("\n\n")[0].split()).partition(": ")[2]
    blocks = ", ".join(REGISTRY[name].blocks) or REGISTRY[name].outside
    lines = [f"### {name}", "", f"{about[:1].upper()}{about[1:]} Of {blocks}.", "",
             "| backend | role | removes | dtypes | falls back to | measured | leaves when |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    opt_in = {backend.name for backend in REGISTRY[name].backends if backend.opt_in is True}
    for row in rows:
        if row["surface"] == name:
            role = row["role"] + (", only where named" if row["backend"] in opt_in else "")
            measured = _link(row) or f"no receipt: {row['no_receipt']}"
            lines.append(_line(
                f"`{row['backend']}`", role, row["removes"], row["dtypes"],
                f"`{row['fallback']}`" if row["fallback"] else "", measured, row["exit_when"],
            ))  # fmt: skip
    return "\n".join(lines)


def _link(row: dict[str, Any]) -> str:
    """The receipt, with the figures of it that the catalog shows."""
    if not row["receipt"]:
        return ""
    link = f"[{row['receipt'].rpartition('/')[2].removesuffix('.json')}]({row['receipt']})"
    return "; ".join([link, *row["figures"]])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
