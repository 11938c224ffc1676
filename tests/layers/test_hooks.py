"""Somebody else's hooks on the modules of a fused model: what they do to it is what they do to one
whose modules are all called, or they are refused."""

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from served import anywhere
from test_moe import with_exact_gradients, with_our_router
from test_moe_residual import CopyingStream, machine, model  # noqa: F401
from torch.nn.modules.module import register_module_forward_hook

from megacpp_mcore import dispatch
from megacpp_mcore.layers.moe import MegacppMoELayer
from megacpp_mcore.layers.param_gather import HookError
from megacpp_mcore.surfaces.registry import REGISTRY

FUSED = {"moe_experts": "fused_moe", "mla_up": "triton", "embedding": "triton",
         "linear_cross_entropy": "chunked"}  # fmt: skip
CALLED = {"moe_experts": "grouped_mm", "mla_up": "reference", "embedding": "reference",
          "linear_cross_entropy": "reference"}  # fmt: skip
ROWS = ["model.pattern=AE", "model.depth=2", "mtp.mtp_num_layers=0", "mtp.pattern="]
# The fused layers read their weights: which module a hook is on decides, not what it does.
REFUSED = {"self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj", "mlp.experts"}


def changed(value):
    """The first floating tensor of it, a quarter larger."""
    if isinstance(value, torch.Tensor):
        return value * 1.25 if value.is_floating_point() else value
    if isinstance(value, tuple):
        first = next((n for n, v in enumerate(value) if isinstance(v, torch.Tensor)), None)
        return tuple(changed(v) if n == first else v for n, v in enumerate(value))
    return value


def of_the_input(module):
    def hook(module, args, named):
        return changed(args), {
            n: changed(v) if n == "hidden_states" else v for n, v in named.items()
        }

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def of_the_output(module):
    return module.register_forward_hook(lambda module, args, found: changed(found))


def of_the_gradient(module):
    return module.register_full_backward_hook(lambda module, inputs, outputs: changed(inputs))


def step(built) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(256, (1, 6), generator=generator) for _ in range(2))
    built.zero_grad(set_to_none=True)
    loss = built(ids, torch.arange(6)[None], None, labels=labels).float().sum()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in built.named_parameters()}


def with_each_hook(built, names, hook):
    """Loss and gradients with the hook on each of the modules; HookError where it is refused."""
    for name in names:
        handle = hook(built.get_submodule(name))
        try:
            yield name, step(built)
        except HookError:
            yield name, HookError
        finally:
            handle.remove()


def with_a_hook_of_all(built):
    """Loss and gradients with one that changes what norms, routers and MLPs return."""
    kinds = torch.nn.RMSNorm, TopKRouter, MoELayer
    handle = register_module_forward_hook(
        lambda module, args, found: changed(found) if isinstance(module, kinds) else None
    )
    try:
        return step(built)
    finally:
        handle.remove()


def called_in(built) -> list[str]:
    names = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: names.append(name))
        for name, module in built.named_modules()
        # Nobody calls the owners of stacked weights, nor the output layer in training.
        if name and ".experts." not in name and name != "output_layer"
    ]
    step(built)
    for handle in handles:
        handle.remove()
    return names


@pytest.fixture
def models(machine):  # noqa: F811
    machine.setattr(torch.cuda, "Stream", CopyingStream)
    machine.setattr(torch.cuda, "current_stream", CopyingStream)
    with_exact_gradients(machine)
    for surface, backend in (*FUSED.items(), *CALLED.items()):
        machine.setitem(REGISTRY, surface, anywhere(surface, backend))

    def built(backends, norm):
        named = ",".join(f"{surface}={backend}" for surface, backend in backends.items())
        return model(machine, *ROWS, norm=norm, backends=named)

    with built(CALLED, "reference") as called:
        names = called_in(called)
        expected = {None: step(called), "all": with_a_hook_of_all(called)}
        for hook in (of_the_input, of_the_output, of_the_gradient):
            expected[hook] = dict(with_each_hook(called, names, hook))
    with built(FUSED, "triton") as fused:
        for layer in fused.modules():
            if isinstance(layer, MegacppMoELayer):
                with_our_router(machine, layer)
        yield fused, names, expected
    dispatch.forget()


def near(found, expected):
    """Sums of some hundred terms in float32, in other orders, through some twenty operations."""
    assert found.keys() == expected.keys()
    bound = 20 * 200**0.5 * torch.finfo(torch.float32).eps
    off = {n: (found[n] - v).norm() / v.norm() for n, v in expected.items()}
    return {n: float(d) for n, d in off.items() if d > bound}


def test_a_hook_does_what_it_does_to_modules_that_are_called(models):
    fused, names, expected = models
    plain = step(fused)
    assert not near(plain, expected[None]) and len(names) > 15
    moved = 0
    for hook in (of_the_input, of_the_output, of_the_gradient):
        for name, found in with_each_hook(fused, names, hook):
            what = f"{hook.__name__} on {name}"
            assert (found is HookError) == (name.split(".", 3)[-1] in REFUSED), what
            if found is not HookError:
                wanted = expected[hook][name]
                assert not near(found, wanted), what
                moved += bool(near(wanted, expected[None]))
    assert moved > 20


@pytest.mark.filterwarnings("ignore::megacpp_mcore.layers.param_gather.HookWarning")
def test_a_hook_of_all_modules_sees_what_it_sees_of_modules_that_are_called(models):
    fused, _, expected = models
    assert not near(with_a_hook_of_all(fused), expected["all"])
    assert near(expected["all"], expected[None])
