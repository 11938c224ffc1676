"""A sample of wrong versions of this package, each given to the tests that should refuse it.

    python tests/mutate.py FILE [FILE ...] [--tests TEST ...] [--sample 20] [--seed 1]

FILE: modules of megacpp_mcore, by path. TEST: what pytest takes; by default the files that name the
module. A mutation changes one token's meaning: a comparison, an arithmetic or boolean operator,
a number, a condition, a return value, or leaves out a call for its effect. The files are changed in
a copy of the checkout. The survivors are printed, each as a line before and after, and the exit
status is 1 where there are any. What survives wants a test, or makes no difference.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult,
}  # fmt: skip


def mutations(source: str) -> Iterator[tuple[int, str]]:
    """(line, the whole text after one change), of every place that can be changed."""
    places = [node for node in ast.walk(ast.parse(source)) if _kinds(node)]
    for place in range(len(places)):
        for kind in range(_kinds(places[place])):
            tree = ast.parse(source)
            node = [node for node in ast.walk(tree) if _kinds(node)][place]
            _change(node, kind)
            yield node.lineno, _spliced(source, tree, node)


def _kinds(node: ast.AST) -> int:
    """How many ways there are to change a node."""
    if isinstance(node, ast.Compare):
        return int(type(node.ops[0]) in _COMPARISONS)
    if isinstance(node, ast.BinOp):
        text = isinstance(node.left, ast.Constant | ast.JoinedStr)
        return int(type(node.op) in _OPERATORS and not (text and _is_text(node.left)))
    if isinstance(node, ast.Constant):
        return int(isinstance(node.value, bool | int | float))
    if isinstance(node, ast.Expr):
        return int(isinstance(node.value, ast.Call))
    if isinstance(node, ast.Return):
        return int(node.value is not None and not isinstance(node.value, ast.Constant))
    return int(isinstance(node, ast.BoolOp | ast.If | ast.IfExp))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _change(node: ast.AST, kind: int) -> None:
    match node:
        case ast.Compare():
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
        case ast.BinOp():
            node.op = _OPERATORS[type(node.op)]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            node.value = node.value * 2 + (not node.value)
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr():
            node.value = ast.Constant(None)
        case ast.Return():
            node.value = ast.Constant(None)


def _spliced(source: str, tree: ast.Module, node: ast.AST) -> str:
    """The text with the statement of `node` written anew, and everything else as it was."""
    statement = max(
        (s for s in ast.walk(tree) if isinstance(s, ast.stmt) and node in ast.walk(s)),
        key=lambda s: (s.lineno, -(s.end_lineno or 0)),
    )
    lines = source.splitlines()
    new = ast.unparse(ast.fix_missing_locations(statement)).splitlines()
    indent = " " * statement.col_offset
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)]) - 1
    body = [indent + line for line in new]
    return "\n".join([*lines[:first], *body, *lines[statement.end_lineno :]]) + "\n"


def tests_of(module: Path) -> list[str]:
    """The test files that name the module, by its dotted path or its file's name."""
    dotted = ".".join(module.with_suffix("").parts)
    words = {dotted, f"from {'.'.join(dotted.split('.')[:-1])} import {module.stem}"}
    found = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(word in path.read_text() for word in words)
    ]
    return [str(path.relative_to(ROOT)) for path in found if "gpu" not in path.parts]


def survives(folder: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", default=[])
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    files = [path.resolve().relative_to(ROOT) for path in asked.files]
    found = [
        (path, line, text) for path in files for line, text in mutations((ROOT / path).read_text())
    ]
    sample = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    print(f"{len(sample)} of {len(found)} mutations, seed {asked.seed}", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        folder = Path(scratch, "checkout")
        ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        for path in dict.fromkeys(files):
            if not survives(folder, asked.tests or tests_of(path)):
                print(f"{path}: its tests fail without any mutation", file=sys.stderr)
                return 2
        for path, line, text in sorted(sample, key=lambda one: one[:2]):
            original = (ROOT / path).read_text()
            (folder / path).write_text(text)
            alive = survives(folder, asked.tests or tests_of(path))
            (folder / path).write_text(original)
            survivors += alive
            if alive:
                print(f"survived  {path}:{line}: {_difference(original, text)}", flush=True)
    print(f"{survivors} of {len(sample)} survived")
    return int(survivors > 0)


def _difference(before: str, after: str) -> str:
    """The first line that is another, as it was and as it is."""
    normal = ast.unparse(ast.parse(before)).splitlines()
    changed = ast.unparse(ast.parse(after)).splitlines()
    for old, new in zip(normal, changed, strict=False):
        if old != new:
            return f"{old.strip()}  ->  {new.strip()}"
    return "a line less"


if __name__ == "__main__":
    sys.exit(main())
