"""Every number of the README's section on GPUs is held: rendered from its receipt in a sentence of
`SAID` or a row of `ROWS`, or quoted in `QUOTED`, whose numbers are no measurements of ours, or are
checked against receipts elsewhere. A number that is changed, or added, fails here."""

import re
import statistics
from pathlib import Path

import pytest

from megacpp_mcore import receipts
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.receipts.reader import rows_by_key, warm, warm_median
from megacpp_mcore.recipe import load_recipe

ROOT = Path(__file__).parent.parent
H200 = ROOT / "examples/receipts/h200"
README = (ROOT / "README.md").read_text()
SECTION = README.partition("## On GPUs\n")[2].partition("\nOther features of a run:")[0]
TEXT = " ".join(re.sub(r"```.*?```", "", SECTION, flags=re.DOTALL).split())


def read(name):
    return receipts.read(H200 / f"{name}.json")


def run(name):
    """What sentences say of a run."""
    receipt = read(name)
    result, times, loss = receipt["result"], receipt["series"]["ms"], receipt["series"]["loss"]
    tokens = receipt["series"]["tokens"][0]
    return {
        "steps": result["steps"], "ms": warm_median(receipt, "ms"),
        "s": warm_median(receipt, "ms") / 1e3, "first_s": times[0] / 1e3,
        "k": result["tokens_per_s_median"] / 1e3, "tokens": tokens,
        "k_gpu": result["tokens_per_s_median"] / 1e3 / receipt["topology"]["world_size"],
        "gb": result["peak_memory_bytes"] / 1e9, "gib": result["peak_memory_bytes"] / 2**30,
        "tflops": result.get("tflops_per_s_per_device"), "mfu": 100 * (result.get("mfu") or 0),
        "first_loss": loss[0], "last_loss": statistics.fmean(loss[-1:]),
        "graph_gib": result.get("cuda_graph_bytes", 0) / 2**30,
        "slowest": max(warm(receipt, "ms")[-8:]) / statistics.median(warm(receipt, "ms")[-8:]),
    }  # fmt: skip


def bench(name, backend, phase="step"):
    row = rows_by_key(read(name))[backend, phase]
    return {"ms": row["median_ms"], "gib": row["peak_memory_bytes"] / 2**30}


def one_gpu():
    return {"b": count(load_recipe(str(ROOT / "examples/nam56r-1gpu.toml"))).parameters / 1e9}


# (sentence, its figures)
SAID = [
    ("The median step took {ms:.0f} ms ({k:.1f} k tokens/s, peak {gb:.1f} GB), the first one "
     "{first_s:.0f} s with an empty Triton cache. The loss fell from {first_loss:.2f} to "
     "{last_loss:.2f} nats per byte.", lambda: run("run-nam56r-quarter-1xh200")),
    ("(examples/nam56r-1gpu.toml): {b:.2f} B parameters", one_gpu),
    ("[{steps} steps](examples/receipts/h200/run-nam56r-1xh200-graph.json) of {tokens:,} tokens "
     "took {s:.2f} s each ({k:.1f} k tokens/s, {tflops:.0f} TFLOP/s by our count, {mfu:.1f} % MFU, "
     "peak {gib:.0f} GiB, of the graph {graph_gib:.0f}), the slowest of the last eight "
     "{slowest:.3f} times the median.", lambda: run("run-nam56r-1xh200-graph")),
    ("[{steps} steps](examples/receipts/h200/run-nam56r-1xh200.json) took {s:.2f} s each",
     lambda: run("run-nam56r-1xh200")),
    ("took {s:.2f} s per step of {tokens:,} tokens: [{k_gpu:.1f} k tokens/s per GPU, {mfu:.1f} % "
     "MFU](examples/receipts/h200/run-nam56r-2xh200-dp2-graph.json), {steps} steps",
     lambda: run("run-nam56r-2xh200-dp2-graph")),
    ("without the graph {s:.2f} s, [{k_gpu:.1f} k and {mfu:.1f} "
     "%](examples/receipts/h200/run-nam56r-2xh200-dp2.json), {steps} steps",
     lambda: run("run-nam56r-2xh200-dp2")),
    ("takes {ms:.0f} ms in FP8", lambda: bench("model-nam56r-quarter-precision", "model")),
    ("and {ms:.0f} ms in bf16",
     lambda: bench("model-nam56r-quarter-precision", "precision.fp8=null")),
    ("took {ms:.0f} ms and {gib:.1f} GiB; with Megatron's own heads",
     lambda: bench("model-nam56r-quarter-mtp2", "model")),
    ("timed in turns with it, {ms:.0f} ms and {gib:.1f} GiB",
     lambda: bench("model-nam56r-quarter-mtp2", "linear_cross_entropy=megatron")),
]  # fmt: skip
# receipt -> for each row of the table that names it, the backends of its times in order
ROWS = {
    "layer-mla": [("recipe", "mla_rope=megatron")],
    "layer-mla-core": [("recipe", "core_attention=sdpa_cudnn")],
    "layer-mla-core-thd": [("recipe", "core_attention=sdpa_flash", "core_attention=flash_3")],
    "layer-gqa": [("recipe", "rope_qk=megatron")],
    "core_attention-thd": [("sdpa_flash", "sdpa"), ("flash_4", "sdpa_flash", "flash_3")],
    "core_attention": [("flash_4", "sdpa_cudnn")],
    "mamba3_scan": [("mamba_ssm", "reference")],
    "mamba3_scan-mimo": [("mamba_ssm_mimo", "reference")],
    "layer-mamba3-mimo": [("recipe", "mamba3_scan=reference")],
    "linear_cross_entropy-mean": [("chunked", "megatron", "liger_mean")],
    "linear_cross_entropy": [("chunked", "megatron", "liger")],
    "layer-m2rnn-prep": [("m2rnn_prep=inductor", "m2rnn_prep=reference")],
    "layer-mamba3-prep": [("mamba3_prep=inductor", "mamba3_prep=reference")],
    "m2rnn-b4-h44": [("cuda",)],
    "norm": [("triton", "reference", "te")],
    "router_gating": [("fp32_output", "reference")],
    "model-nam56r-quarter-m2rnn": [("model", "m2rnn=reference")],
}
_ROW = re.compile(r"\| ([\d.]+) \| ([^|]*) \| \[[^]]+\]\(examples/receipts/h200/([^)]+)\.json\) \|")
_NUMBER = re.compile(r"(?<![\w./=_-])\d[\d,.]*\d|(?<![\w./=_-])\d(?![\w])")


@pytest.mark.parametrize(("sentence", "figures"), SAID, ids=[said[0][:40] for said in SAID])
def test_a_sentence_has_its_receipts_figures(sentence, figures):
    assert sentence.format(**figures()) in TEXT, sentence.format(**figures())


def test_each_time_of_the_table_is_that_of_its_backend():
    left = {name: list(rows) for name, rows in ROWS.items()}
    for time, beside, name in _ROW.findall(TEXT):
        said = [time, *re.findall(r"(?<![\w-])\d+\.\d+|(?<![\w-])\d{2,}", beside)]
        rows, backends = rows_by_key(read(name)), left[name].pop(0)
        expected = [rows[backend, "forward_backward"]["median_ms"] for backend in backends]
        assert len(said) == len(expected), (name, said)
        for figure, median in zip(said, expected, strict=True):
            assert figure == f"{median:.{len(figure.partition('.')[2])}f}", (name, figure, median)
    assert not any(left.values())


def unheld():
    """The words around each number that no sentence and no row holds."""
    text = TEXT
    for sentence, figures in SAID:
        text = text.replace(sentence.format(**figures()), " ")
    text = _ROW.sub("| | | |", text)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", lambda m: " " * len(m[0]), text)
    return [
        re.sub(r" +", " ", text[max(0, m.start() - 24) : m.end() + 16]).strip()
        for m in _NUMBER.finditer(text)
    ]


def test_every_other_number_is_quoted():
    quoted = (Path(__file__).parent / "readme_quoted.txt").read_text().splitlines()
    assert unheld() == quoted, (
        "render it from its receipt in SAID, or quote it in readme_quoted.txt"
    )
