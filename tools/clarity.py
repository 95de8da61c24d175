"""Report statements and names that take a second reading. The figures are signals for a reviewer, not limits.

python tools/clarity.py                  one line per signal, with its counts in src, tests and benchmarks
python tools/clarity.py tests --list     one folder, with each place: path:line: text
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_POSITIONAL = 3

FOLDERS = ("src", "tests", "benchmarks")

VAGUE_NAMES = frozenset(
    ["made", "found", "own", "told", "brought", "rest", "asked", "taken", "held", "kept", "given", "mine"]
)
INDIRECT_OPENING = re.compile(r"(Of|What|The same|As|With|Where)\b")

SIGNALS = {
    "parallel": "parallel assignments other than swaps",
    "lambda": "named lambdas",
    "walrus": "walruses",
    "vague": "variables called " + " / ".join(sorted(VAGUE_NAMES)),
    "opening": "docstrings that begin with Of / What / The same / As / With / Where",
    "positional": f"calls with more than {MAX_POSITIONAL} positional arguments to functions of the project",
}

Finding = tuple[str, int]  # signal, line


def is_swap(node: ast.Assign) -> bool:
    """True if the same expressions stand on both sides, as in `a, b = b, a`."""
    targets, values = node.targets[0], node.value
    assert isinstance(targets, ast.Tuple) and isinstance(values, ast.Tuple)
    return sorted(map(ast.unparse, targets.elts)) == sorted(map(ast.unparse, values.elts))


def called_name(call: ast.Call) -> str:
    """Last part of the called name: `mix` for `self.mix(...)`; empty if the callee has no name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def findings(tree: ast.Module, functions: set[str]) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) and not is_swap(node):
                yield "parallel", node.lineno
            if isinstance(node.value, ast.Lambda):
                yield "lambda", node.lineno
        elif isinstance(node, ast.NamedExpr):
            yield "walrus", node.lineno
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
                yield "vague", node.lineno
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if INDIRECT_OPENING.match(ast.get_docstring(node) or ""):
                yield "opening", getattr(node, "lineno", 1)
        elif isinstance(node, ast.Call) and called_name(node) in functions and len(node.args) > MAX_POSITIONAL:
            yield "positional", node.lineno


def defined_names(trees: list[ast.Module]) -> set[str]:
    """Names of functions and classes that the project defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


def count(folder: Path, show_places: bool) -> dict[str, int]:
    """Findings of each signal in a folder's files."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    functions = defined_names(list(trees.values()))
    counts = dict.fromkeys(SIGNALS, 0)
    for path, tree in trees.items():
        lines = sources[path].splitlines()
        for signal, line in findings(tree, functions):
            counts[signal] += 1
            if show_places:
                print(f"{path.relative_to(ROOT)}:{line}: {signal}: {lines[line - 1].strip()}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders to read: " + " ".join(FOLDERS))
    parser.add_argument("--list", action="store_true", help="print every place")
    options = parser.parse_args()
    counts = {folder: count((ROOT / folder).resolve(), options.list) for folder in options.folders}
    print("clarity: " + " ".join(f"{folder:>10}" for folder in counts))
    for signal, description in SIGNALS.items():
        print("clarity: " + " ".join(f"{of_folder[signal]:10d}" for of_folder in counts.values()), description)


if __name__ == "__main__":
    main()
