"""Bridges that need neither Megatron nor a GPU."""

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
