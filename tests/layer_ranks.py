"""One layer over two tensor-parallel ranks against itself on one, on gloo processes in float64.

Each process first builds every case's layer for one rank, saves it through Megatron's distributed
checkpointing and runs it. Then both load that checkpoint as two tensor-parallel ranks: outputs and
the gradients of inputs and parameters must be those of the one rank, and the checkpoint that the
two save must give the one rank's weights back.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import run_ranks
from torch import Tensor

HIDDEN, SEQ = 12, 10
Layers = Mapping[str, torch.nn.Module]


@dataclass(frozen=True)
class TwoRanks:
    """What a test says of its layer.

    cases: name -> sequence parallel. build(name, tp, sequence_parallel): a layer in Megatron's
    groups. call(name, layer, hidden): its output [s, b, h]. part(key, whole, layer, rank): what a
    rank of two holds of a parameter or its gradient. sums: that follow one another in the block.
    batch(name): rows of its input. more(name, layer): gradients beside those of the parameters.
    settle(layer): makes random parameters such as the layer can have (padding is zero).
    """

    cases: Mapping[str, bool]
    build: Callable[[str, int, bool], torch.nn.Module]
    call: Callable[[str, torch.nn.Module, Tensor], Tensor]
    part: Callable[[str, Tensor, torch.nn.Module, int], Tensor]
    sums: int
    batch: Callable[[str], int] = lambda name: 2
    more: Callable[[str, torch.nn.Module], dict[str, Tensor]] = lambda name, layer: {}
    settle: Callable[[torch.nn.Module], None] = lambda layer: None

    def check(self, rank: int, folder: str) -> None:
        """In each of the two processes."""
        from megatron.core import dist_checkpointing

        of_one, of_two = (os.path.join(folder, name) for name in ("tp1", "tp2"))
        layers = self.built(1, seed=1)
        with torch.no_grad():
            for layer in layers.values():
                for parameter in layer.parameters():
                    parameter += 0.3 * torch.randn_like(parameter)
                self.settle(layer)
        dist_checkpointing.save(_sharded(layers), of_one)
        weights = {name: dict(layer.named_parameters()) for name, layer in layers.items()}
        found = {name: self._run(name, layer, lambda x: x) for name, layer in layers.items()}
        layers = self.built(2, seed=2)
        _load(layers, of_one)
        for name, layer in layers.items():
            self._compare(name, layer, rank, weights[name], found[name])
        dist_checkpointing.save(_sharded(layers), of_two)
        layers = self.built(1, seed=3)
        _load(layers, of_two)
        for name, layer in layers.items():
            for key, parameter in layer.named_parameters():
                assert torch.equal(parameter, weights[name][key]), f"{name}: {key}"

    def built(self, tp: int, seed: int) -> Layers:
        """Every case's layer over `tp` ranks, in Megatron's groups for them."""
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        layers = {}
        for name, sequence_parallel in self.cases.items():
            torch.manual_seed(seed)
            layers[name] = self.build(name, tp, sequence_parallel and tp > 1).double()
        return layers

    def _run(self, name, layer, cut) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Output, input gradient and parameter gradients of sum(output * direction)."""
        generator = torch.Generator().manual_seed(5)
        hidden, direction = torch.randn(2, SEQ, self.batch(name), HIDDEN, generator=generator)
        hidden = cut(hidden).double().requires_grad_()
        y = self.call(name, layer, hidden)
        (y * cut(direction)).sum().backward()
        gradients = {k: p.grad for k, p in layer.named_parameters() if p.grad is not None}
        return y.detach(), hidden.grad, gradients | self.more(name, layer)

    def _compare(self, name, layer, rank, weights, found) -> None:
        for key, parameter in layer.named_parameters():
            assert torch.equal(parameter, self.part(key, weights[key], layer, rank)), key
        y, input_gradient, gradients = found
        cut = (lambda x: x.chunk(2)[rank]) if self.cases[name] else (lambda x: x)
        y_two, input_gradient_two, gradients_two = self._run(name, layer, cut)
        self._assert_close(y_two, cut(y), f"{name}: output")
        self._assert_close(input_gradient_two, cut(input_gradient), f"{name}: input gradient")
        assert gradients_two.keys() == gradients.keys()
        for key, gradient in gradients_two.items():
            expected = self.part(key, gradients[key], layer, rank)
            assert expected.abs().max() > 0, f"{name}: {key}"
            self._assert_close(gradient, expected, f"{name}: gradient of {key}")

    def _assert_close(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """The same sums in another order: 2 * SEQ * HIDDEN terms at most, an eps of the largest."""
        eps = torch.finfo(torch.float64).eps
        bound = self.sums * 2 * SEQ * HIDDEN * eps * expected.abs().max()
        assert actual.shape == expected.shape, what
        error = (actual - expected).abs().max()
        assert error <= bound, f"{what}: {error:.2e} > {bound:.2e}"


def run_both(check: Callable[[int, str], None], folder: Path) -> None:
    """`check`, a function of a module that calls TwoRanks.check, in two processes."""
    for name in ("tp1", "tp2"):
        (folder / name).mkdir()
    run_ranks(check, folder)


def packed(bounds: list[int] | None):
    """Megatron's description of packed documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if bounds is None:
        return None
    offsets = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams("thd", offsets, offsets, max_seqlen_q=7, max_seqlen_kv=7)


def _sharded(layers: Layers) -> dict:
    return {name: layer.sharded_state_dict(f"{name}.") for name, layer in layers.items()}


def _load(layers: Layers, folder: str) -> None:
    from megatron.core import dist_checkpointing

    for name, state in dist_checkpointing.load(_sharded(layers), folder).items():
        layers[name].load_state_dict({k.removeprefix(f"{name}."): t for k, t in state.items()})
