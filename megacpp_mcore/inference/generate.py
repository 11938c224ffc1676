"""Generate token by token: M and R carry states from token to token, attention a cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.inference.context import GenerationContext
from megacpp_mcore.inference.recipe import InferenceError
from megacpp_mcore.inference.sampling import Sampling

PIECE = 2048  # tokens of a prompt that run at once, which bounds the memory of long prompts


@dataclass(frozen=True)
class Token:
    """The next token of one prompt. logprob: of the model, in nats, before temperature and cuts."""

    row: int
    id: int
    logprob: float


@torch.no_grad()
def fill(
    model, prompts: Sequence[Sequence[int]], capacity: int
) -> tuple[GenerationContext, Tensor]:
    """Run prompts of any lengths through the model, each on its own, in pieces of PIECE tokens.

    Returns the context with a row per prompt and room for `capacity` tokens each, and the logits of
    the next tokens, (rows, V). Raises InferenceError for an empty prompt.
    """
    device = next(model.parameters()).device
    contexts, logits = [], []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InferenceError(f"prompt {number + 1} has no token")
        context = GenerationContext(1, capacity, device)
        tokens = torch.tensor([list(prompt)], device=device)
        for piece in tokens.split(PIECE, 1):
            last = model.next_token_logits(piece, context, last_only=True)
            context.advance(piece.shape[1])
        contexts.append(context)
        logits.append(last[:, -1])
    joined = contexts[0] if len(contexts) == 1 else GenerationContext.joined(contexts)
    return joined, torch.cat(logits)


class Generation:
    """Texts that are generated together. context: the states, once `tokens` has begun."""

    def __init__(
        self, model, prompts: Sequence[Sequence[int]], *, max_tokens: int, eod: int,
        vocab_size: int, sampling: Sampling, seed: int,
    ) -> None:  # fmt: skip
        """max_tokens: of each prompt's text, at most. eod: ends a text, and is not a part of it.
        vocab_size: ids from it on pad the embedding and are never chosen. seed: prompt n draws with
        seed + n, so that its text does not depend on the others."""
        if max_tokens < 1:
            raise InferenceError(f"--max-tokens {max_tokens}: at least 1 is needed")
        self.model, self.prompts, self.sampling = model, prompts, sampling
        self.max_tokens, self.eod, self.vocab_size = max_tokens, eod, vocab_size
        self.context: GenerationContext | None = None
        self._generators = [
            torch.Generator().manual_seed(seed + row) for row in range(len(prompts))
        ]

    @torch.no_grad()
    def tokens(self) -> Iterator[Token]:
        """Every token as it is chosen, prompt by prompt within a step; the end of document is the
        last one of a row."""
        capacity = max(map(len, self.prompts)) + self.max_tokens
        self.context, logits = fill(self.model, self.prompts, capacity)
        open_rows = set(range(len(self.prompts)))
        for step in range(self.max_tokens):
            chosen = torch.full((len(self.prompts), 1), self.eod)
            for row in sorted(open_rows):
                token = self._choose(row, logits[row])
                chosen[row] = token.id
                if token.id == self.eod:
                    open_rows.remove(row)
                yield token
            if not open_rows or step + 1 == self.max_tokens:
                return
            logits = self.model.next_token_logits(chosen.to(logits.device), self.context)[:, -1]
            self.context.advance(1)

    def _choose(self, row: int, logits: Tensor) -> Token:
        logits = logits[: self.vocab_size].float()
        if not torch.isfinite(logits).all():
            raise InferenceError("the model's logits are not finite: its weights are damaged")
        token = self.sampling.draw(logits, self._generators[row])
        return Token(row, token, float(logits.log_softmax(0)[token]))
