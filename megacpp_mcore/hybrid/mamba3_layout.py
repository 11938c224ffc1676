"""How the Mamba-3 mixer's weights are laid out over tensor-parallel ranks."""

from dataclasses import dataclass
from typing import get_args, get_type_hints

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.block_settings import Mamba3Settings
from megacpp_mcore.hybrid.row_padding import row_padding

IN_PROJ_PARTS = ("z", "x", "B", "C", "dt", "A", "trap", "angle")


def in_proj_rows[N: (int, float)](
    *, heads: N, head_dim: int, state_dim: int, groups: N, rank: int, angles: N
) -> tuple[N, ...]:
    """How many rows each of IN_PROJ_PARTS has, of a whole model's heads or a rank's."""
    inner, group_rows = heads * head_dim, groups * rank * state_dim
    return inner, inner, group_rows, group_rows, heads, heads, heads, angles


class Mamba3MixerError(MegacppError):
    """A config, parallel layout or call that the Mamba-3 mixer does not support."""


@dataclass(frozen=True)
class Mamba3Layout:
    """Sizes of the mixer on this rank. in_proj: the rank's rows of each of IN_PROJ_PARTS. padding:
    rows of zeros after them (`row_padding`)."""

    tp: int
    heads: int
    first_head: int
    local_heads: int
    head_dim: int
    state_dim: int
    groups: int
    rank: int
    angles: int
    in_proj: tuple[int, ...]
    padding: int

    @classmethod
    def of(cls, config, settings: Mamba3Settings, pg_collection) -> "Mamba3Layout":
        """Raises Mamba3MixerError for sizes that the mixer does not support."""
        _check_settings(settings)
        if config.context_parallel_size > 1:
            raise Mamba3MixerError(
                f"context_parallel_size is {config.context_parallel_size}: the Mamba-3 mixer needs "
                "the whole sequence on each rank; use 1, and tensor or sequence parallelism instead"
            )
        if config.mamba_num_heads is None:
            raise Mamba3MixerError(
                "mamba_num_heads is not set; the Mamba-3 mixer has no default for it"
            )
        tp, tp_rank = pg_collection.tp.size(), pg_collection.tp.rank()
        heads, groups, state_dim = (
            config.mamba_num_heads, config.mamba_num_groups, config.mamba_state_dim
        )  # fmt: skip
        rank, angles = settings.rank, settings.angles(state_dim)
        group_rows = groups * rank * state_dim
        if state_dim % 2 or not 1 <= angles <= state_dim // 2:
            raise Mamba3MixerError(
                f"mamba_state_dim {state_dim} with rope_fraction {settings.rope_fraction} rotates "
                f"{angles} pairs; the state dim must be even, and the pairs 1 to {state_dim // 2}"
            )
        if heads % groups:
            raise Mamba3MixerError(
                f"mamba_num_heads {heads} must be a multiple of mamba_num_groups {groups}"
            )
        for what, size in (
            ("mamba_num_heads", heads),
            ("mamba_num_groups * rank * mamba_state_dim", group_rows),
            ("the number of angles, mamba_state_dim * rope_fraction / 2,", angles),
        ):
            if size % tp:
                raise Mamba3MixerError(
                    f"{what} is {size}, which does not divide over {tp} tensor-parallel ranks"
                )
        rows = in_proj_rows(
            heads=heads, head_dim=config.mamba_head_dim, state_dim=state_dim, groups=groups,
            rank=rank, angles=angles,
        )  # fmt: skip
        in_proj = tuple(size // tp for size in rows)
        return cls(
            tp=tp,
            heads=heads,
            first_head=tp_rank * (heads // tp),
            local_heads=heads // tp,
            head_dim=config.mamba_head_dim,
            state_dim=state_dim,
            groups=groups,
            rank=rank,
            angles=angles,
            in_proj=in_proj,
            padding=row_padding(in_proj),
        )

    @property
    def groups_are_split(self) -> bool:
        """Each rank holds whole groups, those of its heads."""
        return self.groups % self.tp == 0

    @property
    def scan_groups(self) -> int:
        """The scan's number of groups: one per local head when groups are not split."""
        return self.groups // self.tp if self.groups_are_split else self.local_heads

    @property
    def local_head_groups(self) -> list[int]:
        """The group of each of this rank's heads."""
        per_group = self.heads // self.groups
        return [(self.first_head + head) // per_group for head in range(self.local_heads)]


def _check_settings(settings: Mamba3Settings) -> None:
    hints = get_type_hints(Mamba3Settings)
    for field in ("variant", "decay"):
        value, allowed = getattr(settings, field), get_args(hints[field])
        if value not in allowed:
            raise Mamba3MixerError(f"{field} {value!r} is not one of {', '.join(allowed)}")
