"""Files of prompts: one reader for every command.

A file holds JSON lines, gzipped if its name ends in .gz. A line has the question under `prompt`, `text` or `turns` (a
list; commands that ask one question use its first entry), and may have `id` (Spec-Bench: `question_id`), `category` and
`max_tokens`. Every error is one line that names the file and the line number. Torch-free.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .types import OutriderError, is_a, require

UTF8 = "utf-8-sig"  # some editors write a byte order mark


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str
    max_tokens: int = 128
    row: Mapping[str, object] = field(default_factory=dict)  # the line's JSON object

    @property
    def turns(self) -> list[str]:
        """The user's messages in order; each sees the answers to those before it."""
        turns = self.row.get("turns")
        return [str(turn) for turn in turns] if isinstance(turns, list) and turns else [self.text]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts, or all."""
    path = Path(path)
    try:
        with open(path, "rb", opener=opened) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            lines = enumerate(io.TextIOWrapper(file, UTF8), 1)
            filled = ((number, line) for number, line in lines if line.strip())
            prompts = [_prompt(line, number, f"{path}:{number}") for number, line in islice(filled, limit)]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise OutriderError(f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or error}") from None
    require(bool(prompts), f"{path}: holds no prompts")
    return prompts


def opened(path: str, flags: int) -> int:
    """An opener for `open`: a file or a pipe; a pipe without a writer is empty. Refuses devices, which may be
    endless."""
    if sys.platform == "win32":
        number = os.open(path, flags)
    else:
        number = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISCHR(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is a device")
    if sys.platform != "win32":
        os.set_blocking(number, True)
    return number


def _prompt(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise OutriderError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; lists nested too deep
        raise OutriderError(f"{where}: cannot be read ({error})") from None
    needed = "a JSON object with 'prompt', 'text' or 'turns' is needed"
    require(isinstance(row, dict), f"{where}: {needed}, got {type(row).__name__}")
    turns = row.get("turns")
    written = [row.get("prompt"), row.get("text"), *(turns[:1] if isinstance(turns, list) else [])]
    text: Any = next((t for t in written if t is not None), None)
    require(isinstance(text, str) and text.strip() != "", f"{where}: no text under 'prompt', 'text' or 'turns'")
    most = row.get("max_tokens")
    if most is None:
        most = 256 if "question_id" in row else 128
    whole = f"{where}: max_tokens must be a whole number, 1 or more, got {json.dumps(most)}"
    require(is_a(most, int) and most >= 1, whole)
    name = row.get("id", f"spec_bench/{row['question_id']}" if "question_id" in row else number)
    return Prompt(str(name), str(row.get("category", "all")), text=text, max_tokens=most, row=row)


def mend_end(path: Path) -> None:
    """Cuts off an incomplete last line, left when a process was killed, so that appended text starts on a new line."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
