"""Refuse a run whose packages are not installed, before anything is built.

Megatron imports most of them late: when it builds the model or the optimizer, at the first batch,
or as it saves. Nothing is imported here; packages are only looked up.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_dispatch
from megacpp_mcore.surfaces.backend import REFERENCE


class MissingPackageError(MegacppError):
    """The recipe needs packages that are not installed."""


@dataclass(frozen=True)
class _Need:
    """module: the name to import. package: the name to install. why: the setting that needs it."""

    module: str
    package: str
    why: str
    applies: Callable[[Recipe], bool]


def _tokenizer(name: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.data.tokenizer_type == name


def _letter(symbol: str) -> Callable[[Recipe], bool]:
    return lambda recipe: symbol in recipe.plan.symbols


_TE = ("transformer_engine", "transformer-engine[pytorch]")
_NEEDS = (
    _Need("psutil", "psutil", "Megatron's writer of checkpoints",
          lambda r: r.launch.device == "cpu" or r.checkpoint.save is not None),
    _Need(*_TE, 'model.transformer_impl = "transformer_engine"',
          lambda r: r.model.transformer_impl == "transformer_engine"),
    _Need(*_TE, "moe.moe_permute_fusion", lambda r: r.moe.moe_permute_fusion),
    _Need(*_TE, "moe.moe_router_fusion", lambda r: r.moe.moe_router_fusion),
    _Need(*_TE, "precision.fp8", lambda r: r.precision.fp8 is not None),
    _Need("fused_weight_gradient_mlp_cuda", "apex (built with its CUDA extensions)",
          'precision.gradient_accumulation_fusion with backends.linear = "reference"',
          lambda r: r.precision.gradient_accumulation_fusion
          and r.backends.get("linear") == REFERENCE),
    _Need("emerging_optimizers", "emerging-optimizers", "optimizer.optimizer",
          lambda r: r.optimizer.optimizer not in ("adam", "sgd")),
    _Need("deep_ep", "deep-ep (built as docs/deepep.md says)", f"backends.{moe_dispatch.NAME}",
          lambda r: r.backends.get(moe_dispatch.NAME) in moe_dispatch.WITH_DEEP_EP),
    _Need("fast_hadamard_transform", "fast-hadamard-transform",
          "attention.dsa_indexer_rotate_activation",
          lambda r: _letter("D")(r) and r.attention.dsa_indexer_rotate_activation),
    _Need("transformers", "transformers", "data.tokenizer_type",
          lambda r: _tokenizer("HuggingFaceTokenizer")(r) and not r.data.tokenizer_json),
    _Need("tokenizers", "megacpp-mcore[tokenizer]", "data.tokenizer_model",
          lambda r: r.data.tokenizer_json is not None),
    _Need("sentencepiece", "sentencepiece", "data.tokenizer_type",
          lambda r: "SentencePiece" in r.data.tokenizer_type),
    _Need("tiktoken", "tiktoken", "data.tokenizer_type", _tokenizer("TikTokenizer")),
)  # fmt: skip
_YARDSTICK = (
    _Need(*_TE, "Megatron's own blocks", lambda r: True),
    _Need("mamba_ssm", "mamba-ssm", "Megatron's Mamba-2", _letter("M")),
    _Need("causal_conv1d", "causal-conv1d", "Megatron's Mamba-2", _letter("M")),
)


def _of_letters(recipe: Recipe) -> Iterable[_Need]:
    """What the table of block letters says that the letters of the plan need."""
    for letter in sorted({layer.letter for layer in recipe.plan.layers}):
        for module, package in letters.get(letter).packages:
            yield _Need(module, package, f"the letter {letter} of model.pattern", lambda r: True)


def check_packages(recipe: Recipe, *, yardstick: bool = False) -> None:
    """Raises MissingPackageError, which names every absent package that `recipe` needs."""
    missing: dict[str, list[str]] = {}
    for need in (*_NEEDS, *_of_letters(recipe), *(_YARDSTICK if yardstick else ())):
        if need.applies(recipe) and importlib.util.find_spec(need.module) is None:
            missing.setdefault(need.package, []).append(need.why)
    if missing:
        listed = "; ".join(f"{package} ({', '.join(why)})" for package, why in missing.items())
        raise MissingPackageError(
            f"recipe {recipe.name} needs packages that are not installed: {listed}. Install them, "
            "or change the settings in parentheses; `megacpp doctor` shows the pinned stack"
        )


def check_logging(args: Any) -> None:
    """Raises MissingPackageError if Megatron's arguments request a log whose package is missing.

    args: Megatron's namespace. Without tensorboard Megatron would silently write no log; without
    wandb the last rank would fail.
    """
    for name, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if getattr(args, name, None) and importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"--{name.replace('_', '-')} needs the package {package}, which is not installed: "
                "install it, or remove the argument"
            )


def check_backends(recipe: Recipe) -> None:
    """Refuse a named backend that does not support this machine's GPU.

    Raises DispatchError, as the layer itself would later.
    """
    from megacpp_mcore import dispatch
    from megacpp_mcore.surfaces.registry import REGISTRY

    for name, surface in REGISTRY.items():
        workload = surface.workload(recipe, recipe.launch.device)
        if workload is not None:
            dispatch.choose(name, workload, recipe.backends)
