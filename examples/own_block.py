"""Add your own block letter: a block of your own, X, between Megatron's and ours.

    python examples/own_block.py            # trains AEMX for 40 steps on a CPU

Megatron's pattern letters are a closed set, so that a letter of your own stands in one of its
slots: here in `G`, which is R's in our spec. Three things are needed: the block, a stack spec that
has it in the slot, and `--spec` with that spec's name. On GPUs the same spec goes to Megatron-LM's
pretrain_hybrid.py: `--spec own_block own_stack_spec`.
"""
# ruff: noqa: E402  Megatron is prepared for a machine without a GPU before its first import

import argparse
import importlib

import torch

from megacpp_mcore.stack import bridges

bridges.before_megatron()

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megacpp_mcore.layers.stack import stack_spec
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process
from megacpp_mcore.training.cpu.optimizer import build_optimizer, build_scheduler
from megacpp_mcore.training.cpu.step import Trainer

PATTERN = "AEMX"


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


def _own_stack_spec() -> ModuleSpec:
    spec = stack_spec()
    layer = spec.submodules.gdn_layer.submodules
    r = layer.self_attention.submodules
    linears = {"in_proj": r.in_proj, "out_proj": r.out_proj}
    layer.self_attention = ModuleSpec(module=GatedMemory, submodules=linears)
    return spec


# What `--spec own_block own_stack_spec` names.
own_stack_spec = _own_stack_spec()


def recipe() -> Recipe:
    """The tiny recipe with X in its pattern, as R: the letter whose slot it takes."""
    sizes = ["model.depth=4", "model.hidden_size=64", "model.seq_length=64", "mtp.pattern=AE"]
    return load_recipe("nam56r-tiny", [f"model.pattern={PATTERN.replace('X', 'R')}", *sizes])


def megatron_words(asked: Recipe) -> list[str]:
    """The recipe's command line with this file's spec in place of ours."""
    words = lower(asked).argv
    at = words.index("--spec")
    return [*words[:at], "--spec", "own_block", "own_stack_spec", *words[at + 3 :]]


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
    args = megatron_args(megatron_words(asked), lower(asked).environment)
    with single_process(asked.schedule.seed):
        model = build_model(args)
        optimizer = build_optimizer(model, args)
        trainer = Trainer(model, optimizer, build_scheduler(optimizer, args), args)
        data = batches(asked)
        for step in range(1, steps + 1):
            loss, _ = trainer.step([next(data)])
            if step in (1, steps) or step % 10 == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)
        blocks = [name for name, m in model.named_modules() if isinstance(m, GatedMemory)]
    print(f"X is {', '.join(blocks)}")


if __name__ == "__main__":
    # Megatron imports the spec by this module's name: be that module, and not a second one.
    importlib.import_module("own_block").main()
