"""Bridges that need no GPU."""

import importlib
import importlib.util
import sys

import pytest

from megacpp_mcore.stack import bridges


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package: operators, a slow __init__ that writes a line when it runs."""
    name, ran = "package_with_models", tmp_path / "ran"
    folder = tmp_path / name
    (folder / "ops").mkdir(parents=True)
    (folder / "ops" / "scan.py").write_text("VALUE = 3\n")
    (folder / "__init__.py").write_text(
        f"open({str(ran)!r}, 'a').write('x')\n"
        f"from {name}.ops.scan import VALUE\n__version__ = '1.2'\nmodel = VALUE + 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name, ran
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[loaded]


def test_operators_come_without_the_models(package):
    name, ran = package
    bridges.import_ops_only(name)
    assert importlib.import_module(f"{name}.ops.scan").VALUE == 3
    assert not ran.exists()
    assert not hasattr(sys.modules[name], "__wrapped__")
    assert not ran.exists()


@pytest.mark.parametrize("attribute", ["model", "__version__"])
def test_whoever_asks_for_the_models_gets_them(package, attribute):
    name, ran = package
    bridges.import_ops_only(name)
    importlib.import_module(f"{name}.ops.scan")
    assert getattr(sys.modules[name], attribute) == {"model": 4, "__version__": "1.2"}[attribute]
    assert sys.modules[name].model == 4 and ran.read_text() == "x"
    assert not hasattr(sys.modules[name], "nothing")


def test_a_package_that_is_imported_or_absent_stays_so(package):
    name, ran = package
    whole = importlib.import_module(name)
    bridges.import_ops_only(name)
    assert sys.modules[name] is whole and ran.read_text() == "x"
    bridges.import_ops_only("no_such_package")
    assert "no_such_package" not in sys.modules


def test_a_package_that_is_only_tried_is_absent_for_a_while(package):
    name, ran = package
    with bridges.hide_packages(name, "no_such_package"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{name}.ops.scan")
    assert not ran.exists() and "no_such_package" not in sys.modules
    whole = importlib.import_module(name)
    with bridges.hide_packages(name):
        assert importlib.import_module(name) is whole
    assert sys.modules[name] is whole


def test_a_package_is_found_again_after_an_error(package):
    name, _ = package
    with pytest.raises(KeyError), bridges.hide_packages(name):
        raise KeyError
    assert importlib.import_module(name).model == 4


def test_megatrons_own_linears_are_built_without_apex_and_hand_their_gradients_on():
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.training.cpu.megatron_setup import single_process

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
    )  # fmt: skip

    def linear():
        return ColumnParallelLinear(8, 8, config=config, init_method=config.init_method, bias=False)

    with single_process(1):
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            linear()
        with bridges.fused_accumulation_without_apex():
            model = torch.nn.Sequential(linear(), linear())
        bridges.unfused_where_apex_is_needed(model)
        model[0](torch.ones(2, 8))[0].sum().backward()
        assert model[0].weight.grad.any() and not model[1].gradient_accumulation_fusion
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            linear()  # as before
