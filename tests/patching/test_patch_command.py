"""`megacpp patch`, and the two functions that other parts of the plugin call."""

import json
import os
import subprocess
import sys
from email import message_from_bytes

import pytest
from fakelane import NEW, ONE_G, VERSION, make_lane, make_site

from megacpp_mcore import cli, patching
from megacpp_mcore.patching import PatchError, manifest, state
from megacpp_mcore.patching.operations import apply, revert


@pytest.fixture
def run(lane, site, capsys):
    """Run `megacpp patch ...` on the fake site; returns (exit status, stdout, stderr)."""

    def run(*arguments, folder=site):
        options = ["--lane", str(lane.lane)] + (["--site", str(folder)] if folder else [])
        status = cli.main(["patch", arguments[0], *options, *arguments[1:]])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_usual_way(run, site):
    status, out, _ = run("status")
    assert status == 1 and out.count("not applied") == 3
    status, out, _ = run("apply")
    assert status == 0 and f"changed {site}/fakepkg/one.py" in out
    assert "fakepkg: applied: alpha, beta, gamma" in out
    status, out, _ = run("status")
    assert status == 0 and f"fakepkg 1.0 in {site}\n  applied       alpha\n" in out
    assert "nothing would change" in run("apply")[1]
    assert run("revert", "--only", "gamma", "--only", "beta")[0] == 0
    status, out, _ = run("status", "--json")
    assert status == 1
    (row,) = json.loads(out)
    assert [patch["state"] for patch in row["patches"]] == ["applied"] + ["not applied"] * 2
    status, out, _ = run("revert", "--json")
    assert json.loads(out)["applied"] == {"fakepkg": []}


def test_refusals_go_to_stderr_with_status_2(run, site):
    status, out, err = run("apply", "--only", "delta")
    assert (status, out) == (2, "")
    assert err == "megacpp: unknown patch 'delta'; the lane has alpha, beta, gamma\n"
    (site / "fakepkg/one.py").write_bytes(b"mine\n")
    status, out, err = run("apply")
    assert status == 2 and "someone else changed it" in err
    status, out, _ = run("status")
    assert status == 1
    assert "  drifted       beta: fakepkg/one.py\n" in out and "refuse to touch them" in out


def test_nothing_installed(run, tmp_path):
    status, out, _ = run("status", folder=tmp_path / "none")
    assert (status, out) == (1, "fakepkg 1.0: not installed\n")
    status, _, err = run("apply", folder=tmp_path / "none")
    assert status == 2 and "none of fakepkg is installed" in err


def test_list(run):
    status, out, _ = run("list", folder=None)
    assert status == 0 and "  beta  (test needs cpu; upstream: not-reported)\n    why beta\n" in out
    rows = json.loads(run("list", "--json", folder=None)[1])
    assert [row["id"] for row in rows] == ["alpha", "beta", "gamma"]
    assert rows[0]["files"][0]["path"] == "fakepkg/one.py"


def test_verify_fails_when_nothing_is_proved(run, lane):
    status, out, _ = run("verify", "--only", "beta")
    assert status == 1 and out.endswith("0 proved, 0 not run here, 1 failed\n")
    (lane.lane / "reproducers/beta.py").write_text("print('no GPU'); raise SystemExit(77)")
    path = lane.lane / "manifest.toml"
    path.write_text(path.read_text().replace('"cpu"', '"gpu"'))
    status, out, _ = run("verify", "--only", "beta")
    assert status == 1 and "not run here  beta: needs a GPU: no GPU" in out
    (lane.lane / "reproducers/beta.py").write_text(
        "import fakepkg.one as o; raise SystemExit('1515' not in open(o.__file__).read())"
    )
    status, out, _ = run("verify", "--only", "beta", "--json")
    assert status == 0 and json.loads(out)[0]["verdict"] == "proved"


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e10", "-1", "soon"])
@pytest.mark.parametrize("option", [("apply", "--wait"), ("verify", "--timeout")])
def test_seconds_that_nothing_can_wait_for_are_refused(lane, site, option, seconds, capsys):
    verb, name = option
    words = ["patch", verb, "--lane", str(lane.lane), "--site", str(site), f"{name}={seconds}"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"{name}: {seconds!r} is not a number of seconds from 0 to 1,000,000" in said


def test_export_prints_a_mail(lane, site, capfdbinary):
    arguments = ["--lane", str(lane.lane), "--site", str(site), "alpha", "--author", "A <a@b>"]
    assert cli.main(["patch", "export", *arguments]) == 0
    mail = message_from_bytes(capfdbinary.readouterr().out)
    assert (mail["From"], mail["Subject"]) == ("A <a@b>", "[PATCH] Why alpha.")


def test_port(run):
    status, out, _ = run("port", "--to", VERSION)
    assert status == 0 and out.count("applies as is") == 3


def test_new(run, lane, site, tmp_path):
    run("apply")
    (tmp_path / "edited/fakepkg").mkdir(parents=True)
    (tmp_path / "edited/fakepkg/one.py").write_bytes(ONE_G + b"last = 1\n")
    test = tmp_path / "check.py"
    test.write_text("import fakepkg.one as o; raise SystemExit(not hasattr(o, 'last'))")
    arguments = ["--from", str(tmp_path / "edited"), "--test", str(test)]
    status, out, err = run("new", "delta", *arguments, "--reason", "why", "--drop-when", "never")
    assert status == 0, err
    assert "proved        delta" in out and f"wrote {lane.lane}/delta.patch" in out
    assert run("apply")[0] == 0
    assert (site / "fakepkg/one.py").read_bytes().endswith(b"last = 1\n")


def test_new_into_an_installed_lane_must_be_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(manifest, "shipped_lane", lambda: tmp_path / "patches")
    arguments = ["--from", ".", "--test", "x", "--reason", "r", "--drop-when", "d"]
    assert cli.main(["patch", "new", "delta", *arguments]) == 2
    assert "belongs to an installed package" in capsys.readouterr().err


@pytest.fixture
def here(lane, site, monkeypatch):
    """The fake site on this interpreter's path, the fake lane as the shipped one."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(manifest, "shipped_lane", lambda: lane.lane)
    patching.applied.cache_clear()
    yield
    patching.applied.cache_clear()


def test_applied_and_missing(here, lane, site):
    assert patching.applied("fakepkg") == frozenset()
    assert patching.missing(["gamma", "alpha"]) == ("alpha", "gamma")
    apply(lane, None, ["alpha"])
    patching.applied.cache_clear()
    assert patching.applied("fakepkg") == {"alpha"}
    assert patching.missing(["gamma", "alpha"]) == ("gamma",)
    assert patching.missing([]) == ()
    (site / "fakepkg/sub/two.py").write_bytes(b"mine\n")
    patching.applied.cache_clear()
    assert patching.applied("fakepkg") == frozenset()


def test_applied_refuses_what_it_does_not_know(here):
    with pytest.raises(PatchError, match="no package 'torch'; it has fakepkg"):
        patching.applied("torch")
    with pytest.raises(PatchError, match="unknown patch 'delta'"):
        patching.missing(["delta"])


def test_another_version_has_no_patch_applied(here, lane, site):
    apply(lane, site)
    (site / "fakepkg-1.0.dist-info/METADATA").write_text("Name: fakepkg\nVersion: 1.1\n")
    assert patching.applied("fakepkg") == frozenset()


@pytest.mark.parametrize("has_the_file", [True, False])
def test_a_checkout_that_hides_the_package(here, lane, site, tmp_path, monkeypatch, has_the_file):
    """The lane is on the wheel, but Python would import the checkout: nothing is applied here."""
    apply(lane, site)
    assert patching.applied("fakepkg") == {"alpha", "beta", "gamma"}
    (tmp_path / "checkout/fakepkg").mkdir(parents=True)
    (tmp_path / "checkout/fakepkg/__init__.py").touch()
    if has_the_file:
        (tmp_path / "checkout/fakepkg/one.py").write_bytes(ONE_G)
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    patching.applied.cache_clear()
    assert patching.applied("fakepkg") == frozenset()
    with pytest.raises(PatchError, match=r"imports .* from .*checkout.*take it off PYTHONPATH"):
        revert(lane)
    assert state.status(lane, site)[0]["complete"]  # asked for by name, it is what it is
    revert(lane, site)
    assert not (site / "fakepkg/new.py").exists() and NEW


def test_a_namespace_package_is_no_cover(here, lane, site, tmp_path, monkeypatch):
    """A folder of the same name without __init__.py adds to a package, it does not hide it."""
    (site / "fakepkg/__init__.py").unlink()
    (tmp_path / "other/fakepkg").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    apply(lane)
    assert patching.applied("fakepkg") == {"alpha", "beta", "gamma"}


def test_asking_is_cheap():
    """The door is used when a layer is built: no torch, no Megatron, no TOML writer."""
    code = (
        "import sys; from megacpp_mcore import patching; patching.missing([]);"
        "from megacpp_mcore.patching import manifest, state; import megacpp_mcore.commands.patch;"
        "print([m for m in ('torch', 'tomlkit', 'megatron') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


def test_the_default_site_is_the_first_on_the_path(here, lane, site, tmp_path, monkeypatch):
    second = make_site(tmp_path / "second")
    monkeypatch.syspath_prepend(str(second))
    apply(lane)
    assert (second / "fakepkg/new.py").exists() and not (site / "fakepkg/new.py").exists()


def with_another_package(lane, tmp_path):
    """The lane with `omega` for otherpkg."""
    other = make_lane(
        tmp_path / "lane2", {"omega": {"otherpkg/x.py": (b"a\n", b"b\n")}}, package="otherpkg"
    )
    text = (other / "manifest.toml").read_text().split("\n\n", 1)[1]
    path = lane.lane / "manifest.toml"
    path.write_text(path.read_text() + text)
    for name in ("omega.patch", "reproducers/omega.py"):
        (lane.lane / name).write_bytes((other / name).read_bytes())
    return manifest.load(lane.lane)


def test_a_site_of_its_own_for_each_package(lane, site, tmp_path, monkeypatch):
    """A package from the base environment under a venv: both sites are patched, each on its own."""
    base = make_site(tmp_path / "base", {"otherpkg/x.py": b"a\n"}, name="otherpkg")
    monkeypatch.syspath_prepend(str(base))
    monkeypatch.syspath_prepend(str(site))
    both = with_another_package(lane, tmp_path)
    assert apply(both).applied == {"fakepkg": ("alpha", "beta", "gamma"), "otherpkg": ("omega",)}
    assert (base / "otherpkg/x.py").read_bytes() == b"b\n"
    assert (base / ".megacpp_patches").is_dir() and (site / ".megacpp_patches").is_dir()
    revert(both)
    assert (base / "otherpkg/x.py").read_bytes() == b"a\n"


def test_a_site_where_nothing_is_to_do_may_be_read_only(lane, site, tmp_path, monkeypatch):
    base = make_site(tmp_path / "base", {"otherpkg/x.py": b"a\n"}, name="otherpkg")
    both = with_another_package(lane, tmp_path)
    monkeypatch.syspath_prepend(str(base))
    monkeypatch.syspath_prepend(str(site))
    apply(both, None, ["omega"])
    monkeypatch.setattr("os.access", lambda path, mode: base not in (path, *path.parents))
    assert apply(both).applied == {"fakepkg": ("alpha", "beta", "gamma"), "otherpkg": ("omega",)}
