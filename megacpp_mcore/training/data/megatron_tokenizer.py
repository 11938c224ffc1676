"""Megatron's tokenizer object on a `tokenizer.json`, without the package transformers.

Megatron's HuggingFaceTokenizer takes a folder or a name of the hub and needs transformers. Where
`--tokenizer-model` names a .json file it is ours, with the ids that `megacpp data build` writes.
"""

from typing import Any

from megatron.core.tokenizers.text import libraries
from megatron.core.tokenizers.text.libraries.abstract_tokenizer import MegatronTokenizerTextAbstract

from megacpp_mcore.training.data.tokenizer import TextTokenizer, TokenizerError

_UNSERVED = ("chat_template", "vocab_file", "merges_file", "additional_special_tokens")


class TokenizerJson(MegatronTokenizerTextAbstract):
    """Text that spells a special token is text, as in the data: only the data's documents end."""

    pad = -1  # as NullTokenizer: no token of the data is padding
    chat_template = None

    def __init__(self, path: str, **options: Any) -> None:
        """options: of HuggingFaceTokenizer. Raises TokenizerError for what is not served."""
        if asked := [name for name in _UNSERVED if options.get(name)]:
            raise TokenizerError(f"the tokenizer {path} is used without {', '.join(asked)}")
        read = TextTokenizer.read(path)
        self._inner, self.vocab_size, self.eos = read.library, read.vocab_size, read.eod_id

    def text_to_ids(self, text: str) -> list[int]:
        """The ids that the text has in a dataset, without an end of document."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def ids_to_text(self, ids: list[int], remove_special_tokens: bool = False) -> str:
        """What ids stand for."""
        ids = [int(token) for token in ids]
        return self._inner.decode(ids, skip_special_tokens=remove_special_tokens)

    def text_to_tokens(self, text: str) -> list[str]:
        """Pieces of the vocabulary, whose characters stand for bytes."""
        return self._inner.encode(text, add_special_tokens=False).tokens

    def tokens_to_text(self, tokens: list[str]) -> str:
        """The text of such pieces."""
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """The ids of pieces; None for what is none."""
        return [self._inner.token_to_id(token) for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The pieces of ids; None for what is none."""
        return [self._inner.id_to_token(int(token)) for token in ids]

    def add_special_tokens(self, *_: Any) -> None:
        """Refused: the vocabulary is the dataset's."""
        raise TokenizerError("a dataset's tokenizer takes no more special tokens")

    @property
    def vocab(self) -> dict[str, int]:
        """Piece -> id."""
        return self._inner.get_vocab()

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Id -> piece."""
        return {number: piece for piece, number in self.vocab.items()}


def serve() -> None:
    """From here on Megatron reads a tokenizer.json so, in this process."""
    if not hasattr(libraries.HuggingFaceTokenizer, "of_hub"):
        _either.of_hub = libraries.HuggingFaceTokenizer
        libraries.HuggingFaceTokenizer = _either


def _either(path: str, **options: Any) -> Any:
    kind = TokenizerJson if path.endswith(".json") else _either.of_hub
    return kind(path, **options)
