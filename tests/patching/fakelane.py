"""A small fake site-packages with one package, and lanes of patches for it."""

import base64
import hashlib
import os
import signal
import stat
import sys
import traceback
from pathlib import Path

import pytest

from megacpp_mcore.patching import PatchError, diffs, manifest, state
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER

ONE = b"".join(b"one = %d\n" % n for n in range(20))
TWO = b"def two():\r\n    return 2\r\n\r\n# no newline at the end"
FILES = {"fakepkg/__init__.py": b"", "fakepkg/one.py": ONE, "fakepkg/sub/two.py": TWO}
VERSION = "1.0"


def edit(data: bytes, *changes: tuple[bytes, bytes]) -> bytes:
    """`data` with each first text, which must be there once, replaced by the second."""
    for old, new in changes:
        assert data.count(old) == 1, old
        data = data.replace(old, new)
    return data


# Three patches: `alpha` on one.py and two.py, `beta` on one.py far from it, `gamma` on alpha's own
# lines of one.py, and on a file that it creates.
ONE_A = edit(ONE, (b"one = 3\n", b"one = 33\none = 333\n"))
ONE_B = edit(ONE_A, (b"one = 15\n", b"one = 1515\n"))
ONE_G = edit(ONE_B, (b"one = 33\n", b"one = 3333\n"))
TWO_A = edit(TWO, (b"return 2", b"return 22"), (b"the end", b"the very end\n"))
NEW = b"NEW = 1\n"
PATCHES = {
    "alpha": {"fakepkg/one.py": (ONE, ONE_A), "fakepkg/sub/two.py": (TWO, TWO_A)},
    "beta": {"fakepkg/one.py": (ONE_A, ONE_B)},
    "gamma": {"fakepkg/one.py": (ONE_B, ONE_G), "fakepkg/new.py": (None, NEW)},
}
# A reproducer's text: right when one.py has the line `text`.
CHECKS = """import sys
import fakepkg.one
text = open(fakepkg.one.__file__).read()
print("has it" if {text!r} in text else "has it not")
sys.exit({text!r} not in text)
"""
REPRODUCER = "import sys\nfrom fakepkg import one\nsys.exit(0)\n"


def record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def make_site(folder: Path, files=None, version=VERSION, name="fakepkg") -> Path:
    """Install the fake package into `folder`, as pip would leave it."""
    files = FILES if files is None else files
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    everything = {**files, f"{info}/METADATA": metadata, f"{info}/INSTALLER": b"pip\n"}
    record = "".join(record_line(path, data) for path, data in sorted(everything.items()))
    everything[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    for path, data in everything.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder.resolve()


def entry(name: str, changes: dict, package: str, extra: str = "") -> str:
    lines = [
        "[[patch]]",
        f'id = "{name}"',
        f'package = "{package}"',
        f'file = "{name}.patch"',
        f'reason = "why {name}"',
        'drop_when = "upstream has it"',
        f'test = "{name}.py"',
        'needs = "cpu"',
        'upstream = { state = "not-reported" }',
    ]
    for path, (before, after) in changes.items():
        lines += [
            "[[patch.files]]",
            f'path = "{path}"',
            f'sha256_before = "{manifest.sha256(before)}"',
            f'sha256_after = "{manifest.sha256(after)}"',
        ]
    return "\n".join(lines) + extra + "\n\n"


def make_lane(folder: Path, patches=None, version=VERSION, package="fakepkg") -> Path:
    """Write a lane: manifest, diffs, reproducers."""
    patches = PATCHES if patches is None else patches
    (folder / "reproducers").mkdir(parents=True, exist_ok=True)
    text = f'schema = 1\n\n[[package]]\nname = "{package}"\nversion = "{version}"\n\n'
    for name, changes in patches.items():
        body = b"".join(diffs.make(path, *change) for path, change in changes.items())
        (folder / f"{name}.patch").write_bytes(f"Why {name}.\n\n".encode() + body)
        (folder / "reproducers" / f"{name}.py").write_text(REPRODUCER)
        text += entry(name, changes, package)
    (folder / "manifest.toml").write_text(text)
    return folder


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file below `folder`: its bytes, mode; folders too, caches left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            found[str(path.relative_to(folder))] = (
                path.read_bytes() if path.is_file() else b"",
                mode,
            )
    return found


def states(lane, site) -> dict[str, str]:
    """patch id -> its state, of a lane with one package."""
    (row,) = state.status(lane, site)
    return {patch["id"]: patch["state"] for patch in row["patches"]}


def refused(function, message, *arguments) -> None:
    """The call is refused with `message`, and the site is left as it was."""
    site = arguments[1]
    before = snapshot(site)
    with pytest.raises(PatchError, match=message):
        function(*arguments)
    assert snapshot(site) == before


# what Python reports before it changes the disk -> which of its arguments is the path
_CHANGES = {"open": 0, "os.mkdir": 0, "os.remove": 0, "os.rename": 1, "os.rmdir": 0}


def in_child(function, step=None):
    """Start `function` in a forked child; returns its pid.

    step(path) is called there before each single change to the disk.
    """
    child = os.fork()
    if child:
        return child

    def audit(event, arguments):
        writes = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _CHANGES and writes:
            step(str(arguments[_CHANGES[event]]))

    status = 1
    try:
        if step:
            sys.addaudithook(audit)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def outcome(child):
    """True when the child ended well, False when it was killed."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def content(site):
    """The package's own files: what imports see."""
    found = snapshot(site)
    return {path: value for path, value in found.items() if not path.startswith(FOLDER)}


def two_sets(lane, site, ids=()):
    """(files without the patches, files with them); the site is left without them."""
    old = content(site)
    apply(lane, site, ids)
    new = content(site)
    revert(lane, site)
    assert content(site) == old != new
    return old, new


class DiesAt:
    """A step that kills its process at the n-th change to the disk."""

    def __init__(self, number):
        self.left = number

    def __call__(self, path):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def is_switch(site, path):
    """Whether a change to the disk is that of a file of a package, not of the lane's own."""
    return path.startswith(f"{site}/") and FOLDER not in path and not path.endswith(".pyc")


def kill_between_switches(lane, site, operation=apply, switches=1):
    """Leave a run broken off after some of its files were switched."""

    def step(path):
        if is_switch(site, path):
            step.seen += 1
            if step.seen == switches + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    step.seen = 0
    assert not outcome(in_child(lambda: operation(lane, site), step))
