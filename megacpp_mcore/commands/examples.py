"""Examples for the help of commands whose own epilog has none, and the exit statuses."""

import argparse
import re
from collections.abc import Iterator

EXIT_STATUS = """\
exit status: 0 done; 1 failed on the way, or the answer is no (a check, a difference); 2 refused,
nothing was changed, the reason is on stderr; 128 + N ended by signal N (130: Ctrl-C).

examples:
  megacpp train nam56r-tiny
  megacpp recipe show nam56r
  megacpp doctor
"""
_EXAMPLES = {
    "recipe": ("recipe list", "recipe show nam56r"),
    "recipe list": ("recipe list", "recipe list --json"),
    "recipe show": ("recipe show nam56r", "recipe show nam56r-tiny --set model.depth=24 --all"),
    "data": ("data build src --out data/src", "data check data/src"),
    "data check": ("data check data/src", "data check data/src --json"),
    "train": (
        "train nam56r-tiny --steps 20 --out runs/short",
        "train nam56r-tiny --resume --set schedule.train_iters=600",
        "train nam56r --gpus 8 --set data.data_path=data/cpp --out runs/first",
    ),
    "report": (
        "report show runs/nam56r-tiny",
        "report compare runs/a runs/b",
    ),
    "report show": (
        "report show runs/nam56r-tiny",
        "report show -v runs/nam56r-tiny/receipt.json",
    ),
    "report compare": (
        "report compare runs/a runs/b",
        "report compare before.json after.json --margin 0.02 --json",
    ),
    "report html": ("report html runs/nam56r-tiny", "report html runs/a runs/b --out ab.html"),
    "report watch": ("report watch runs/first", "report watch runs/first --interval 10"),
    "checkpoint list": ("checkpoint list runs/a", "checkpoint list runs/a --json"),
    "checkpoint verify": ("checkpoint verify runs/a", "checkpoint verify runs/a --iteration 300"),
    "checkpoint prune": (
        "checkpoint prune runs/a --keep 2",
        "checkpoint prune runs/a --keep 1 --dry-run",
    ),
    "catalog": ("catalog --problem nam56r", "catalog --surface core_attention --json"),
    "doctor": ("doctor", "doctor --recipe nam56r --json"),
    "cuda": ("cuda install", "cuda wheels --out wheels --archs 90"),
    "cuda install": ("cuda install", "cuda install --wheels wheels"),
    "cuda wheels": ("cuda wheels --out wheels --archs 90", "cuda wheels --out wheels --jobs 2"),
    "patch list": ("patch list", "patch list --json"),
    "patch status": ("patch status", "patch status --site /opt/env/site-packages"),
    "patch apply": ("patch apply", "patch apply --only mla-rope-head-mask"),
    "patch revert": ("patch revert", "patch revert --only mla-rope-head-mask"),
    "patch verify": ("patch verify", "patch verify --only mtp-padding-mask --json"),
    "patch new": (
        "patch new my-fix --from edited/ --test reproduce.py --reason '...' --drop-when '...'",
        "patch new gpu-fix --from edited/ --test reproduce.py --reason '...' --drop-when '...' "
        "--needs gpu",
    ),
    "patch export": (
        "patch export mtp-padding-mask",
        "patch export mtp-padding-mask --author 'A <a@example.org>'",
    ),
    "patch port": (
        "patch port --to 0.20.0 --site new/site-packages",
        "patch port --to 0.20.0 --site new/site-packages --json",
    ),
}


def walk(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name such as "recipe show", parser) of every command below `parser`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                path = f"{name} {word}".strip()
                yield path, child
                yield from walk(child, path)


def lines(parser: argparse.ArgumentParser) -> list[str]:
    """The examples in a parser's epilog, one line each; a remark after three spaces is cut off."""
    text = re.sub(r"\s*\\\n\s*", " ", parser.epilog or "")
    found = [line.strip() for line in text.splitlines() if line.startswith("  megacpp ")]
    return [line.partition("   ")[0] for line in found]


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Add examples to the help of every command that has fewer than two."""
    parser.epilog = EXIT_STATUS
    for name, child in walk(parser):
        if len(lines(child)) < 2 and name in _EXAMPLES:
            listed = "".join(f"  megacpp {words}\n" for words in _EXAMPLES[name])
            before = f"{child.epilog.rstrip()}\n\n" if child.epilog else ""
            child.epilog = f"{before}examples:\n{listed}"
