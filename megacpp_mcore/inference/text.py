"""Tokens of a prompt, and the text of tokens as they come."""

import codecs
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megacpp_mcore.inference.recipe import InferenceError
from megacpp_mcore.training.data.text import BYTE_EOD_ID, BYTE_VOCAB_SIZE
from megacpp_mcore.training.data.tokenizer import parsed, read_bytes


class Decoder(Protocol):
    """Text that is complete after the next token: "" while a character is only begun."""

    def __call__(self, token: int) -> str: ...

    def end(self) -> str:
        """What is left, with U+FFFD for an unfinished character."""


class Bytes:
    """Byte-level tokens, as `megacpp data build` makes without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """surrogateescape: bytes of a file or an argument that are not UTF-8 stay themselves."""
        return list(text.encode("utf-8", "surrogateescape"))

    def decoder(self) -> "Decoder":
        return _ByteDecoder()

    def bytes_of(self, tokens: Sequence[int], eod: int) -> int:
        """Bytes of the text of tokens, ends of documents apart."""
        return int(np.count_nonzero(np.asarray(tokens) != eod))


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < 256 else ""

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class TokenizerFile:
    """A tokenizer.json as `megacpp data build` encodes with it. data: its content."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._tokenizer = parsed(path, data)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decoder(self) -> "Decoder":
        return _TokenDecoder(self._tokenizer)

    def bytes_of(self, tokens: Sequence[int], eod: int) -> int:
        """Bytes of the text of tokens, ends of documents apart."""
        text = [int(token) for token in tokens if token != eod]
        return len(self._tokenizer.decode(text, skip_special_tokens=False).encode())


class _TokenDecoder:
    """Decodes all tokens since the last complete text: a token may be part of a character."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self._pending = tokenizer, []

    def __call__(self, token: int) -> str:
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending, skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < 8:
            return ""
        self._pending = []
        return text

    def end(self) -> str:
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=False) if pending else ""


def check_tokenizer(file: Path, sha256: str | None) -> bytes:
    """The content of a tokenizer.json, which must be the one that the run was trained with.

    sha256: the recipe's data.tokenizer_sha256; None: not known. Raises InferenceError, and
    TokenizerError for a file that cannot be read.
    """
    data = read_bytes(file)
    if sha256 not in (None, found := hashlib.sha256(data).hexdigest()):
        raise InferenceError(
            f"the tokenizer {file} has sha256 {found}, but the run was trained with that of "
            f"{sha256} (data.tokenizer_sha256): name that file"
        )
    return data


def tokenizer_of(
    vocab_size: int, eod: int, file: Path | None, sha256: str | None = None
) -> Bytes | TokenizerFile:
    """The tokenizer in `file`, or else bytes, where documents end with 256.

    sha256: the recipe's data.tokenizer_sha256. Raises InferenceError where none is named or it is
    not that of the run, and TokenizerError for a file that is none.
    """
    if file is not None:
        return TokenizerFile(file, check_tokenizer(file, sha256))
    if sha256 is not None:
        raise InferenceError(
            f"the run was trained with the tokenizer of sha256 {sha256}: name its tokenizer.json "
            "with --tokenizer"
        )
    if eod != BYTE_EOD_ID or vocab_size < BYTE_VOCAB_SIZE:
        raise InferenceError(
            f"the model's vocabulary is {vocab_size} with end of document {eod}, which are not "
            "bytes: name its tokenizer.json with --tokenizer"
        )
    return Bytes()


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises InferenceError when a prompt has a token that the model does not know."""
    if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
        raise InferenceError(
            f"the tokenizer gives token {unknown[0]}, and the model's vocabulary is {vocab_size}: "
            "name the tokenizer that the run was trained with"
        )
