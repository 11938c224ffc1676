"""One layer as it is in the model: norm, mixer or experts, residual.

A recipe's model of that one layer is built for every variant, with the same weights; what is timed
is its decoder without the final norm.
"""

import importlib.util
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.bench import BenchError, BenchFailure, upstream
from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.bench.likeness import Likeness
from megacpp_mcore.bench.runner import Contender
from megacpp_mcore.bench.upstream import Upstream
from megacpp_mcore.bench.variants import (
    Built,
    Variant,
    VariantTarget,
    build,
    copy_weights,
)
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters.attention import KINDS
from megacpp_mcore.kernels import regions
from megacpp_mcore.kernels.core_attention.case import CoreAttentionCase
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training.one_process import (
    decoder_arguments,
    hidden_shape,
    in_half_precision,
    layers_alone,
)
from megacpp_mcore.training.one_rank import one_layer

_OWN_NAME = "recipe"
_SECONDS_A_PHASE = 8.0
_SETS = 2
_ROUNDINGS = 64  # from a weight or input to the output, and from there to a gradient
_ERROR_NOTE = (
    "error: of the region of output or gradients that is the worst for its tolerance, root mean "
    "square of the difference from the baseline in units of its own there, with its weights; the "
    "tolerance is from the baseline's own roundings there; none where the parameters are others"
)


def layer_overrides(name: str) -> list[str]:
    """What makes a recipe's model one layer: a block letter, or A by its symbol + (MLA) or * (GQA).

    Raises BenchError for another name and for a letter whose package is not installed, LetterError
    for a letter that cannot be loaded.
    """
    kinds = {symbol: kind for kind, symbol in KINDS.items() if not symbol.isalpha()}
    if name not in kinds and letters.find(name) is None:
        first, *others = (entry.letter for entry in letters.known())
        choices = ", ".join((first, *kinds, *others))
        raise BenchError(f"layer {name!r} is unknown; choose {choices}")
    letter, kind = ("A", kinds[name]) if name in kinds else (name, None)
    for module, package in letters.get(letter).packages:
        if importlib.util.find_spec(module) is None:
            raise BenchError(f"layer {letter} needs {package}, which is not installed")
    return one_layer(letter) + ([f"attention.kind={kind}"] if kind else [])


class LayerTarget(VariantTarget):
    """The only layer of a recipe, from `load_for_bench` with `layer_overrides`."""

    def __init__(self, recipe: Recipe, against: Sequence[str] = ()) -> None:
        super().__init__("layer", _OWN_NAME, recipe, against, _SECONDS_A_PHASE)

    def variant(self, text: str) -> Variant:
        """Raises BenchError for `upstream` where it cannot be had."""
        if text != upstream.NAME:
            return super().variant(text)
        self.upstream = upstream.of(self.recipe)
        return Variant(self.recipe)

    def make(self, name: str, variant: Variant) -> "_Layer":
        if name == upstream.NAME:
            return _UpstreamLayer(name, variant, self.clock.device, self.upstream)
        return _Layer(name, variant, self.clock.device)

    def build(self, clock: Clock, say: Callable[[str], None]) -> None:
        super().build(clock, say)
        if upstream.NAME in self.built:
            self.backends.append(self.upstream.entry())
        self.dtype = self.first.direction.dtype
        say(f"all against {self.baseline}, with its weights")
        if self.compared:
            expected = self.first.values()
            likeness = Likeness(expected, _tolerance(expected["y"]))
            for seed in range(1, regions.DRAWS + 1):
                likeness.draw(self.first.values(seed))
            for layer in self.compared:
                self.judge(layer, *likeness.worst(layer.values()))

    def kept_memory_bytes(self, contender: Contender, phase: str, clock: Clock) -> int | None:
        call = contender.calls[phase]
        return clock.kept_memory_bytes(partial(call, 0)) if phase == "forward" else None

    def cost(self, phase: str) -> tuple[int, None]:
        """Operations of the products with the weights and of whole rows' causal attention."""
        recipe, layer = self.recipe, next(iter(self.built.values()))
        tokens = recipe.schedule.micro_batch_size * recipe.model.seq_length
        attention = CoreAttentionCase.of(recipe)
        flops = int(weight_flops(layer.trained, recipe, tokens))
        flops += attention.flops() if attention else 0
        return flops * (1 if phase == "forward" else 3), None

    def sizes(self) -> dict[str, Any]:
        recipe = self.recipe
        packed = recipe.data.dataloader_inter_document_masking
        return {
            "pattern": recipe.plan.megatron_pattern,
            "hidden_size": recipe.model.hidden_size,
            "micro_batch_size": recipe.schedule.micro_batch_size,
            "seq_length": recipe.model.seq_length,
            "documents_a_row": BENCHED_DOCUMENTS if packed else 0,
        }

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [_ERROR_NOTE]


class _Layer(Built):
    """A layer and what it is called with. sets: inputs in turn, [s, b, h], of packed documents
    [s * b, 1, h]. direction: the gradient sent back. others: the other arguments."""

    def __init__(self, name: str, variant: Variant, device: str) -> None:
        super().__init__(name, {"forward": self.forward, "forward_backward": self.forward_backward})
        recipe, (model, args) = variant.recipe, build(variant)
        in_half_precision(model, args)
        self.model, self.trained = model, layers_alone(model)
        shape = hidden_shape(recipe, args)
        # Not the weights' seed: on a CPU, x would be the same numbers as their first rows.
        generator = torch.Generator(device).manual_seed(recipe.schedule.seed + 1)
        *sets, self.direction = (
            torch.randn(shape, generator=generator, device=device).to(args.params_dtype)
            for _ in range(_SETS + 1)
        )
        self.sets = [x.requires_grad_() for x in sets]
        self.others = decoder_arguments(model, recipe, args, device)

    def forward(self, turn: int) -> Tensor:
        """Run as the first micro batch after an update of the weights."""
        self.trained.set_is_first_microbatch()
        return self.trained(self.sets[turn % _SETS], attention_mask=None, **self.others)

    def forward_backward(self, turn: int) -> None:
        self.forward(turn).backward(self.direction)
        self.forget()

    def forget(self) -> None:
        for tensor in (*self.sets, *self.trained.parameters()):
            tensor.grad = None

    def values(self, seed: int = 0) -> dict[str, Tensor]:
        """Output and gradients of one call; with a seed of one whose inputs are jittered."""
        x = self.sets[0]
        if seed:
            x = regions.jittered(x.detach(), seed).requires_grad_()
        self.trained.set_is_first_microbatch()
        y = self.trained(x, attention_mask=None, **self.others)
        y.backward(self.direction)
        values = {"y": y.detach(), "dx": x.grad}
        values |= {f"d {name}": gradient for name, gradient in self.gradients().items()}
        self.forget()
        return values

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last backward pass, by the names of `weights`."""
        named = self.trained.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}


class _UpstreamLayer(_Layer):
    """The layer with what it comes from in it: `bench.upstream`."""

    def __init__(self, name: str, variant: Variant, device: str, found: Upstream) -> None:
        """Also makes a first call, whose gradients are dropped: mamba-ssm's autotuning adds up
        those of its trials.

        Raises BenchFailure where their code raises, and InferenceError for a setting that it does
        not have.
        """
        super().__init__(name, variant, device)
        try:
            self.block = upstream.put(found, variant.recipe, self.model)
            self.forward_backward(0)
        except MegacppError:
            raise
        except Exception as error:  # whatever a package raises
            traceback.print_exc()
            raise BenchFailure(f"{found.distribution}: {type(error).__name__}: {error}") from error

    def weights(self) -> dict[str, Tensor]:
        return dict(self.block.own)

    def take(self, weights: Mapping[str, Tensor]) -> bool:
        taken = copy_weights(self.block.own, weights)
        self.block.take()
        return taken

    def gradients(self) -> dict[str, Tensor]:
        return self.block.gradients()


def _tolerance(y: Tensor) -> float:
    """The tolerance of a region's difference: independent roundings, of both layers, come to the
    root of their number times half an epsilon, and sums over all tokens to that of the accumulator.
    """
    accumulator = torch.finfo(torch.promote_types(y.dtype, torch.float32)).eps
    tokens = y.shape[0] * y.shape[1]
    return (2 * _ROUNDINGS) ** 0.5 * torch.finfo(y.dtype).eps / 2 + tokens**0.5 * accumulator


def weight_flops(module: torch.nn.Module, recipe: Recipe, tokens: int) -> float:
    """Two a weight and token, an expert's share of them.

    Transformer Engine calls the experts' weights weight0, weight1 and so on.
    """
    share = recipe.moe.moe_router_topk / (recipe.moe.num_experts or 1)
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or not re.search(r"weight\d*$", name) or "embedding" in name:
            continue
        used = share if ".experts." in name else 1
        total += 2 * parameter.numel() * tokens * used
    return total
