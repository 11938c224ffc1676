"""All rows of the kernel catalog, as data."""

from megacpp_mcore.catalog_attention import CORE_ATTENTION, ROPE_QK
from megacpp_mcore.catalog_mixers import COMPILED, M2RNN, MAMBA3_SCAN, MLA
from megacpp_mcore.catalog_parts import HEAD, LINEAR, MOE_EXPERTS, NORM, RESIDUAL
from megacpp_mcore.catalog_row import Keep, Role, Row

__all__ = ["ROWS", "Keep", "Role", "Row"]

ROWS: tuple[Row, ...] = (
    *(LINEAR + NORM + MOE_EXPERTS + CORE_ATTENTION + ROPE_QK + MLA),
    *(MAMBA3_SCAN + COMPILED + M2RNN + HEAD + RESIDUAL),
)
