"""A part of a recipe's model, run once as a rank runs it, for the kernels that it leaves in caches:

    python -m megacpp_mcore.training.gpu.precompile_part PART --megacpp-recipe RECIPE

PART is a block letter, one layer of which runs at the recipe's sizes, or `ends`: the embedding, the
final norm and the heads with their losses, MTP's, too. Both directions run, for two micro batches
of a step, and the optimizer's update. It reads no data and no checkpoint, and writes into the
caches alone.
"""

import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.training.environment import apply_environment
from megacpp_mcore.training.gpu.rank_setup import environment_of, parser_of
from megacpp_mcore.training.one_rank import one_layer, one_rank

ENDS = "ends"
TOOK = "megacpp: took {} s"
_BEGAN = time.monotonic()
_ATTENTION, _EXPERTS, _MAMBA = "A", "E", "M"
_NO_VOCABULARY = [
    "model.vocab_size=1024", "data.tokenizer_type=NullTokenizer", "data.tokenizer_model=null",
    "data.null_tokenizer_eod_id=null",
]  # fmt: skip
_NO_RECOMPUTE = [
    f"parallel.recompute_{key}=null" for key in ("granularity", "method", "num_layers")
]


def parts(recipe: Recipe) -> list[str]:
    """The letters of the recipe's layers, MTP's too, in their order; then ENDS."""
    return [*dict.fromkeys(layer.letter for layer in recipe.plan.layers), ENDS]


def part_recipe(part: str, recipe: Recipe) -> Recipe:
    """The recipe of one process whose model is the part, or for the ends a model that has them.

    An A is what attention.kind says, MLA where attention.dsa_ranks names layers. Raises RecipeError
    where the recipe's other keys do not allow one layer.
    """
    ours = one_rank(recipe)
    if part == ENDS:
        letter = _cheapest(recipe)
        ours += [*one_layer(letter), *_of_others(letter, recipe), *_NO_RECOMPUTE]
        if depths := recipe.mtp.mtp_num_layers:
            ours += [f"mtp.mtp_num_layers={depths}", f"mtp.pattern={letter}"]
    else:
        ours += [*one_layer(part), *_of_others(part, recipe), *_NO_VOCABULARY]
        if recipe.parallel.recompute_num_layers:
            ours.append("parallel.recompute_num_layers=1")
        if recipe.precision.first_last_layers_bf16:  # the only layer would be the first
            ours.append("precision.first_last_layers_bf16=false")
    if recipe.attention.dsa_ranks:
        ours += ["attention.kind=mla", "attention.dsa_ranks=[]"]
    return load_recipe(recipe.source, [*recipe.overrides, *ours])


def _of_others(letter: str, recipe: Recipe) -> list[str]:
    """Overrides that leave out what a recipe may say only with other letters than this one."""
    owners = {entry.recompute: entry.letter for entry in letters.known() if entry.recompute}
    owners["attention"] = _ATTENTION
    absent = [
        field.name
        for field in fields(recipe.recompute)
        if getattr(recipe.recompute, field.name)
        and (_MAMBA in letters.get(letter).symbols if field.name == "layernorm"  # it has none
             else owners[field.name] != letter)
    ]  # fmt: skip
    ours = [f"recompute.{name}=null" for name in absent]
    if letter != _ATTENTION and recipe.attention.mla_down_proj_fusion:
        ours.append("attention.mla_down_proj_fusion=null")
    return ours


def _cheapest(recipe: Recipe) -> str:
    """The letter of layers that the ends are built with, and lose: experts take memory, attention
    takes seconds to import."""
    costly = (_ATTENTION, _EXPERTS)
    return min(parts(recipe)[:-1], key=lambda x: costly.index(x) if x in costly else -1)


def compile_part(
    part: str, recipe: Recipe, device: str = "cuda", done: Callable[[], None] | None = None
) -> None:
    """Build the part on this process's GPU, or on the CPU, and train it for one step.

    recipe: the run's. done: called before the process groups are destroyed, which takes a second.
    Raises what building and running the model raises.
    """
    import torch

    from megacpp_mcore.recipe.lowering import lower
    from megacpp_mcore.stack import bridges
    from megacpp_mcore.training import one_process
    from megacpp_mcore.training.cpu import megatron_setup as setup

    own = part_recipe(part, recipe)
    with bridges.hide_packages("transformers"):  # 3 s, and no tokenizer is built
        args = setup.megatron_args(lower(own).argv)
    with setup.single_process(own.schedule.seed, device):
        model = setup.build_model(args, own)
        loss = (_ends if part == ENDS else _layer)(model, own, args, device)
        if device == "cuda":
            training = one_process.on_gpu(model, args, own.optimizer.fused_update)
            _forget_gradients(training.model)
        else:
            training = one_process.on_cpu(model, args)
        model.set_is_first_microbatch()
        for _ in range(2):  # a step's first gradients may be written where others are added
            training.backward(loss())
        training.update()
        if device == "cuda":
            torch.cuda.synchronize()  # what a kernel did wrong is raised here
        if done:
            done()


def _forget_gradients(parallel: Any) -> None:
    """As before a run's step: the first gradients of the experts' weights are due."""
    from megacpp_mcore.training.gpu import zeroing

    zeroing.install([parallel])
    parallel.zero_grad_buffer()


def _layer(model: Any, recipe: Recipe, args: Namespace, device: str) -> Callable[[], Any]:
    """A call of the model's only layer, without the final norm."""
    import torch

    from megacpp_mcore.training import one_process

    decoder = one_process.layers_alone(model)
    x, direction = (
        torch.randn(one_process.hidden_shape(recipe, args), device=device).to(args.params_dtype)
        for _ in range(2)
    )
    x.requires_grad_()
    others = one_process.decoder_arguments(model, recipe, args, device)
    return lambda: (decoder(x, attention_mask=None, **others) * direction).sum()


def _ends(model: Any, recipe: Recipe, args: Namespace, device: str) -> Callable[[], Any]:
    """A call of the model without its layers: the sum of a micro batch's losses."""
    import torch
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    from megacpp_mcore.training import one_process

    for module in model.modules():
        if isinstance(module, HybridStack):  # the decoder, and what MTP repeats of it
            module.layers = torch.nn.ModuleList()
    packed = one_process.packed_documents(recipe, args, device)
    [batch] = one_process.random_batches(recipe, args, device, 1)
    rows = {
        name: x if x is None else (x.reshape(1, -1) if packed else x).contiguous()
        for name, x in batch.items()
    }
    return lambda: model(**rows, **packed)


def main(argv: list[str] | None = None) -> int:
    """Compile one part on the GPU, print TOOK, and end the process with status 0.

    Where that fails, returns another exit status; stderr's last line says why.
    """
    parser = parser_of(__spec__.name, "Compile the kernels of one part of a recipe's model.")
    parser.add_argument("part", help=f"a block letter of the recipe, or {ENDS}")
    own = parser.parse_args(argv)
    try:
        recipe = load_recipe(own.recipe, own.overrides)
        if own.part not in parts(recipe):
            raise MegacppError(f"{own.part}: choose {', '.join(parts(recipe))}")
        # Before torch is imported, as in a rank.
        apply_environment(environment_of(recipe, Path(own.out or f"runs/{recipe.name}")))
        _as_in_a_rank(own.part, recipe)
        compile_part(own.part, recipe, done=_end)
    except MegacppError as error:
        print(f"megacpp: {error}", file=sys.stderr)
        return error.exit_status
    except Exception:
        traceback.print_exc()
    return 1


def _end() -> NoReturn:
    """At once: the caches are written, and a launcher waits."""
    print(TOOK.format(f"{time.monotonic() - _BEGAN:.1f}"), flush=True)
    sys.stderr.flush()
    os._exit(0)


def _as_in_a_rank(part: str, recipe: Recipe) -> None:
    """What a rank does before it imports Megatron, and what decides about backends."""
    from megacpp_mcore import dispatch
    from megacpp_mcore.stack import bridges
    from megacpp_mcore.training.packages import check_backends

    dispatch.begin(say_each=False)
    bridges.import_ops_only("mamba_ssm")
    with bridges.hide_packages("jax"):  # Transformer Engine also imports its JAX support
        check_backends(part_recipe(part, recipe))  # an M need not import FlashAttention-4
    bridges.before_megatron()
    bridges.shift_documents_on_the_device()


if __name__ == "__main__":
    sys.exit(main())
