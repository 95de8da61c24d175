"""Everything that the docs name exists: files behind links, headings behind anchors, modules and their functions, metrics.

Commands and options are checked by tests/e2e/test_docs.py, the map of the sources by test_layering.py. Here nothing is
run: pages and sources are read as text, in about a second.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "outrider"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), SRC / "assets" / "drafters" / "smollm2" / "README.md"]
)
GENERATED = (
    "docs/reference/",
    "docs/history/",
    "docs/changelog.md",
)  # made by tools/docs_site.py when the site is built
PAST = ("CHANGELOG.md", "docs/lab/", "docs/adr/", "src/")  # records of their time: what they name may have gone since
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of headings as the site and GitHub make them: lower case, no punctuation, a hyphen for each blank or run
    of blanks."""
    titles = re.findall(r"^#+ +(.*?) *$", prose(page), re.M)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles
    ]
    return {re.sub(r"[-\s]+", "-", title) for title in plain} | {re.sub(r"\s", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            generated = str(target).startswith(tuple(str(ROOT / place) for place in GENERATED))
            wrong += [] if generated else [f"{link}: there is no {target}"]
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: {name(target)} has no heading #{anchor}")
    assert not wrong, f"{name(page)}:\n" + "\n".join(wrong)


@cache
def members() -> dict[str, set[str]]:
    """Members by name: of each class (methods, fields, attributes assigned to self), and of each module (its top
    level)."""
    names: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            members_of = names.setdefault(node.name if isinstance(node, ast.ClassDef) else path.stem, set())
            for child in node.body:
                members_of |= (
                    {n.id for n in ast.walk(child) if isinstance(n, ast.Name)}
                    if isinstance(child, (ast.Assign, ast.AnnAssign))
                    else set()
                )
                members_of |= (
                    {child.name} if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else set()
                )
            if isinstance(node, ast.ClassDef):
                members_of |= {
                    n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                }
    return names


CHECKED = [page for page in PAGES if not name(page).startswith(PAST)]


@pytest.mark.parametrize("page", CHECKED, ids=name)
def test_named_functions_and_modules_exist(page: Path) -> None:
    """`Class.member`, `module.function`, `folder/module` and `folder/module.py` of ours."""
    wrong = []
    known = members()
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        dotted = re.fullmatch(r"(?:[a-z]+[./])*(\w+)\.(\w+)(?:\(\))?", span)
        if dotted and dotted[1] in known and (dotted[1][0].isupper() or (SRC / span.partition("/")[0]).is_dir()):
            module = dotted[2] in ("py", "c", "h", "cu", "cuh")
            wrong += [] if module or dotted[2] in known[dotted[1]] else [f"{span}: {dotted[1]} has no {dotted[2]}"]
        if re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)*/[a-z0-9_]+\.(py|c|h|cu|cuh|js|jsonl|yaml|conf|toml|sh)", span):
            wrong += (
                []
                if (SRC / span).is_file() or (ROOT / span).is_file() or measured(page)
                else [f"there is no file {span}"]
            )
        top = re.fullmatch(r"([a-z]+)/[a-z_/]+", span)
        if top and (SRC / top[1]).is_dir() and not (SRC / f"{span}.py").is_file() and not (SRC / span).is_dir():
            wrong.append(f"there is no module {span}")
    assert not wrong, f"{name(page)}:\n" + "\n".join(wrong)


def measured(page: Path) -> bool:
    """A page of figures names the script that made them, which may have gone since (it then says which commit has
    it)."""
    return page.name.endswith("-measured.md")


def test_named_metrics_exist() -> None:
    sources = "\n".join(p.read_text(encoding="utf-8") for p in [*SRC.glob("server/*.py"), *SRC.glob("cluster/*.py")])
    stems = set(re.findall(r'"(?:outrider_)?([a-z_]+)"', sources))
    endings = ("", "_total", "_bucket", "_sum", "_count")
    wrong = []
    for page in CHECKED:
        for metric in set(re.findall(r"`outrider_([a-z_]+)`", prose(page))):
            wrong += (
                []
                if any(metric.removesuffix(end) in stems for end in endings)
                else [f"{name(page)}: no metric outrider_{metric}"]
            )
    assert not wrong, "\n".join(wrong)
