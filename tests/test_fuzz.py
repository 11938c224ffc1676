"""Every reader through generated input: exit status 2 and a cause, or correct work; nothing lost.

A hundred inputs a reader here; `MEGACPP_FUZZ=1000 pytest tests/test_fuzz.py` is the long run. A
failure prints its input; the seed is fixed, and MEGACPP_FUZZ_SEED gives another.
"""

import copy
import json
import os
import random
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore import cli
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.training.checkpoints import checksums
from megacpp_mcore.training.cpu import checkpoint

COUNT = int(os.environ.get("MEGACPP_FUZZ", 100))
SEED = int(os.environ.get("MEGACPP_FUZZ_SEED", 22))
pytestmark = pytest.mark.timeout(60 + COUNT)

NUMBERS = ["0", "-1", "1", "2", "7", "1e400", "nan", "inf", "1.5", "9" * 25, "9" * 5000,
           "4294967296", "-9223372036854775809", "0x10", "1_000"]  # fmt: skip
TEXTS = ["", " ", "null", "true", "a\0b", "é", "-x", "--set", "x" * 5000, "[" * 1000, "{", '"', "'",
         "=", "..", "../x", "/dev/zero", "\n", "A" * 300]  # fmt: skip
JSON = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", "x" * 5000, "\0",
        [], [1], {}, {"a": 1}, [[]], [None]]  # fmt: skip


def generated(name: str):
    """COUNT random generators for one reader."""
    return [random.Random(f"{SEED} {name} {number}") for number in range(COUNT)]


def done(call: Callable[[], Any], what: Any) -> bool:
    """Whether `call` did its work; False when it refused. Anything else is a failure.

    Within seconds: a hang is none of both.
    """
    started = time.monotonic()
    try:
        call()
        good = True
    except MegacppError as error:
        assert str(error).strip(), what
        good = False
    except SystemExit as end:  # argparse
        assert end.code in (0, 2), what
        good = end.code == 0
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nof {what!r}") from error
    assert time.monotonic() - started < 10, what
    return good


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of plain data with some of its parts replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        place, parents = value, []
        while isinstance(place, dict | list) and place and (not parents or rng.random() < 0.7):
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            parents.append((place, key))
            place = place[key]
        if not parents:
            return rng.choice(JSON)
        holder, key = parents[-1]
        match rng.randrange(3):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(["", "extra", "\0", "x" * 300])] = rng.choice(JSON)
            case _:
                holder[key] = rng.choice(JSON)
    return value


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes that were cut, flipped, or had something put into them."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:]
        case 2:
            end = at + rng.randint(1, 8)
            return data[:at] + rng.randbytes(len(data[at:end])) + data[end:]
    return data[:at] + rng.choice([b"[" * 5000, b"9" * 5000, b"\0" * 9]) + data[at:]


def test_patterns():
    """What is translated has the letters that were typed, as often."""
    from megacpp_mcore.hybrid.pattern import translate
    from megacpp_mcore.hybrid.plan import HybridPlan

    good = 0
    for rng in generated("pattern"):
        length = rng.choice([1, 3, 12, 40])
        letters = "AEMR" if rng.random() < 0.6 else "AEMRDX|/*+-1a \0é"
        pattern = "".join(rng.choice(letters) for _ in range(length))
        options = {"depth": rng.choice([None, 1, 7, 52, 0, -1, 10**6, 10**18]),
                   "mtp_depths": rng.choice([0, 0, 0, 1, -1, 10**9])}  # fmt: skip
        options["mtp_pattern"] = rng.choice(["", "AE", "X"]) if options["mtp_depths"] else ""
        plans: list[HybridPlan] = []
        if done(lambda p=pattern, o=options, f=plans: f.append(translate(p, **o)), pattern):
            good += 1
            typed = pattern.replace("|", "").upper()
            expected = (typed * 60)[: options["depth"] or len(typed)]
            assert "".join(layer.letter for layer in plans[0].main_layers) == expected
    assert 0.05 * COUNT < good < 0.95 * COUNT


def toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_recipes(tmp_path):
    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.recipe.source import KEYS

    tiny = load_recipe("nam56r-tiny")
    good, keys = 0, [*KEYS, "backends.norm", "launch.environment.A", "x.y", "model", ""]
    for rng in generated("recipe"):
        path, key = tmp_path / "r.toml", rng.choice(keys)
        value = rng.choice([*NUMBERS, *map(json.dumps, TEXTS), "[1, 2]", "{a = 1}", "[[]]", "true"])
        if key in KEYS and rng.random() < 0.4:
            value = json.dumps(tiny.get(key)).replace("null", '""')
        section, _, name = key.partition(".")
        text = f'extends = "nam56r-tiny"\n[{section}]\n{name} = {value}\n'
        if rng.random() < 0.3:
            text = damaged(text.encode(), rng).decode(errors="surrogateescape")
        path.write_bytes(text.encode(errors="surrogateescape"))
        found = []
        if done(lambda f=found, p=path: f.append(load_recipe(str(p)).to_dict()), text[:500]):
            good += 1
            asked = tomllib.loads(text).get(section, {})
            for entry, wanted in asked.items():
                if isinstance(wanted, int | float | bool) and entry in found[0].get(section, {}):
                    got = found[0][section][entry]
                    assert got == (float(wanted) if type(got) is float else wanted), text
    assert good > 0.02 * COUNT


def test_command_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text("{}")
    words = ["recipe", "show", "check", "list", "args", "nam56r-tiny", "translate", "AEMR",
             "report", "compare", "plot", "r.json", "catalog", "data", "build", "--out", "o",
             "--json", "--set", "model.depth=4", "--depth", "4", "--resume", "--resume-from",
             "--overwrite", "--steps", "--help", "--version", "patch", "status",
             "train"]  # fmt: skip
    for rng in generated("argv"):
        argv = [rng.choice(words) for _ in range(rng.randint(0, 6))]
        for _ in range(rng.randint(0, 2)):
            argv.insert(rng.randint(0, len(argv)), rng.choice([*TEXTS, *NUMBERS]))

        def call(argv=argv):
            status = cli.main(argv)
            if status not in (0, 1, 2):
                raise AssertionError(status)

        done(call, argv)
        assert "Traceback" not in capsys.readouterr().err, argv


def test_datasets(corpus, tmp_path):
    """A pair that is read has the tokens that were written, whatever its manifest says."""
    from megacpp_mcore.training.data.files import read_pair

    files = {suffix: Path(f"{corpus}.{suffix}").read_bytes() for suffix in ("idx", "json")}
    whole = read_pair(corpus).tokens
    prefix = tmp_path / "d"
    Path(f"{prefix}.bin").symlink_to(f"{corpus}.bin")
    for rng in generated("dataset"):
        now = dict(files)
        if rng.random() < 0.5:
            document = mutated(json.loads(files["json"]), rng)
            now["json"] = json.dumps(document).encode()
        else:
            which = rng.choice(["idx", "json"])
            now[which] = damaged(files[which], rng)
        for suffix, data in now.items():
            Path(f"{prefix}.{suffix}").write_bytes(data)
        found = []
        if done(lambda f=found: f.append(read_pair(prefix)), now["json"][:300]):
            assert (found[0].tokens == whole).all()
            manifest = found[0].manifest
            assert 0 <= manifest["eod_id"] < manifest["vocab_size"]


def test_receipts(tmp_path):
    import receipt_samples as samples

    from megacpp_mcore import receipts
    from megacpp_mcore.receipts.show import show

    path = tmp_path / "r.json"
    samples.train(path)
    whole = path.read_bytes()
    for rng in generated("receipt"):
        data = damaged(whole, rng)
        if rng.random() < 0.6:
            data = json.dumps(mutated(json.loads(whole), rng)).encode()
        path.write_bytes(data)
        done(lambda: show(receipts.read(path), "r.json"), data[:300])
        assert path.read_bytes() == data  # nothing lost


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_text) -> Path:
    """The checkpoint of a run's first step."""
    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.training.cpu.train import train

    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "small.toml").write_text(small_text)
    train(load_recipe(str(folder / "small.toml")), folder / "run", steps=1)
    return checkpoint.latest(folder / "run" / "checkpoints")


@pytest.mark.slow
def test_checkpoint_metadata(saved, tmp_path):
    """`progress.json`, the checksums and the index: damage is named, and nothing is changed."""
    from megacpp_mcore.stack import unpickling

    names = ["progress.json", checksums.NAME, ".metadata", "metadata.json"]
    folder = shutil.copytree(saved, tmp_path / saved.name)
    whole = {name: (folder / name).read_bytes() for name in names}
    for rng in generated("checkpoint"):
        name = rng.choice(names)
        data = damaged(whole[name], rng)
        if name.endswith(".json") and rng.random() < 0.6:
            data = json.dumps(mutated(json.loads(whole[name]), rng)).encode()
        (folder / name).write_bytes(data)

        seen = not done(lambda: checksums.verify(folder), (name, data[:300]))
        assert seen or name == checksums.NAME or data == whole[name], (name, data[:300])

        def read() -> None:
            checksums.verify(folder)  # first, as a load does
            checkpoint._read_progress(folder)
            try:
                unpickling.read_index(folder)
            except ValueError as error:
                raise MegacppError(str(error)) from error

        done(read, (name, data[:300]))
        assert (folder / name).read_bytes() == data
        (folder / name).write_bytes(whole[name])


def test_manifests(tmp_path):
    """The patch lane's: what loads names files of its own folder alone."""
    from megacpp_mcore.patching import manifest

    lane = shutil.copytree(manifest.load().lane, tmp_path / "lane")
    file = lane / "manifest.toml"
    whole = file.read_bytes()
    for rng in generated("manifest"):
        data = damaged(whole, rng)
        if rng.random() < 0.5:
            lines = whole.decode().splitlines()
            at = rng.randrange(len(lines))
            name = lines[at].partition("=")[0] or "x"
            lines[at] = f"{name}= {rng.choice([*NUMBERS, *map(json.dumps, TEXTS)])}"
            data = "\n".join(lines).encode()
        file.write_bytes(data)
        found = []
        if done(lambda f=found: f.append(manifest.load(lane)), data[:300]):
            for patch in found[0].patches:
                assert (lane / patch.file).resolve().parent == lane.resolve()
                assert all(".." not in touched.path for touched in patch.files)
