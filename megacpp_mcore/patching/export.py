"""A patch of the lane as a mail that `git am` takes in the upstream repository."""

import ast
import subprocess
import textwrap
from collections.abc import Callable
from email.header import Header
from email.utils import formataddr, formatdate, parseaddr
from pathlib import Path

from megacpp_mcore.patching import PatchError, diffs, state
from megacpp_mcore.patching.manifest import Manifest, Patch

# package -> (upstream repository, its tag of a version); the wheels' paths are the repositories'.
_UPSTREAM: dict[str, tuple[str, Callable[[str], str]]] = {
    "megatron-core": ("NVIDIA/Megatron-LM", lambda version: f"core_v{version}"),
    "mamba-ssm": ("state-spaces/mamba", lambda version: f"v{version}"),
}
# `git am` ends the message or takes a header at these; an mbox begins a new mail at "From ".
_NOT_PROSE = ("---", "diff ", "Index: ", "From ", "From:", "Date:", "Subject:")
_TITLE = 100  # characters of a header's first line that still make a subject
_ONE_LINE = 998  # a mail header's longest line


def export(
    manifest: Manifest, patch_id: str, folder: Path | None = None, author: str | None = None
) -> bytes:
    """The mail: subject and reason, the reproducer as text, the diff against the release tag.

    folder: site-packages, read only when another patch of the lane changes a file of this one: then
    the diff is recomputed against the original file, or against the original with just the patches
    it builds on, which the message names. author: "Name <address>", default git's own user.
    Raises PatchError for an unknown id, no author, or originals that cannot be had.
    """
    (patch,) = manifest.select([patch_id])
    body, needs = _diff(manifest, patch, folder)
    message = [_safe(text) for text in _reasons(patch)]
    repository, tag = _UPSTREAM.get(patch.package, (patch.package, str))
    message.append(f"Against {repository} {tag(manifest.packages[patch.package])}.")
    if needs:
        message.append(f"Apply first: {', '.join(needs)}.")
    if b"\r\n" in body:
        message.append("The diff holds carriage returns: use `git am --keep-cr`.")
    if "link" in patch.upstream:
        message.append(f"See {patch.upstream['link']}")
    message.append("Reproducer (exit 0: right, 1: the defect, 77: cannot run here):")
    message += [
        f"{script.name}:\n\n" + textwrap.indent(script.read_text(encoding="utf-8").rstrip(), "    ")
        for script in _scripts(patch.reproducer)
    ]
    head = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {_author(author)}",
        f"Date: {formatdate(localtime=True)}",
        f"Subject: {Header(f'[PATCH] {_title(patch)}', maxlinelen=_ONE_LINE).encode()}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
    ]
    text = "\n".join(head) + "\n\n" + "\n\n".join(message) + "\n---\n\n"
    return text.encode() + body + b"-- \nmegacpp patch export\n"


def _diff(manifest: Manifest, patch: Patch, folder: Path | None) -> tuple[bytes, list[str]]:
    """The diff against the release, and the patches to apply first."""
    links = manifest.links(patch.package)
    if all(links[file.path][0].id == patch.id for file in patch.files):
        return diffs.header_and_body(patch.text)[1], []
    found = state.read(manifest, patch.package, folder)
    if found.installed is None or found.problem or found.interrupted:
        reason = found.problem or found.interrupted or f"{patch.package} is not installed"
        raise PatchError(
            f"patch {patch.id!r} shares a file with an earlier patch, so its export needs the "
            f"original file: {reason}"
        )
    originals = {file.path: found.original(file.path) for file in patch.files}
    chosen, before = frozenset({patch.id}), frozenset()
    while chosen != before:
        before = chosen
        for path, original in originals.items():
            chosen |= diffs.closure(original, links[path], chosen)
    first = chosen - {patch.id}
    body = b"".join(
        diffs.make(path, found.composed(path, first), found.composed(path, chosen))
        for path in originals
    )
    return body, [each.id for each in manifest.patches if each.id in first]


def _scripts(script: Path) -> list[Path]:
    """The reproducer and the files of its folder that it imports."""
    found = [script]
    for each in found:
        try:
            tree = ast.parse(each.read_bytes().decode())
        except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, a NUL
            raise PatchError(f"{each}: cannot be read as Python: {error}") from error
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            siblings = [script.with_name(f"{name.split('.')[0]}.py") for name in names]
            found += [path for path in siblings if path.is_file() and path not in found]
    return found


def _title(patch: Patch) -> str:
    """One line for the subject: the first of the patch file's header, or the id in words."""
    first = diffs.header_and_body(patch.text)[0].splitlines()[0].strip()
    return first if len(first) <= _TITLE else patch.id.replace("-", " ")


def _reasons(patch: Patch) -> list[str]:
    """The manifest's reason and the patch file's header, once each."""
    header = diffs.header_and_body(patch.text)[0]
    title, _, rest = header.partition("\n")
    header = rest.strip() if title.strip() == _title(patch) else header
    words = {text: " ".join(text.split()) for text in (patch.reason.strip(), header)}
    reason = words[patch.reason.strip()]
    wanted = [header] if reason in words[header] else [patch.reason.strip(), header]
    return [text for text in wanted if text and words[text] != _title(patch)]


def _safe(text: str) -> str:
    """The text with every line indented that git would take for something else than prose."""
    return "\n".join(
        f"  {line}" if line.startswith(_NOT_PROSE) else line for line in text.splitlines()
    )


def _author(author: str | None) -> str:
    if author is None:
        author = formataddr((_git_config("user.name"), _git_config("user.email")))
    name, address = parseaddr(author)
    if not name or "@" not in address or not f"{name}{address}".isprintable():
        raise PatchError(
            f"author {author!r} is not of the form 'Name <address>'; give --author, or set git's "
            f"user.name and user.email"
        )
    return formataddr((name, address))


def _git_config(key: str) -> str:
    command = ["git", "config", key]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
