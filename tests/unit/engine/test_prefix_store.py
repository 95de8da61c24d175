"""Prefixes on disk: the same bits after a restart, and nothing of another model, another key or a damaged file."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines import request, run, tiny_engine

from outrider.cache.prefix import PrefixChain
from outrider.cache.prefix_store import PrefixStore
from outrider.config import EngineConfig, LoadSettings
from outrider.engine.engine import Engine
from outrider.engine.step import Request
from outrider.types import OutriderError

PROMPT = [3 + i * 7 % 53 for i in range(90)]


def engine(folder: Path, variant: str = "llama", identity: str = "a", limit: int = 1 << 30, **config: Any) -> Engine:
    tested = tiny_engine(variant, **config)
    tested.store.disk = PrefixStore(tested.store, folder, limit, identity)
    return tested


def disk(made: Engine) -> PrefixStore:
    assert made.store.disk is not None
    return made.store.disk


def asked(made: Engine, prompt: list[int] = PROMPT, namespace: bytes = b"", id: str = "r") -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were not computed."""
    req: Request = request(id, prompt, temperature=0.8, seed=5, max_tokens=8)
    req.namespace = namespace
    made.submit(req)
    seq = made.running(id)
    out = []
    while made.busy:
        for event in made.step():
            out += event.tokens
    made.check()
    disk(made).flush()
    assert seq is not None
    return out, seq.stats.cached_tokens


def chain(made: Engine) -> PrefixChain:
    keys = PrefixChain(made.config.page_size)
    keys.extend(PROMPT, len(PROMPT))
    return keys


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


@pytest.mark.parametrize("variant", ["llama", "dense", "mistral", "edge"])
def test_another_engine_reads_the_same_bits(tmp_path: Path, variant: str) -> None:
    plain = run(tiny_engine(variant), [request("r", PROMPT, temperature=0.8, seed=5, max_tokens=8)])["r"]
    first = engine(tmp_path, variant)
    assert asked(first) == (plain, 0) and disk(first).pages_written == len(files(tmp_path)) > 0
    again = engine(tmp_path, variant)
    text, cached = asked(again)
    assert text == plain and cached >= 80 and disk(again).pages_read > 0
    assert disk(again).pages_written <= 2, "only what is new"
    wrote = first.store
    read = again.store
    one, a = wrote.prefix.match(chain(first), 80, 16)
    _, b = read.prefix.match(chain(again), 80, 16)
    assert one == 80
    for name in wrote.groups:
        for x, y in zip(wrote.layers[name], read.layers[name]):
            for ours, theirs in zip(a[name], b[name]):
                assert not ours or torch.equal(x[ours], y[theirs])


def test_pages_come_back_into_whatever_is_free(tmp_path: Path) -> None:
    """Pages that are copied together need not be neighbours."""
    first = engine(tmp_path)
    again = engine(tmp_path)
    asked(first)
    pool = again.store.groups["full"].pool
    pages = [pool.alloc() for _ in range(60)]
    for page in pages[::3] + pages[1::3]:
        pool.release(page)
    for _ in again.store.disk.restore(chain(again), len(PROMPT) - 1, 16):
        pass
    for page in pages[2::3]:
        pool.release(page)
    again.check()
    count, wrote = first.store.prefix.match(chain(first), 80, 16)
    same, read = again.store.prefix.match(chain(again), 80, 16)
    assert count == same == 80 and read["full"] != list(range(read["full"][0], read["full"][0] + len(read["full"])))
    for x, y in zip(first.store.layers["full"], again.store.layers["full"]):
        assert torch.equal(x[wrote["full"]], y[read["full"]])


ANSWER = """
import sys
from outrider.config import EngineConfig
from outrider.llm import LLM
from outrider.types import SamplingParams

def answer(model, store):
    llm = LLM.load(model, device="cpu", threads=1, drafter="none", engine=EngineConfig(prefix_store=store))
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    done = llm.generate([[5 + i % 200 for i in range(300)]], asked)[0]
    llm.engine.store.disk.flush()
    return [done.token_ids, done.stats.cached_tokens, llm.engine.store.disk.pages_read]
"""


def test_a_new_process_reads_pages_from_disk(tmp_path: Path) -> None:
    model = tiny.write(tiny.target("llama"), tmp_path / "model")
    places = [str(model), str(tmp_path / "store")]
    here = dict[str, Any]()
    exec(ANSWER, here)
    text, cached, read = here["answer"](*places)
    command = [sys.executable, "-c", f"{ANSWER}\nprint(answer(*sys.argv[1:]))", *places]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert (cached, read) == (0, 0) and ran.stdout.strip() == str([text, 288, 9]), "nine pages of 32 tokens"


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    asked(engine(folder))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files(folder)}
    assert modes == {0o600} and not list(folder.glob("*/*.part"))
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, files(folder)[0].parent)} == {0o700}


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "renamed", "magic", "folder", "fifo", "device"])
@pytest.mark.parametrize("which", [0, 7])
def test_a_damaged_page_is_computed_again(
    tmp_path: Path, harm: str, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    text, _ = asked(engine(tmp_path, "dense"))
    path = files(tmp_path)[which]
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-5] ^= 4
    elif harm == "cut":
        data = data[: len(data) // 2]
    elif harm == "empty":
        data = bytearray()
    elif harm == "renamed":
        data = bytearray(files(tmp_path)[3].read_bytes())
    elif harm == "magic":
        data[:8] = b"GGUF\0\0\0\0"
    path.write_bytes(data)
    if harm in ("folder", "fifo", "device"):
        path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "fifo":
        os.mkfifo(path)  # opening it waited for a writer, and with it the engine
    elif harm == "device":
        path.symlink_to("/dev/zero")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "outrider"):
        again = engine(tmp_path, "dense")
        got, cached = asked(again)
    assert got == text and cached == 4 * which // 16 * 16
    assert len([r for r in caplog.records if "ignored" in r.message]) == 1, "one line"


def test_a_page_may_change_once_it_was_read(tmp_path: Path) -> None:
    """Pages were mapped: a file that was truncated before its copy into the cache ended the process with SIGBUS."""
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.unit.engine.test_prefix_store import PROMPT, asked, disk, engine, files

def cut(path):
    os.truncate(path, 0)

def replace(path):
    path.with_suffix(".new").write_bytes(b"x")
    os.replace(path.with_suffix(".new"), path)

def remove(path):
    path.unlink()

for harm in (cut, replace, remove):
    folder = Path({str(tmp_path)!r}) / harm.__name__
    text, _ = asked(engine(folder))
    again = engine(folder)
    adopt = again.store.adopt

    def late(pages):
        for path in files(folder):
            harm(path)
        return adopt(pages)

    again.store.adopt = late
    got, cached = asked(again)
    print(got == text, cached > 0)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.split()) == (0, ["True"] * 6), ran.stderr[-2000:]


def test_another_model_or_format_is_not_looked_at(tmp_path: Path) -> None:
    asked(engine(tmp_path))
    for other in (
        engine(tmp_path, identity="b"),
        engine(tmp_path, "qwen2", identity="c"),
        engine(tmp_path, kv=torch.bfloat16),
    ):
        assert asked(other)[1] == 0 and disk(other).pages_read == 0


def test_beyond_its_size_the_least_recently_used_go(tmp_path: Path) -> None:
    asked(engine(tmp_path))
    page = files(tmp_path)[0].stat().st_size
    count = len(files(tmp_path))
    old = time.time() - 1000
    for path in files(tmp_path):
        os.utime(path, (old, old))
    limit = page * (count + 8)
    tested = engine(tmp_path, limit=limit)
    other = [60 - token for token in PROMPT]
    asked(tested, other)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    fresh = engine(tmp_path, limit=limit)
    assert asked(fresh, other)[1] >= 80, "the newest stays whole"
    kept = asked(engine(tmp_path, limit=limit))[1]
    assert 0 <= kept < 80, "of the other the beginning, if anything"
    tight = tmp_path / "tight"
    asked(engine(tight, limit=page * 6))
    assert 0 < len(files(tight)) <= 6
    assert asked(engine(tight, limit=page * 6))[1] == 16, "a prompt larger than the store keeps its beginning"


def test_two_stores_at_once(tmp_path: Path) -> None:
    one = engine(tmp_path)
    two = engine(tmp_path)
    for made in (one, two):
        made.submit(request("r", PROMPT, max_tokens=4))
    while one.busy or two.busy:
        one.step()
        two.step()
    disk(one).flush()
    disk(two).flush()
    assert disk(one).pages_written + disk(two).pages_written >= len(files(tmp_path)) > 0
    longer = [*PROMPT, *PROMPT]
    asked(one, longer)
    assert asked(two, longer, id="s")[1] >= 176, "what one has written the other reads, without a restart"


def test_keys_are_apart(tmp_path: Path) -> None:
    tested = engine(tmp_path)
    text, _ = asked(tested, namespace=b"one")
    assert asked(tested, namespace=b"two", id="s") == (text, 0), "in memory"
    again = engine(tmp_path)
    assert asked(again, namespace=b"three") == (text, 0), "on disk"
    assert asked(again, namespace=b"one", id="s")[1] >= 80


def test_a_full_disk_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tested = engine(tmp_path)
    monkeypatch.setattr("outrider.cache.prefix_store.os.replace", full)
    with caplog.at_level(logging.WARNING, "outrider"):
        asked(tested)
        asked(tested, PROMPT[::-1], id="s")
    assert [r.message for r in caplog.records] == [
        f"the prefix store {tmp_path} is not written any more: No space left on device"
    ]
    assert not list(tmp_path.glob("*/*"))


def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match="can't use the prefix store"):
        engine(tmp_path / "file")
    with pytest.raises(OutriderError, match="prefix_store_size"):
        EngineConfig(prefix_store_size=0)
    with pytest.raises(OutriderError, match="one process"):
        LoadSettings(tensor_parallel=2, engine=EngineConfig(prefix_store="x"))
