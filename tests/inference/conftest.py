"""One trained run of the small recipe, which the tests only read."""

from pathlib import Path

import pytest

from megacpp_mcore.recipe import load_recipe


@pytest.fixture(scope="session")
def small_run(small_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with a checkpoint of each."""
    from megacpp_mcore.training.cpu.train import train

    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(small_text)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "")
            patch.delenv(name)
        settings = ["checkpoint.save_interval=1", "optimizer.lr=1e-2"]
        recipe = load_recipe(str(folder / "small.toml"), settings)
        train(recipe, folder / "run", steps=2)
    return folder / "run"


@pytest.fixture(autouse=True)
def environment_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model sets a rank's variables for its process; a test's end takes them back."""
    for name in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
