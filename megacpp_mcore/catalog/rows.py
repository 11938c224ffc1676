"""All rows of the kernel catalog, as data."""

from megacpp_mcore.catalog.attention import CORE_ATTENTION, ROPE_QK
from megacpp_mcore.catalog.head import HEAD
from megacpp_mcore.catalog.mixers import M2RNN, MAMBA3_SCAN, MLA, PREP
from megacpp_mcore.catalog.parts import LINEAR, MOE_EXPERTS, NORM, RESIDUAL
from megacpp_mcore.catalog.row import Keep, Role, Row

__all__ = ["ROWS", "Keep", "Role", "Row"]

ROWS: tuple[Row, ...] = (
    *(LINEAR + NORM + MOE_EXPERTS + CORE_ATTENTION + ROPE_QK + MLA),
    *(MAMBA3_SCAN + PREP + M2RNN + HEAD + RESIDUAL),
)
