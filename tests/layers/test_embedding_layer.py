"""Which backend serves the embedding of our HybridModel. What it computes in a whole model is in
tests/training/test_main_grads.py."""

from types import SimpleNamespace

import pytest

from megacpp_mcore import dispatch
from megacpp_mcore.layers.embedding import choose_embedding
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.source import RecipeError
from megacpp_mcore.surfaces import embedding as surface
from megacpp_mcore.surfaces.workload import Workload


class TestDispatch:
    @pytest.fixture(autouse=True)
    def packages(self, monkeypatch):
        monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
        monkeypatch.setattr(surface, "import_reason", lambda module: None)

    def reason(self, device="cuda", dtype="bfloat16", **sizes):
        return dispatch.verdicts("embedding", Workload.of(device, dtype, **sizes))["triton"]

    def test_a_gpu_has_the_kernels_and_a_cpu_megatrons_module(self):
        assert self.reason() is None and self.reason(dtype="float32") is None
        for device, expected in (("cuda", "triton"), ("cpu", "reference")):
            workload = Workload.of(device, "bfloat16")
            assert dispatch.choose("embedding", workload).observed == expected

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size 2: it takes the whole"),
            ({"weight_shards": 4}, "weight_shards 4: it takes the whole vocabulary"),
            ({"sequence_parallel": True}, "sequence_parallel: it gives every rank the whole"),
            ({"dtype": "float16"}, "it takes bfloat16 and float32, not float16"),
            ({"device": "cpu"}, "a Triton kernel runs on cuda only, not on cpu"),
        ],
    )
    def test_what_it_does_not_serve(self, asked, words):
        assert words in self.reason(**asked)

    def test_a_recipe_that_no_machine_could_run_is_refused(self):
        words = [
            "backends.embedding=triton", "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true", "parallel.expert_tensor_parallel_size=1",
        ]  # fmt: skip
        with pytest.raises(RecipeError, match="tensor_model_parallel_size 2"):
            load_recipe("nam56r", words)
        assert load_recipe("nam56r", words[:1]).backends["embedding"] == "triton"

    def test_a_stage_without_an_embedding_asks_for_none(self, monkeypatch):
        asked = []
        monkeypatch.setattr(dispatch, "decide", lambda *given: asked.append(given))
        choose_embedding(SimpleNamespace(config=None))
        assert asked == []
