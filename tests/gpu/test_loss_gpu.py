"""HybridModel's losses on a GPU: the chunked heads against Megatron's, and the memory of both."""

import pytest
import torch
from loss_models import FLOAT32, SEQ, assert_same, batches, megatrons_step, models, run

from megacpp_mcore.layers.loss import HeadLosses
from megacpp_mcore.training.cpu.megatron_setup import single_process
from megacpp_mcore.training.cpu.step import forward_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

ON_GPU = [
    "launch.device=cuda", "launch.distributed_backend=nccl", "launch.use_cpu_initialization=false",
    "model.transformer_impl=transformer_engine", "mtp.mtp_num_layers=2",
]  # fmt: skip
# Transformer Engine multiplies float32 in TF32, which makes more of a difference than it should.
EXACT = "linear=reference,norm=reference"


@pytest.fixture
def backends(monkeypatch):
    """backends(text): MEGACPP_BACKENDS for the models built from here on, beside their heads."""
    names = ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def choose(text: str) -> None:
        monkeypatch.setenv("MEGACPP_BACKENDS", text)

    return choose


def on_gpu(data):
    return [{name: tensor.cuda() for name, tensor in batch.items()} for batch in data]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_losses_log_and_gradients_are_megatrons(backends, tied):
    backends(EXACT)
    untie = f"model.untie_embeddings_and_output_weights={str(not tied).lower()}"
    with single_process(1, "cuda"):
        ours, megatrons = (
            model.float().cuda() for model in models(*ON_GPU, untie, heads="chunked")
        )
        assert isinstance(ours.heads, HeadLosses)
        for per_token in (False, True):
            for model in (ours, megatrons):
                model.config.calculate_per_token_loss = per_token
            expected = run(megatrons, megatrons_step, on_gpu(batches()))
            for step in (forward_step, megatrons_step):
                assert_same(run(ours, step, on_gpu(batches())), expected, FLOAT32)


def test_the_logits_are_in_memory_by_megatrons_heads_and_not_by_ours(backends):
    vocab_size, rows = 65536, 512
    logits = 2 * rows * SEQ * vocab_size  # bytes of one head's, in bf16
    peaks = {}
    for backend in ("chunked", "megatron"):
        backends("")
        with single_process(1, "cuda"):
            sizes = f"model.vocab_size={vocab_size}"
            model = models(*ON_GPU, sizes, heads=backend).ours.bfloat16().cuda()
            data = on_gpu(batches()[:1])
            repeats = -(-rows // len(data[0]["tokens"]))
            data = [{name: x.repeat(repeats, 1)[:rows] for name, x in data[0].items()}]
            run(model, forward_step, data)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(model, forward_step, data)
            peaks[backend] = torch.cuda.max_memory_allocated() - before
    assert peaks["chunked"] < logits, peaks
    assert peaks["megatron"] > 3 * 2 * logits, peaks  # a float32 softmax of all three heads
