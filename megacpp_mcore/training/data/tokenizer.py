"""A byte-level BPE tokenizer for C++, trained and used through the `tokenizers` library.

Every byte has a token, so that any UTF-8 text comes back unchanged. A token never crosses one of
these: a line break with the indentation after it, the path of an #include, a word with the space
before it, three digits, a run of punctuation (so `->` and `::` are tokens of their own).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import read_regular, write_atomically
from megacpp_mcore.training.data.files import DataError

EOD = "<|endoftext|>"
MAX_VOCAB_SIZE = 65536  # a .bin of ours is uint16
_LEAST = 257  # the bytes and the end of a document
_PIECES = (
    r"""(?:\r?\n)+[ \t]*|#[ \t]*include[ \t]*|<[\w./+-]+>|"[\w./+-]+\.[\w+]+"|"""
    r""" ?[A-Za-z_][A-Za-z0-9_]*|\d{1,3}| ?[^\s\w]+|[ \t]+|\s|\w+"""
)
_MOST_BYTES = 1 << 30


class TokenizerError(MegacppError):
    """A tokenizer that cannot be trained or read, or another than was asked for."""


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            "this needs the package tokenizers, which is not installed: "
            "pip install 'megacpp-mcore[tokenizer]'"
        ) from error
    return tokenizers


def train(texts: Iterable[bytes], vocab_size: int, path: Path, progress: bool) -> "TextTokenizer":
    """Train on `texts`, each a document, and write `path`, a `tokenizer.json`.

    Texts that are no UTF-8 are left out. The same texts give the same file. Raises TokenizerError
    for a vocabulary that is too small or too large, and where the texts do not fill it. Where it is
    interrupted (KeyboardInterrupt), the library's threads go on.
    """
    if not _LEAST <= vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"--vocab-size {vocab_size}: from {_LEAST} to {MAX_VOCAB_SIZE}")
    library = _library()
    made = library.Tokenizer(library.models.BPE())
    pieces = library.pre_tokenizers.Split(library.Regex(_PIECES), "isolated")
    as_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = library.pre_tokenizers.Sequence([pieces, as_bytes])
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOD], min_frequency=2, show_progress=progress,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    # The library takes texts in threads of its own and returns at the end: the main thread, in
    # which alone Python hears Ctrl-C, must not be in it.
    pool = ThreadPoolExecutor(1)
    trained = pool.submit(made.train_from_iterator, filter(None, map(_text, texts)), trainer)
    while not trained.done():
        wait([trained], timeout=0.2)  # without one, a signal just before it is heard at the end
    trained.result()
    if (there := made.get_vocab_size()) != vocab_size:
        raise TokenizerError(
            f"the sources have no {vocab_size} tokens that occur twice, only {there}: give more "
            f"text, or --vocab-size {there}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, made.to_str(pretty=True) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise TokenizerError(f"cannot write {path}: {error}") from error
    return TextTokenizer.read(path)


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a `tokenizer.json`. Raises TokenizerError."""
    try:
        return read_regular(path, most=_MOST_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise TokenizerError(f"cannot read the tokenizer {path}: {reason}") from error


def parsed(path: str | os.PathLike, data: bytes) -> Any:
    """The library's tokenizer of that content, to which text that spells a special token is text.

    Raises TokenizerError, which names `path`.
    """
    library = _library()
    try:
        json.loads(data)
        tokenizer = library.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is no tokenizer.json: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


class TextTokenizer:
    """A `tokenizer.json` in use. library: its tokenizers.Tokenizer. sha256: of the file; a dataset
    and a recipe record it."""

    def __init__(self, inner: Any, sha256: str) -> None:
        self.library, self.sha256 = inner, sha256
        self.vocab_size = int(inner.get_vocab_size())
        self.eod_id = inner.token_to_id(EOD)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "TextTokenizer":
        """Raises TokenizerError for a file that is none, or that has no end of document."""
        data = read_bytes(path)
        made = cls(parsed(path, data), hashlib.sha256(data).hexdigest())
        if made.eod_id is None:
            raise TokenizerError(f"{path} has no token {EOD}, which ends a document")
        if made.vocab_size > MAX_VOCAB_SIZE:
            raise TokenizerError(
                f"{path} has {made.vocab_size} tokens, at most {MAX_VOCAB_SIZE} fit in uint16"
            )
        return made

    def documents(self, texts: Sequence[bytes]) -> list[np.ndarray | None]:
        """uint16 tokens of each text followed by the end of document; None for what is no UTF-8.

        The library's threads share the work.
        """
        decoded = [_text(text) for text in texts]
        encoded = iter(self.library.encode_batch_fast(
            [text for text in decoded if text is not None], add_special_tokens=False
        ))  # fmt: skip
        return [None if text is None else self._ended(next(encoded).ids) for text in decoded]

    def _ended(self, ids: list[int]) -> np.ndarray:
        tokens = np.empty(len(ids) + 1, np.uint16)
        tokens[:-1] = ids
        tokens[-1] = self.eod_id
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens stand for, without ends of documents."""
        return self.library.decode([int(token) for token in tokens], skip_special_tokens=True)


def check_size(tokens: np.ndarray, most: int) -> None:
    """Raises DataError for a document longer than an `.idx` can describe."""
    if tokens.size > most:
        raise DataError(f"a document of {tokens.size} tokens is too long for an .idx; split it")
