"""Tokenises long texts in a separate process, so that they hold neither the GIL nor the cores that other requests need.

Half a megabyte takes a tokenizer a second or two. The process has a low priority, so that decoding goes first, and
takes one text after the other. It is started with the server, or with the first long text; if it has died, the text is
tokenised here and the next one restarts it. Run as a script, this file is the process itself: it reads frames of bytes
from stdin (the tokenizer, then texts) and writes to stdout.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from typing import IO

HEAD = struct.Struct("<I?")  # bytes that follow; are special tokens added?
COUNT = struct.Struct("<I")  # token ids that follow, 4 bytes each
NICE = 10  # a tenth of a core where all are busy


class TokenizerProcess:
    def __init__(self, tokenizer: Callable[[], str], here: Callable[[str, bool], list[int]]) -> None:
        """`tokenizer`: in Hugging Face's own format. `here`: the same work in this process."""
        self._tokenizer, self._here = tokenizer, here
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ids(self, text: str, special: bool) -> list[int]:
        """From any thread; blocks until it is done."""
        data = text.encode()  # UnicodeError where it is none
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None and process.stdout is not None
                _send(process.stdin, data, special)
                (count,) = COUNT.unpack(_read(process.stdout, COUNT.size))
                return array("i", _read(process.stdout, 4 * count)).tolist()
            except (OSError, EOFError):
                self._end()
        return self._here(text, special)

    def start(self) -> None:
        """Starts the process now rather than with the first long text. Returns at once."""
        threading.Thread(target=self._start_quietly, name="outrider-tokenizer", daemon=True).start()

    def close(self) -> None:
        """Ends the process; texts that wait for it are tokenised here."""
        self._closed = True  # a late caller must not start another
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start_quietly(self) -> None:
        with self._lock:
            try:
                self._started()
            except (OSError, EOFError):
                self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise EOFError
        if self._process is None:
            # as a script: it needs nothing of this package, and less memory so
            command = [sys.executable, "-P", __file__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
            )
            assert self._process.stdin is not None
            _send(self._process.stdin, self._tokenizer().encode(), False)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _send(pipe: IO[bytes], data: bytes, special: bool) -> None:
    pipe.write(HEAD.pack(len(data), special) + data)
    pipe.flush()


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> None:
    """The process itself. Ends with its stdin."""
    from tokenizers import Tokenizer

    size, _ = HEAD.unpack(_read(sys.stdin.buffer, HEAD.size))
    tokenizer = Tokenizer.from_str(_read(sys.stdin.buffer, size).decode())
    os.nice(NICE)  # not before: the first text waits for this
    while True:
        size, special = HEAD.unpack(_read(sys.stdin.buffer, HEAD.size))
        text = _read(sys.stdin.buffer, size).decode()
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        sys.stdout.buffer.write(COUNT.pack(len(ids)) + array("i", ids).tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()
