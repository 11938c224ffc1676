"""Add your own block letter: a block of your own, X, between Megatron's and ours.

    python examples/own_block.py            # trains AEMX for 40 steps on a CPU

Five things are needed: the block, its cost, what it keeps for its backward pass, the spec of its
layer, and an entry in the table of block letters that names them. The translator, the plan, FLOPs,
the layout planner and the stack spec read the entry.
Megatron's own symbols are a closed set, so that X takes one of its slots: here `G`, which a pattern
with R or D has no longer free.

On GPUs the spec goes to Megatron-LM's pretrain_hybrid.py: `--spec own_block own_stack_spec`. A
package that is installed names its letter among its entry points, so that every `megacpp` command
knows it: `[project.entry-points."megacpp_mcore.letters"]`, `X = "own_block:X"`.
"""
# ruff: noqa: E402  Megatron is prepared for a machine without a GPU before its first import

import argparse
import sys
from functools import partial

import torch

from megacpp_mcore.stack import bridges

bridges.before_megatron()

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.hybrid.letters import BlockLetter, Cost, Planning, Slot, Spec
from megacpp_mcore.layers.blocks import StackParts, mixer_layer
from megacpp_mcore.layers.hybrid_stack import StackSpec, stack_spec
from megacpp_mcore.layers.mixer import RecurrentMixer
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process
from megacpp_mcore.training.cpu.optimizer import build_optimizer, build_scheduler
from megacpp_mcore.training.cpu.step import Trainer

# The entry and Megatron's --spec name this module; run as a script, it is that module as well.
sys.modules.setdefault("own_block", sys.modules[__name__])


class GatedMemory(MegatronModule):
    """X: out_proj(sigmoid(g) * the decayed mean of v over the tokens so far), [s, b, h] in and out.

    The constructor and the forward pass are those that a TransformerLayer expects of its
    `self_attention`; what this block has no use for, it leaves.
    """

    def __init__(self, config, submodules, layer_number, pg_collection, name=None, **unused):
        super().__init__(config)
        hidden = config.hidden_size
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules["in_proj"], hidden, 2 * hidden, init_method=config.init_method,
            gather_output=False, skip_bias_add=False, **shared,
        )  # fmt: skip
        self.out_proj = build_module(
            submodules["out_proj"], hidden, hidden, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, **shared,
        )  # fmt: skip
        self.decay = torch.nn.Parameter(torch.linspace(-3.0, 3.0, hidden))

    def forward(self, hidden_states, attention_mask=None, **unused):
        value, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        keep = torch.sigmoid(self.decay)
        memory, tokens = torch.zeros_like(value[0]), []
        for token in value:
            memory = keep * memory + (1 - keep) * token
            tokens.append(memory)
        return self.out_proj(torch.sigmoid(gate) * torch.stack(tokens))


def gated_memory_layer(parts: StackParts) -> ModuleSpec:
    """The layer of X: a norm, GatedMemory and the residual, from the parts of the whole stack."""
    linears = {"in_proj": parts.linears.column, "out_proj": parts.linears.row}
    return mixer_layer(parts, ModuleSpec(module=GatedMemory, submodules=linears))


def cost(recipe: Recipe, layer, keys: float) -> Cost:
    """What a layer of X costs: two projections; decay and norm; the memory's two products."""
    hidden = recipe.model.hidden_size
    return Cost(weights=3 * hidden * hidden, others=2 * hidden, mixing=3 * hidden)


def kept(recipe: Recipe, sizes, recompute) -> float:
    """Bytes a token that a layer of X saves: value and gate, the memory twice (each token's is read
    by the next, and all of them by the gate), sigmoid(gate) and out_proj's input, in bf16."""
    return 2 * 6 * recipe.model.hidden_size


def rules(r: Rules) -> None:
    """What a recipe with X may not say: the block's decay is not cut over tensor-parallel ranks."""
    key = "parallel.tensor_model_parallel_size"
    r.refuse(r[key] != 1, key, "must be 1, as the pattern has X: gated memory holds all channels")


X = letters.register(
    BlockLetter(
        letter="X",
        title="gated memory",
        slots=(
            Slot(
                symbol="G",
                module="own_block.GatedMemory",
                layer="own_block.gated_memory_layer",
                cost=cost,
                planned=Planning(kept),
            ),
        ),
        spec=Spec("own_block", "own_stack_spec"),
        rules=rules,
        split_sequence="its memory goes from each token to the next",
        packed_documents="its memory runs over the ends of documents",
    )
)
# What `--spec own_block own_stack_spec` names.
own_stack_spec = StackSpec(partial(stack_spec, letters="X"))


def recipe() -> Recipe:
    """The tiny recipe with X in its pattern."""
    sizes = ["model.depth=4", "model.hidden_size=64", "model.seq_length=64", "mtp.pattern=AE"]
    return load_recipe("nam56r-tiny", ["model.pattern=AEMX", *sizes])


def batches(asked: Recipe):
    """Counting in bytes, from a random start: there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    rows, seq = asked.schedule.micro_batch_size, asked.model.seq_length
    while True:
        start = torch.randint(256, (rows, 1), generator=generator)
        text = (start + 7 * torch.arange(seq + 1)) % 256
        yield {
            "tokens": text[:, :-1],
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(rows, seq),
            "position_ids": torch.arange(seq).expand(rows, -1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model with a block of your own")
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    asked = recipe()
    for layer in asked.plan.layers:
        print(f"{layer.letter} -> {layer.symbol}  {layer.module}")
    [part] = [part for part in count(asked).parts if part.name == "X"]
    print(f"X: {part.forward:,.0f} operations a token, {part.parameters:,} parameters")
    args = megatron_args(lower(asked).argv)
    with single_process(asked.schedule.seed):
        model = build_model(args, asked)
        built = sum(parameter.numel() for parameter in model.parameters())
        padding = sum(
            rows * module.config.hidden_size
            for module in model.modules()
            if isinstance(module, RecurrentMixer)
            for rows in module.padding.values()
        )
        print(
            f"{built - padding:,} parameters built, {count(asked).parameters:,} counted; "
            f"and {padding:,} zeros, rows that pad M's in_proj to a multiple of 16"
        )
        optimizer = build_optimizer(model, args)
        trainer = Trainer(model, optimizer, build_scheduler(optimizer, args), args)
        data = batches(asked)
        for step in range(1, steps + 1):
            loss, _ = trainer.step([next(data)])
            if step in (1, steps) or step % 10 == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)
    for name, module in model.named_modules():
        if isinstance(module, GatedMemory):
            print(f"X is {name}")


if __name__ == "__main__":
    main()
