"""The datasets that a recipe names: parsed, and checked before torch or Megatron is imported."""

import math
import os
from collections.abc import Sequence

from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training.data.files import DataError, TokenFiles, read_pair


def check_data(recipe: Recipe) -> None:
    """Refuse a dataset that is absent, truncated, or built with another vocabulary.

    Runs before the model is built. The vocabulary is read from the manifest next to the pair, not
    from the tokens, because reading a large corpus takes minutes. Raises DataError.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    if data.tokenizer_json:
        _check_tokenizer(recipe, data.tokenizer_json)
    for prefix in prefixes(recipe):
        manifest = read_pair(prefix).manifest
        if manifest is None:
            continue
        made, asked = (manifest.get("tokenizer") or {}).get("sha256"), data.tokenizer_sha256
        if made != asked:
            raise DataError(
                f"{prefix}.json says that its tokenizer's sha256 is {made or 'none, bytes'}, the "
                f"recipe that it is {asked or 'none'}: set data.tokenizer_sha256="
                f"{made or 'null'}, or name another dataset"
            )
        if manifest["vocab_size"] > vocab_size:
            raise DataError(
                f"{prefix}.json says vocab_size {manifest['vocab_size']}, the recipe has "
                f"model.vocab_size {vocab_size}: some tokens would have no embedding"
            )
        eod_id = data.null_tokenizer_eod_id
        eod_id = vocab_size - 1 if eod_id is None else eod_id  # as Megatron's NullTokenizer
        known = data.tokenizer_type == "NullTokenizer" or data.tokenizer_json
        if known and manifest["eod_id"] != eod_id:
            raise DataError(
                f"{prefix}.json says documents end with token {manifest['eod_id']}, the recipe "
                f"with {eod_id}: set data.null_tokenizer_eod_id={manifest['eod_id']}"
            )


def _check_tokenizer(recipe: Recipe, path: str) -> None:
    """Refuse a tokenizer.json that is not the one the recipe tells of."""
    from megacpp_mcore.training.data.tokenizer import TextTokenizer

    read = TextTokenizer.read(path)
    told = {
        "data.tokenizer_sha256": (recipe.data.tokenizer_sha256, read.sha256),
        "data.null_tokenizer_eod_id": (recipe.data.null_tokenizer_eod_id, read.eod_id),
        "model.vocab_size": (recipe.model.vocab_size, read.vocab_size),
    }
    for key, (asked, there) in told.items():
        if asked != there:
            raise DataError(f"{path} has {there}, the recipe {key}={asked}: set {key}={there}, or "
                            "name another data.tokenizer_model")  # fmt: skip


def prefixes(recipe: Recipe) -> list[str]:
    """Every dataset prefix of the recipe, without the weights of blends. Raises DataError."""
    data = recipe.data
    named = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return [prefix for path in named if path for prefix in parse_data_path(path)[0]]


def parse_data_path(
    data_path: str | os.PathLike | Sequence[str],
) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights), parsed by Megatron's rule for `--data-path`."""
    if isinstance(data_path, str | os.PathLike):
        return [os.fspath(data_path)], None
    parts = [str(part).strip() for part in data_path]
    if not parts:
        raise DataError("data path is empty: name at least one dataset prefix")
    weights = [_number(part) for part in parts[::2]]
    if len(parts) % 2 or all(weight is None for weight in weights):
        return parts, None
    for part, weight in zip(parts[::2], weights, strict=True):
        if weight is None or not math.isfinite(weight) or weight <= 0:
            raise DataError(
                f"data path {' '.join(parts)}: {part!r} is not a weight; give prefixes only, or a "
                f"positive weight before each"
            )
    return parts[1::2], weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_checked(prefix: str, vocab_size: int, eod_id: int) -> TokenFiles:
    """A pair whose every token is below vocab_size, and whose documents end with eod_id.

    Raises DataError.
    """
    if not 0 <= eod_id < vocab_size:
        raise DataError(
            f"end-of-document id {eod_id} is outside the vocabulary, 0..{vocab_size - 1}"
        )
    pair = read_pair(prefix, vocab_size)
    if pair.manifest is not None and pair.manifest["eod_id"] != eod_id:
        raise DataError(
            f"{prefix}.json says documents end with token {pair.manifest['eod_id']}, {eod_id} was "
            f"asked for"
        )
    return pair
