"""docs/architecture.md, enforced: who may import whom, and that every source file is on its map."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "outrider"

# A package (or module) may import only these of ours, besides itself. `types`, `config`, `prompts`, `svg` and `platforms` are open to
# everybody.
ALLOWED = {
    "types": set(),
    "config": set(),
    "prompts": set(),
    "svg": set(),
    "platforms": set(),
    "ops": set(),
    "models": {"ops"},
    "weights": {
        "models.block_config",
        "models.config",
        "models.builtin_configs",
        "models.names",
        "models.split",
        "models.audio_config",
        "models.vision_config",
        "ops",
    },
    "cache": {"models.config", "ops.cpu.memory"},
    "spec": {"cache.store", "models", "weights", "ops"},
    "engine": {"spec", "cache", "models", "ops"},
    "parallel": {"engine", "spec", "cache", "models", "ops"},
    "assemble": {"parallel", "engine", "spec", "cache", "models", "weights", "ops"},
    "llm": {"assemble", "parallel", "engine", "spec", "cache", "models", "weights", "ops"},
    "train": {"llm", "parallel", "engine", "spec", "cache", "models", "weights", "ops"},
    "bench": {"llm", "engine", "spec", "cache", "models", "weights", "ops", "train"},
    "server": {"llm", "engine", "spec", "cache", "models", "weights", "ops"},
    "cluster": {"server", "llm"},
    "cli": {
        "cluster",
        "parallel",
        "server",
        "bench",
        "train",
        "llm",
        "engine",
        "spec",
        "cache",
        "models",
        "weights",
        "ops",
    },
    "__init__": {"llm"},
    "__main__": {"cli"},
}
TORCH_FREE = [
    "types", "config", "prompts", "svg",
    "models/config", "models/names", "models/vision_config", "models/audio_config", "models/split", "models/builtin_configs", "models/inspect", "models/block_config", "cache/pages",
    "cache/prefix",
    "spec/controller", "spec/plan", "spec/acceptance", "spec/cost", "spec/timing", "spec/tuning", "spec/ngram",
    "weights/mapped", "weights/gguf", "weights/safetensors", "weights/files", "weights/hub", "weights/repos",
    "engine/scheduler", "engine/step", "engine/metrics", "engine/prefill_budget", "engine/machine_load",
    "bench/predict", "bench/turns",
]  # fmt: skip


def imports(path: Path) -> list[str]:
    """Dotted names of our modules that a file imports, relative to the package; typing-only imports count too."""
    here = path.relative_to(SRC).with_suffix("").parts if path.is_relative_to(SRC) else ()
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            full = [*base, *(node.module.split(".") if node.module else [])]
            modules += [".".join([*full, a.name]) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider"):
            modules += [".".join([*(node.module or "").split(".")[1:], a.name]) for a in node.names]
        elif isinstance(node, ast.Import):
            modules += [a.name.removeprefix("outrider.") for a in node.names if a.name.startswith("outrider.")]
    return modules


def test_imports_follow_the_map() -> None:
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        package = path.relative_to(SRC).with_suffix("").parts[0]
        for name in imports(path):
            top = name.split(".")[0]
            if top in (
                package,
                "types",
                "config",
                "prompts",
                "svg",
                "platforms",
                "__version__",
                "OutriderError",
                "SamplingParams",
            ):
                continue
            if not any(name == a or name.startswith(a + ".") for a in ALLOWED[package]):
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong, "\n".join(wrong)


def defined(module: str) -> set[str]:
    """Names at the top level of a module, from its text."""
    path = SRC.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    names = {a.asname or a.name for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    names |= {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    names |= {
        t.id
        for n in tree.body
        if isinstance(n, (ast.Assign, ast.AnnAssign))
        for t in ast.walk(n)
        if isinstance(t, ast.Name)
    }
    return names | {child.stem for child in path.glob("*") if path.is_dir()}


def test_scripts_import_what_is_there() -> None:
    """Benchmarks and checks for a GPU are run by hand, and rarely."""
    root = SRC.parents[1]
    known = dict[str, set[str]]()
    wrong = []
    for path in [*root.glob("benchmarks/*.py"), *root.glob("tests/gpu/*.py"), *root.glob("tests/stress/*.py")]:
        for name in imports(path):
            module, _, what = name.rpartition(".")
            if module and what not in (known.get(module) or known.setdefault(module, defined(module))):
                wrong.append(f"{path.relative_to(root)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_map_names_every_file() -> None:
    """docs/architecture.md, "The map": a section for each folder with all of its source files and no others."""
    text = (
        (SRC.parents[1] / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## The map")[2]
        .partition("\n## ")[0]
    )
    sections = dict(re.findall(r"^### `([^`]*)/`\n(.*?)(?=^### |\Z)", text, re.M | re.S))
    wrong = []
    for folder in sorted({p.parent for p in SRC.rglob("*.py")}):
        there = {
            p.name
            for p in folder.iterdir()
            if p.suffix in (".py", ".c", ".h", ".cu", ".cuh") and p.name != "__init__.py"
        }
        key = "src/outrider" if folder == SRC else str(folder.relative_to(SRC))
        cells = re.findall(r"^\| (`[^|]*) \|", sections.pop(key, ""), re.M)
        named = set(re.findall(r"`([a-z0-9_]+\.[a-z]+)`", " ".join(cells)))
        wrong += [
            f"{key}: {what} {sorted(files)}"
            for what, files in (("not on the map:", there - named), ("gone:", named - there))
            if files
        ]
    assert not wrong and not sections, "\n".join([*wrong, *(f"no folder {key}" for key in sections)])


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free(module: str) -> None:
    tree = ast.parse((SRC / f"{module}.py").read_text())
    runtime = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and not _typing_only(tree, n)]
    names = [a.name for n in runtime if isinstance(n, ast.Import) for a in n.names] + [
        n.module or "" for n in runtime if isinstance(n, ast.ImportFrom)
    ]
    assert not [n for n in names if n.split(".")[0] == "torch"]


def _typing_only(tree: ast.Module, node: ast.AST) -> bool:
    for block in ast.walk(tree):
        guard = isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        if guard and any(node is inner for inner in ast.walk(block)):
            return True
    return False
