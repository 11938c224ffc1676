"""An H200's rates, as the planner uses them: measured rates and stated assumptions.

h200.json is written by `megacpp_mcore.planner.calibrate` from committed receipts; every number
names its receipt. assumptions.json has what no receipt says, with the reason for each value.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Entries = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Rates:
    """measured, assumed: name -> {value, unit, receipt and how, or why}."""

    measured: Entries
    assumed: Entries

    def __getitem__(self, name: str) -> float:
        """A value by name. Raises KeyError."""
        return (self.measured.get(name) or self.assumed[name])["value"]

    @property
    def usable_memory(self) -> float:
        """Bytes of an H200 that tensors may take."""
        return self["memory"] - self["reserve"]


@functools.cache
def h200() -> Rates:
    return Rates(_read("h200.json"), _read("assumptions.json"))


def assumptions() -> Entries:
    return _read("assumptions.json")


def _read(name: str) -> dict[str, Any]:
    return json.loads((importlib.resources.files(__package__) / name).read_text())
