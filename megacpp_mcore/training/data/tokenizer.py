"""A byte-level BPE tokenizer for C++, trained and used through the `tokenizers` library.

Every byte has a token, so that any UTF-8 text comes back unchanged. A token never crosses one of
these: a line break with the indentation after it, the path of an #include, a word with the space
before it, three digits, a run of punctuation (so `->` and `::` are tokens of their own).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
_END_OF_LINE = re.compile(r"[^\r\n](?=\r?\n)")
_MOST_BYTES = 1 << 30
_MOST_AT_ONCE = 1 << 18  # bytes of text that are encoded at once


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
        self._cuts_lines = _cuts_lines(json.loads(inner.to_str()))

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

        The library's threads share the work. What it makes of a text is some 70 times as large, so
        it gets _MOST_AT_ONCE bytes at once: a longer text in parts, where it cannot matter.
        """
        return [tokens for group in _groups(texts) for tokens in self._documents(group)]

    def _documents(self, texts: Sequence[bytes]) -> list[np.ndarray | None]:
        decoded = [_text(text) for text in texts]
        if len(texts) == 1 and len(texts[0]) > _MOST_AT_ONCE and self._cuts_lines:
            return [None if text is None else self._long(text) for text in decoded]
        encoded = iter(self._encoded([text for text in decoded if text is not None]))
        return [None if text is None else self._ended(next(encoded).ids) for text in decoded]

    def _encoded(self, texts: list[str]) -> list[Any]:
        return self.library.encode_batch_fast(texts, add_special_tokens=False)

    def _long(self, text: str) -> np.ndarray:
        """Of a text that is encoded in parts."""
        parts = [
            np.array(encoded.ids, np.uint16)
            for part in _parts(text, _MOST_AT_ONCE // 4)  # a character has 4 bytes at most
            for encoded in self._encoded([part])
        ]
        return self._ended(np.concatenate(parts))

    def _ended(self, ids: list[int] | np.ndarray) -> np.ndarray:
        tokens = np.empty(len(ids) + 1, np.uint16)
        tokens[:-1] = ids
        tokens[-1] = self.eod_id
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens stand for, without ends of documents."""
        return self.library.decode([int(token) for token in tokens], skip_special_tokens=True)


def _cuts_lines(about: dict[str, Any]) -> bool:
    """Whether no token of the tokenizer.json reaches over the begin of a line break: of ours."""
    first = ((about["pre_tokenizer"] or {}).get("pretokenizers") or [{}])[0]
    return first.get("pattern") == {"Regex": _PIECES} and about["normalizer"] is None


def _parts(text: str, least: int) -> Iterator[str]:
    """The text cut before line breaks: parts of at least so many characters, and of as few more as
    the line has."""
    begin = 0
    while begin < len(text):
        found = _END_OF_LINE.search(text, begin + least)
        end = found.end() if found else len(text)
        yield text[begin:end]
        begin = end


def _groups(texts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The texts in order, in groups of _MOST_AT_ONCE bytes at most or of one text."""
    group, size = [], 0
    for text in texts:
        if group and size + len(text) > _MOST_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def check_size(tokens: np.ndarray, most: int) -> None:
    """Raises DataError for a document longer than an `.idx` can describe."""
    if tokens.size > most:
        raise DataError(f"a document of {tokens.size} tokens is too long for an .idx; split it")
