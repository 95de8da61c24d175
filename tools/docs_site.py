"""mkdocs hook: pages made from the code are added, and links from docs/ into the repository are made to work on the
site."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]
import reference  # noqa: E402

import history  # noqa: E402

UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"  # guides come first in the site's search
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Every page says which version it describes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"Outrider {version}"
    return config


def on_files(files: Files, config: Any) -> Files:
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))  # mkdocs takes it away again after loading a hook
    pages = {
        "reference/cli.md": reference.command_line(),
        "reference/python.md": reference.python_api(),
        "reference/configuration.md": reference.configuration(),
        "changelog.md": UNSEARCHED + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("),
    }
    text, pictures = history.page(ROOT / "benchmarks" / "history")
    pages["history/index.md"] = UNSEARCHED + text
    pages |= {f"history/{name}": picture for name, picture in pictures.items()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    # files of the repository that a page links to come along
    for file in list(files.documentation_pages()):
        if file.generated_by is None:
            for _, target, _, _ in LINK.findall(file.content_string):
                source = _outside(file.src_uri, target)
                if source is not None and files.get_file_from_path(f"repository/{source}") is None:
                    files.append(File.generated(config, f"repository/{source}", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def mend(match: re.Match[str]) -> str:
        source = _outside(page.file.src_uri, match[2])
        if source is None:
            return match[0]
        here = os.path.dirname(page.file.src_uri) or "."
        return f"{match[1]}{os.path.relpath(f'repository/{source}', here)}{match[3] or ''}{match[4]}"

    if page.file.src_uri.startswith("repository/"):  # a README of the repository: its own links stay text
        return re.sub(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", markdown)
    return LINK.sub(mend, markdown)


def _outside(page: str, target: str) -> str | None:
    """The repository path of a link that leaves docs/; None for one that stays."""
    path = (ROOT / "docs" / page).parent.joinpath(target).resolve()
    if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT):
        return None
    if not path.is_file():
        raise PluginError(f"{page} links to {target}, which does not exist")
    return path.relative_to(ROOT).as_posix()
