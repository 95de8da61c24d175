"""The wheel as a user gets it: built, installed apart from the checkout, run without a compiler. Minutes, so not in
make test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests import tiny

from outrider.ops.cpu import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("slow" not in os.environ.get("OUTRIDER_TESTS", ""), reason="minutes: OUTRIDER_TESTS=slow runs it")
def test_the_wheel_runs_without_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"  # built from a copy, so that no build folder stays in the checkout
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in names.splitlines():
        if name.startswith(("src/", "setup.py", "pyproject", "README", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, source], check=True)
    [wheel] = tmp_path.glob("outrider-*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:  # auditwheel refuses libraries in a folder of files for any system
        assert not [name for name in archive.namelist() if ".data/purelib/" in name]
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    environment = {
        "PATH": "/nowhere",
        "PYTHONPATH": str(tmp_path / "site"),
        "OUTRIDER_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }

    def outrider(*words: str) -> str:
        command = [sys.executable, "-m", "outrider.cli.main", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    record = {f["what"]: f["found"] for f in json.loads(outrider("doctor", "--json"))}
    assert str(tmp_path / "site") in record["outrider"] and "/prebuilt/kernels-" in record["CPU kernels"]
    folder = build.cache_root() / "smollm2"  # what was fetched before need not be fetched again
    if folder.is_dir():
        shutil.copytree(folder, tmp_path / "cache" / "smollm2")
    assert ">>>" in outrider("demo")
    tiny.write_target("llama", tmp_path / "model")
    row = json.loads(
        outrider("generate", "model", "Hello", "--max-tokens", "8", "--ops", "cpu", "--json", "--drafter", "ngram")
    )
    assert row["stats"]["new_tokens"] >= 1
