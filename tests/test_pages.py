"""README.md and docs/: what is generated is up to date, no measured number is typed, every command
in a `console` block runs, those in other blocks exist as they are written, every link leads
somewhere.

The commands of a page run in order in one folder, as a new user would, but for the start of
Python, which `warm` shares: `megacpp` stands first on the PATH.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import receipt_samples as samples
import warm

from megacpp_mcore import receipts
from megacpp_mcore.cli import build_parser
from megacpp_mcore.pages import bench_tables, blocks, gpu_logs, profile_table, run_tables
from megacpp_mcore.recipe.notes import facts
from megacpp_mcore.recipe.source import KEYS

ROOT = Path(__file__).parent.parent
PAGES = {page.path.relative_to(ROOT).as_posix(): page for page in blocks.pages(ROOT)}
README = PAGES["README.md"].text
QUOTED = Path(__file__).parent / "pages_quoted.txt"  # numbers of pages that are no measurements
MEASURED = ("README.md", "docs/performance.md")
_NUMBER = re.compile(r"(?<![\w./=_-])\d[\d,.]*\d|(?<![\w./=_-])\d(?![\w])")


def commands(page: str) -> list[str]:
    found = re.findall(r"```console\n(.*?)```", PAGES[page].text, re.DOTALL)
    return [line.removeprefix("$ ") for block in found for line in block.splitlines()]


WITH_COMMANDS = [name for name in PAGES if commands(name)]


@pytest.mark.parametrize("name", PAGES)
def test_what_is_generated_is_up_to_date(name):
    assert PAGES[name].text == PAGES[name].filled, "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_command_of_a_page_runs(name, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{warm.folder_of_megacpp()}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_")}
    for command in commands(name):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment | {"PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command


def shown(text: str, program: str) -> list[str]:
    """What follows the program's name wherever a block that is not run has it as a command."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(code for language, code in found if language != "console")
    lines = code.replace("\\\n", " ").splitlines()
    code = "\n".join(re.sub(r"(^|\s+)#.*", "", line) for line in lines)  # without comments
    return re.findall(rf"(?<![\w./-]){program} ([^)\n]*)", code)


SHOWN = [(name, line) for name in PAGES for line in shown(PAGES[name].text, "megacpp")]


@pytest.mark.parametrize(("name", "line"), SHOWN)
def test_a_command_that_is_only_shown_exists(name, line, capsys):
    """With its options and keys; names and numbers are the reader's."""
    try:
        args = build_parser().parse_args(shlex.split(line))
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    keys = {override.partition("=")[0] for override in getattr(args, "overrides", None) or ()}
    assert keys <= set(KEYS)


def test_the_commands_that_are_only_shown_are_found():
    assert {"README.md", "docs/gpu.md", "docs/extending.md"} <= {name for name, _ in SHOWN}
    text = "```\nA=1 megacpp a \\\n  --b '#c'  # megacpp d\nx $(megacpp e f) y.megacpp z\n```\n"
    assert shown(text, "megacpp") == ["a    --b '#c'", "e f"]
    assert shown("```console\n$ megacpp a\n```\n", "megacpp") == []


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md"])
def test_make_has_every_target_that_a_page_names(name):
    text = (ROOT / name).read_text()
    lines = [*shown(text, "make"), *re.findall(r"`make ([^`]*)`", text)]
    for line in filter(None, map(str.strip, lines)):
        done = subprocess.run(
            ["make", "-n", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"make {line}: {done.stderr}"


def test_the_readme_takes_five_minutes_and_leads_to_every_page():
    assert len(README.splitlines()) <= 120
    assert "make train" in README and "make test" in README
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README))
    behind = {f"docs/{n}" for n in re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/kernels.md"].text)}
    assert linked | behind >= {name for name in PAGES if name.startswith("docs/")}


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(name):
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        file, _, heading = link.partition("#")
        target = (ROOT / name).parent / file
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {title.lower().replace(" ", "-") for title in titles}, link


def typed_numbers(name: str) -> list[str]:
    """The words around each number of a page's prose."""
    text = " ".join(blocks.prose(PAGES[name].text).split())
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", lambda m: " " * len(m[0]), text)
    return [
        f"{name}: " + re.sub(r" +", " ", text[max(0, m.start() - 24) : m.end() + 16]).strip()
        for m in _NUMBER.finditer(text)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_no_time_rate_or_share_is_typed(name):
    """In no page's prose, nor in its tables that are not generated."""
    measured = r".*(?:\d *(?:ms|µs|us|TFLOP|TB/s|GB/s|tokens/s)(?!\w)|\d\.\d+ %).*"
    assert re.findall(measured, blocks.prose(PAGES[name].text)) == []


def test_no_measured_number_is_typed():
    found = [words for name in MEASURED for words in typed_numbers(name)]
    assert found == QUOTED.read_text().splitlines(), (
        "put it into a generated table; if it was not measured, quote it in pages_quoted.txt"
    )


def test_the_readme_shows_what_train_prints(tmp_path, capsys, monkeypatch):
    """But for the numbers, which are those of one run on a CPU."""
    from megacpp_mcore.commands.train import _report
    from megacpp_mcore.training.cpu import progress

    monkeypatch.setattr(progress, "has_room", lambda stream: False)
    log = progress.ProgressLog(0, 300, 10, lambda seconds: 2.0)
    log.step(300, 1.4, 2048, 3e-4, 1.2, seconds=0.4)
    receipt = samples.train(tmp_path / "receipt.json")
    _report(receipt, tmp_path, verbose=False)
    out, err = capsys.readouterr()
    (last,) = [line for line in out.splitlines() if line.startswith("training loss ")]
    block = next(b for b in re.findall(r"```\n(.*?)```", README, re.DOTALL) if "step 300/" in b)
    shown = {masked(line) for line in block.splitlines()}
    step, _, left = err.splitlines()[0].rpartition(" | ")
    assert left.endswith(" left") and masked(last) in shown
    assert any(line.startswith(masked(step)) for line in shown)


def masked(line: str) -> str:
    return re.sub(r"\d[\d.,e+-]*", "0", line)


def test_the_last_lines_of_a_run_are_those_of_its_receipt(tmp_path):
    receipt = samples.train(tmp_path / "cpu/run.json")
    steps = receipt["series"]["step"][-1]
    schedule = {"train_iters": steps, "log_interval": 2}
    receipt["recipe"] = receipts.recipe_entry("small", {"schedule": schedule})
    (tmp_path / "cpu").mkdir(exist_ok=True)
    receipts.write(tmp_path / "cpu/run.json", receipt)
    step, held_out, loss = run_tables.training("cpu/run", tmp_path / "h200").splitlines()[1:-1]
    series, evaluations = receipt["series"], receipt["evaluations"]
    assert step.startswith(f"step {series['step'][-1]}/{steps} | loss {series['loss'][-1]:.4f} | ")
    assert step.endswith(f" | grad norm {series['grad_norm'][-1]:.3f}")
    tokens, seconds = series["tokens"][-1] - series["tokens"][-3], sum(series["ms"][-2:]) / 1000
    assert f" | {tokens / seconds:,.0f} tokens/s | " in step
    assert held_out == f"step {evaluations['step'][-1]} | held-out loss " + (
        f"{evaluations['loss'][-1]:.4f} nats per token"
    )
    assert loss.startswith(f"training loss {receipt['result']['final_loss']:.4f} nats per token")


FALLING = [3.0 - step / 100 for step in range(50)]  # to 2.51


@pytest.mark.parametrize(("losses", "end", "early", "later"), [
    (FALLING, "2.6050", "none", "none"),
    ([3.0, 2.0, 2.25, 1.0, 1.75, 1.5, *[1.0] * 60], "1.0000", "0.750 at step 5", "none"),
    ([*FALLING, 3.105, *[1.0] * 20], "1.0000", "none", "0.500 at step 51"),
    ([*FALLING[:49], 2.92, *[2.5] * 20], "2.5000", "0.400 at step 50", "none"),
    ([*FALLING, *[1.0] * 20, 1.5, *[1.0] * 20], "1.0000", "none", "0.500 at step 71"),
    ([3.0] * 20 + [None, 2.0], "not finite at step 21", "", ""),
])  # fmt: skip
def test_the_end_of_a_curve_and_its_rises(losses, end, early, later, tmp_path, monkeypatch):
    steps = [*range(1, len(losses) + 1)]
    series = {"step": steps, "tokens": [64 * n for n in steps], "loss": losses,
              "lr": [0.0, 6e-4] + [1e-4] * (len(losses) - 2),
              "grad_norm": [99.0 - n for n in steps]}  # fmt: skip
    norm = "48.0 at step 51" if len(steps) > 50 and None not in losses else ""
    recipe = {"content": {"schedule": {"lr_warmup_iters": 5}}}
    run = {"series": series, "recipe": recipe, "code": {"sha256": "0"}}
    monkeypatch.setattr(run_tables, "read", lambda path: {tmp_path / "run-a.json": run}[path])
    row = run_tables.curves("run-a | with A", tmp_path).splitlines()[-1]
    link = "[with A](examples/receipts/h200/run-a.json)"
    curve = f"{len(losses)} | 64 | 0.0006 | 5 steps | {end} | {early} | {later} | {norm}"
    assert row == f"| {link} | {curve} |"


def test_the_starts_of_runs_are_a_table(tmp_path, monkeypatch):
    result = {"launch_s": 32.72, "cold_start_s": 18.38, "first_step_ms": 2460.19,
              "triton_kernels_compiled": 0}  # fmt: skip
    run = {"result": result, "code": {"sha256": "0"}}
    monkeypatch.setattr(run_tables, "read", lambda path: {tmp_path / "run-a.json": run}[path])
    row = run_tables.starts("run-a | with A", tmp_path).splitlines()[-1]
    link = "[with A](examples/receipts/h200/run-a.json)"
    assert row == f"| {link} | 51.1 s | 32.7 s | 2,460 ms | 0 |"


def test_a_profile_is_a_table_by_kind_of_work_and_micro_batch(tmp_path, monkeypatch):
    kernels = [{"name": "nvjet_a", "launches": 8, "ms": 6.0}, {"name": "gemm", "launches": 4,
               "ms": 2.0}, {"name": "rms_norm_forward", "launches": 2, "ms": 1.0}]  # fmt: skip
    profile = {"step": 7, "span_ms": 12.0, "busy_ms": 10.0, "compute_ms": 9.0, "kernels": kernels}
    schedule = {"global_batch_size": 16, "micro_batch_size": 2}
    run = {"profile": profile, "topology": {"dp": 4},
           "recipe": {"content": {"schedule": schedule}}}  # fmt: skip
    monkeypatch.setattr(profile_table, "read", lambda path: {tmp_path / "run-a.json": run}[path])
    head, _, _, _, *rows = profile_table.profile("run-a", tmp_path).splitlines()
    assert head == "[Its receipt](examples/receipts/h200/run-a.json), step 7:"
    assert rows == [
        "| other products | 4.00 | 6.0 |",
        "| norms | 0.50 | 1.0 |",
        "| an exchange between GPUs and nothing else | 0.50 |  |",
        "| nothing | 1.00 |  |",
        "| from the first to the last | 6.00 |  |",
    ]


def test_a_bench_says_whose_results_are_refused(tmp_path):
    receipt = json.loads((ROOT / "examples/receipts/h200/layer-m2rnn-core-xma.json").read_text())
    errors = {"recipe": (0.01, 0.06), "upstream": (0.25, 0.06), "m2rnn_core=reference": (None,) * 2}

    def row(**changed: tuple) -> str:
        for found in receipt["rows"]:
            found["error"], found["tolerance"] = (errors | changed)[found["backend"]]
        (tmp_path / "layer.json").write_text(json.dumps(receipt))
        words = "layer | R | recipe | upstream: theirs; m2rnn_core=reference: plain"
        return bench_tables.benches(words, tmp_path).splitlines()[-1]

    assert row().count("refused") == 1
    assert "theirs (its results are refused: error 0.250, allowed 0.0600); " in row()
    assert "refused" not in row(upstream=(0.06, 0.06))
    (refused,) = (cell for cell in row(recipe=(0.07, 0.06)).split(" | ") if "0.0700" in cell)
    assert refused.endswith(" (its results are refused: error 0.0700, allowed 0.0600)")


def test_the_logs_of_gpu_tests_are_a_table(tmp_path):
    head = "2026-11-23T01:00:00Z, commit 0123456789abcdef, tree fedcba9876543210, sha256 0"
    (tmp_path / "gpu-tests").mkdir()
    (tmp_path / "gpu-tests/test_x.log").write_text(f"{head}\n2 x H200, driver 1\n\n1 passed, 2 s\n")
    row = gpu_logs.gpu_tests("gpu-tests", tmp_path / "h200").splitlines()[-1]
    link = "[test_x](examples/receipts/gpu-tests/test_x.log)"
    assert row == f"| {link} | 1 passed, 2 s | commit 0123456789ab, tree fedcba987654 | 2 x H200 |"
    changed = head.replace("abcdef,", "abcdef + changes,")
    later = head.replace("tree f", "tree a")
    for name, first in (("y", head), ("z", changed)):
        log = tmp_path / f"gpu-tests/test_{name}.log"
        log.write_text(f"{first}\n2 x H200, driver 1\n\n1 passed, 2 s\n")
    said, *_ = gpu_logs.gpu_tests("gpu-tests", tmp_path / "h200").splitlines()
    one, other = (f"commit 0123456789ab{x}, tree fedcba987654" for x in ("", " + changes"))
    each = f"2 of {one}; 1 of {other}"
    assert said == f"All are of one tree of the package, fedcba987654: {each}."
    log.write_text(f"{later}\n2 x H200, driver 1\n\n1 passed, 2 s\n")
    said, *_ = gpu_logs.gpu_tests("gpu-tests", tmp_path / "h200").splitlines()
    third = "commit 0123456789ab, tree aedcba987654"
    assert said.startswith(f"The logs are of 2 states of the package, 2 of {one}; 1 of {third}: ")
    (tmp_path / "gpu-tests/test_z.log").unlink()
    said, *_ = gpu_logs.gpu_tests("gpu-tests", tmp_path / "h200").splitlines()
    assert said == f"All are of one commit and tree: {one}."


def test_the_page_says_of_what_code_the_logs_of_gpu_tests_are():
    """Every commit and tree of the committed logs; and one tree only if there is one."""
    heads = [
        re.search(r"commit (\w{12})\w*([^,]*), tree (\w{12})", path.read_text())
        for path in (ROOT / "examples/receipts/gpu-tests").glob("*.log")
    ]
    codes = {f"commit {commit}{changes}, tree {tree}" for commit, changes, tree in
             (head.groups() for head in heads)}  # fmt: skip
    text = (ROOT / "docs/performance.md").read_text().partition("## GPU tests")[2]
    said = text.partition("| tests |")[0]
    assert all(code in said for code in codes), codes
    trees = {code.rpartition(" ")[2] for code in codes}
    assert ("All are of one commit and tree: " in said) == (len(codes) == 1)
    assert ("All are of one tree of the package" in said) == (len(trees) == 1 < len(codes))
    assert (f"of {len(trees)} states of the package" in said) == (len(trees) > 1)
    assert "on one tree" not in said


def test_a_changed_figure_is_rendered_again():
    page = PAGES["docs/performance.md"]
    figure = re.search(r"\| ([\d,]+) ms \|", page.text)[1]
    changed = page.text.replace(f"| {figure} ms |", "| 1 ms |", 1)
    assert changed != page.text and blocks.fill(changed, page.path, ROOT) == page.text


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("<!-- rusn\na | b\n-->\n<!-- end -->", "no generator 'rusn'; there are backends, benches"),
        ("<!-- runs\nnorm\n-->\n<!-- end -->", "has 1 parts between bars, 2 are needed"),
        ("<!-- benches\nnorm | x | nobody |\n-->\n<!-- end -->", "nobody"),
        ("<!-- runs\nnowhere | x\n-->\n<!-- end -->", "cannot read the receipt"),
    ],
)
def test_a_block_that_cannot_be_written_is_named(block, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        blocks.fill(block, ROOT / "docs/x.md", ROOT)


class TestKeys:
    def test_every_key_of_the_schema_is_there_once(self):
        assert [fact.key for fact in facts()] == [*KEYS]

    def test_what_the_schema_says_of_a_key(self):
        known = {fact.key: fact for fact in facts()}
        assert known["model.depth"].required and known["model.depth"].note == "layers, MTP apart"
        assert known["schedule.seed"].takes == "an integer from 0, at most 4,294,967,295"
        assert known["model.add_bias_linear"].goes_to == "--disable-bias-linear where false"
        note = known["launch.heartbeat_timeout_s"].note  # the lines above the field
        assert note.startswith("a rank that makes no progress") and known["data.split"].note == ""
        assert known["moe.moe_aux_loss_coeff"].default == "[0.0]"

    @pytest.mark.parametrize("key", ["mamba3.rope_fraction", "recompute.moe"])
    def test_notes_of_the_layers_settings_are_found(self, key):
        assert len({fact.key: fact for fact in facts()}[key].note) > 20
