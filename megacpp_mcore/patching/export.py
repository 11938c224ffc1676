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
    title, message = _prose(patch)
    repository, tag = _UPSTREAM.get(patch.package, (patch.package, str))
    message.append(f"Against {repository} {tag(manifest.packages[patch.package])}.")
    if needs:
        message.append(f"Apply first: {', '.join(needs)}.")
    if b"\r\n" in body:
        message.append("The diff holds carriage returns: use `git am --keep-cr`.")
    if "link" in patch.upstream:
        message.append(f"See {patch.upstream['link']}")
    message.append("Reproducer (exit 0: right, 1: the defect, 77: cannot run here):")
    for script in _scripts(patch.reproducer):
        text = script.read_text(encoding="utf-8").rstrip()
        message.append(f"{script.name}:\n\n{textwrap.indent(text, '    ')}")
    head = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {_author(author)}",
        f"Date: {formatdate(localtime=True)}",
        f"Subject: {Header(f'[PATCH] {title}', maxlinelen=_ONE_LINE).encode()}",
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
    files = [(found.original(file.path), links[file.path]) for file in patch.files]
    chosen = diffs.closure(files, patch.id)
    first = chosen - {patch.id}
    body = b"".join(
        diffs.make(file.path, found.composed(file.path, first), found.composed(file.path, chosen))
        for file in patch.files
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


def _prose(patch: Patch) -> tuple[str, list[str]]:
    """The subject, and the message's first paragraphs: the manifest's reason and the patch file's
    header, once each. The subject is the header's first line, or the id in words."""
    header, reason = diffs.header_and_body(patch.text)[0], patch.reason.strip()
    first, _, rest = header.partition("\n")
    title = header.splitlines()[0].strip()
    title = title if len(title) <= _TITLE else patch.id.replace("-", " ")
    header = rest.strip() if first.strip() == title else header
    words = {text: " ".join(text.split()) for text in (reason, header)}
    wanted = [header] if words[reason] in words[header] else [reason, header]
    return title, [_safe(text) for text in wanted if text and words[text] != title]


def _safe(text: str) -> str:
    """The text with every line indented that git would take for something else than prose."""
    lines = text.splitlines()
    return "\n".join(f"  {line}" if line.startswith(_NOT_PROSE) else line for line in lines)


def _author(author: str | None) -> str:
    if author is None:
        git = (["git", "config", f"user.{key}"] for key in ("name", "email"))
        said = [subprocess.run(words, capture_output=True, text=True).stdout for words in git]
        author = formataddr([each.strip() for each in said])
    name, address = parseaddr(author)
    if not name or "@" not in address or not f"{name}{address}".isprintable():
        raise PatchError(
            f"author {author!r} is not of the form 'Name <address>'; give --author, or set git's "
            f"user.name and user.email"
        )
    return formataddr((name, address))
