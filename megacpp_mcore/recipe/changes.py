"""How two resolved recipes differ, and with which differences a run may be resumed.

A resolved recipe is `Recipe.to_dict()`, section -> key -> value, as a receipt has it.
"""

import json
from collections.abc import Mapping
from typing import Any

from megacpp_mcore.recipe.source import BACKENDS, KEYS

# Keys in which a resumed run may differ from its checkpoint: its length, and how often it logs and
# saves.
MAY_CHANGE = ("schedule.train_iters", "schedule.log_interval", "checkpoint.save_interval")


# Sections and keys with which a run on GPUs computes the same, but for roundings: how it is spread
# over them, and where and how it is saved. The other keys of [checkpoint] decide what is loaded, or
# which learning rates follow.
_LAYOUT = (
    "parallel", "recompute", "launch", "schedule.micro_batch_size", "checkpoint.save",
    "checkpoint.load", "checkpoint.save_retain_interval", "checkpoint.keep_latest",
    "checkpoint.verify_checksums", "checkpoint.exit_on_missing_checkpoint", "checkpoint.async_save",
    "checkpoint.use_persistent_ckpt_worker", "checkpoint.ckpt_fully_parallel_load",
    "checkpoint.dist_ckpt_optim_fully_reshardable",
)  # fmt: skip
_NO_LAYOUT = ("parallel.use_distributed_optimizer", "launch.device")  # other checkpoints


def refused_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, layout: bool = True
) -> str | None:
    """What of the resolved recipe `now` a run cannot be resumed with, key by key, or None.

    before: the recipe that it began with. The keys of MAY_CHANGE may differ, and with `layout`, as
    for a run on GPUs, how it is spread over them and saved. A key that the run's release did not
    have may have its default, which stands for what that release did.
    """
    found = (
        _refusal(before, key, old, new)
        for key, (old, new) in changed_keys(before, now).items()
        if key not in MAY_CHANGE and not (layout and _is_layout(key, old, new))
    )
    return "; ".join(filter(None, found)) or None


def _refusal(before: Mapping[str, Any], key: str, old: Any, new: Any) -> str | None:
    section, _, name = key.partition(".")
    if key not in KEYS and section != BACKENDS:
        return f"{key} was {old!r}, and this release has no such key"
    if section == BACKENDS or name in before.get(section, {}):
        return f"{key} was {old!r} and is {new!r}"
    if not KEYS[key].required and new == json.loads(json.dumps(KEYS[key].default)):
        return None
    return f"{key} is {new!r}, and the release that began the run had no such key"


def _is_layout(key: str, old: Any, new: Any) -> bool:
    if key == "model.pattern":
        return _uncut(old) == _uncut(new)
    return key not in _NO_LAYOUT and (key in _LAYOUT or key.partition(".")[0] in _LAYOUT)


def _uncut(pattern: str | None) -> str | None:
    """Without the ends of pipeline stages."""
    return pattern and pattern.replace("|", "")


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now) of two resolved recipes, section -> key -> value."""
    changed = {}
    for section in sorted(set(before) | set(now)):
        old, new = before.get(section, {}), now.get(section, {})
        for key in sorted(set(old) | set(new)):
            if old.get(key) != new.get(key):
                changed[f"{section}.{key}"] = (old.get(key), new.get(key))
    return changed
