"""`megacpp generate`: continue a prompt with a trained model."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError

_EPILOG = """\
examples:
  megacpp generate runs/nam56r-tiny --prompt '#include <'
  megacpp generate runs/nam56r-tiny --prompt-file main.cpp --temperature 0 --max-tokens 400
  megacpp generate runs/nam56r-tiny --prompt 'int ' --prompt 'template <' --seed 7 --json

A prompt is the start of a document: before it the model sees the end of another one. Text is
printed as it is generated; several prompts are continued together and printed one by one.
"""


def register(subparsers: Any) -> None:
    """Add `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Load a checkpoint of a run, of the CPU or of GPUs and of any layout, on one "
        "device, and write the model's continuation of each prompt. M and R carry states of fixed "
        "size, MLA a cache of latents.",
        epilog=_EPILOG,
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", dest="prompts", metavar="TEXT", action="append", default=[],
        help="text to continue; may be given again (default: a document's start)")  # fmt: skip
    add("--prompt-file", dest="files", metavar="FILE", action="append", default=[],
        help="a file with a prompt, - for the standard input; may be given again")  # fmt: skip
    add("--max-tokens", type=int, default=256, metavar="N",
        help="at most N tokens a prompt, less where the document ends (default: 256)")  # fmt: skip
    add("--temperature", type=float, default=0.8, metavar="T",
        help="0: always the likeliest token (default: 0.8)")  # fmt: skip
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens (default: all)")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="choose among the likeliest with probability P together (default: 1)")  # fmt: skip
    add("--seed", type=int, default=1234, metavar="S", help="of the choices (default: 1234)")
    add("--json", action="store_true",
        help="print prompts, tokens, texts, log-probabilities, speed and state sizes")  # fmt: skip
    parser.set_defaults(run=run)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and how it is loaded, for every command that runs a trained model."""
    add = parser.add_argument
    add("run_folder", metavar="RUN", type=Path, help="the --out folder of `megacpp train`")
    add("--iteration", type=int, metavar="N", help="checkpoint of step N (default: the newest)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--dtype", choices=("fp32", "bf16"),
        help="of the weights (default: fp32 on a CPU, the run's own on a GPU)")  # fmt: skip
    add("--tokenizer", type=Path, metavar="FILE",
        help="tokenizer.json of the run's data, where tokens are not bytes")  # fmt: skip


def device_of(args: argparse.Namespace) -> str:
    """The device that is asked for, else the GPU if there is one. Imports torch."""
    import torch

    found = torch.cuda.is_available()
    if args.device == "cuda" and not found:
        raise MegacppError("--device cuda: torch sees no CUDA device on this machine; use cpu")
    return args.device or ("cuda" if found else "cpu")


def run(args: argparse.Namespace) -> int:
    """Generate; print text as it is generated, or JSON at the end."""
    from megacpp_mcore.inference.trained import trained

    source = trained(args.run_folder, args.iteration)
    texts = [*args.prompts, *map(_read, args.files)] or [""]
    from megacpp_mcore.inference import loading  # imports torch
    from megacpp_mcore.inference.sampling import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    with loading.loaded(source, device=device_of(args), dtype=args.dtype) as loaded:
        return _write(args, source, loaded, texts, sampling)


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise MegacppError(f"--prompt-file {name}: {error}") from error
    return data.decode("utf-8", "surrogateescape")


def _write(
    args: argparse.Namespace, source: Any, loaded: Any, texts: list[str], sampling: Any
) -> int:  # fmt: skip
    from megacpp_mcore.inference.generate import Generation
    from megacpp_mcore.inference.text import check_ids, tokenizer_of

    vocab_size = loaded.recipe.model.vocab_size
    tokenizer = tokenizer_of(vocab_size, loaded.eod, args.tokenizer, source.tokenizer_sha256)
    prompts = [[loaded.eod, *tokenizer.encode(text)] for text in texts]
    for prompt in prompts:
        check_ids(prompt, vocab_size)
    generation = Generation(
        loaded.model, prompts, max_tokens=args.max_tokens, eod=loaded.eod, vocab_size=vocab_size,
        sampling=sampling, seed=args.seed,
    )  # fmt: skip
    printer = _Printer(texts, tokenizer, stream=not args.json)
    rows: list[list[Any]] = [[] for _ in prompts]
    started = time.perf_counter()
    for token in generation.tokens():
        if not rows[token.row] and token.row == 0:
            first = time.perf_counter()  # the prompts are filled
        rows[token.row].append(token)
        if token.id != loaded.eod:
            printer.token(token.row, token.id)
    printer.end()
    ended = time.perf_counter()
    sizes = generation.context.state_bytes()
    written = sum(map(len, rows))
    if args.json:
        _print_json(texts, rows, printer.texts, loaded.eod, sizes, first - started, ended - first)
    else:
        print(
            f"megacpp: {written} tokens in {ended - first:.2f} s after {first - started:.2f} s for "
            f"the prompt; states of M and R {sizes['recurrent']:,} bytes, cache of attention "
            f"{sizes['cache_per_token']:,} bytes a token",
            file=sys.stderr,
        )
    return 0


class _Printer:
    """Prints the first prompt's text as it is generated, the others' at the end."""

    def __init__(self, prompts: list[str], tokenizer: Any, stream: bool) -> None:
        self.texts = [""] * len(prompts)
        self._decoders = [tokenizer.decoder() for _ in prompts]
        self._prompts, self._stream = prompts, stream
        self._show(prompts[0])

    def token(self, row: int, token: int) -> None:
        self._add(row, self._decoders[row](token))

    def end(self) -> None:
        for row, decoder in enumerate(self._decoders):
            self._add(row, decoder.end())
        self._show("\n")
        for row in range(1, len(self.texts)):
            self._show(f"\n--- prompt {row + 1}\n{self._prompts[row]}{self.texts[row]}\n")

    def _add(self, row: int, text: str) -> None:
        self.texts[row] += text
        if row == 0:
            self._show(text)

    def _show(self, text: str) -> None:
        """Print; the command's stdout escapes control characters that a model may write."""
        if self._stream:
            data = text.encode("utf-8", "surrogateescape")
            print(data.decode("utf-8", "replace"), end="", flush=True)


def _print_json(
    prompts: list[str], rows: list[list[Any]], texts: list[str], eod: int, sizes: dict[str, int],
    fill_s: float, decode_s: float,
) -> None:  # fmt: skip
    written = sum(map(len, rows))
    results = [
        {
            "prompt": prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
            "text": text,
            "tokens": [token.id for token in row],
            "logprobs": [token.logprob for token in row],
            "ended": bool(row) and row[-1].id == eod,
        }
        for prompt, row, text in zip(prompts, rows, texts, strict=True)
    ]
    speed = {"fill_s": fill_s, "decode_s": decode_s, "tokens": written}
    print(json.dumps({"results": results, "state_bytes": sizes, **speed}, indent=2))
