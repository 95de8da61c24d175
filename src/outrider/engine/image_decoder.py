"""Decodes untrusted image files in subprocesses with limits on time and memory.

A file that makes the decoder take gigabytes or minutes, or crash, ends its process only: the file is refused, and the
next one starts a new process. Small images have a process of their own, so that they never wait for a large one.
A process runs models/image_processing.py, with frames on stdin and stdout.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time

import numpy as np

from ..models import image_processing
from ..models.image_processing import HEAD, REPLY
from ..types import OutriderError

SECONDS = 20.0  # of wall time for one file
MAX_BYTES = 64 << 20  # of one file
MAX_PIXELS = 64_000_000  # of one image, by its header
SMALL_PIXELS, SMALL_SECONDS = 1 << 21, 2.0  # a screenshot of 1920 x 1080, which takes a tenth of a second
SPOILED = OutriderError("the image took too much memory or time to decode, and was refused")


class ImageDecoder:
    def __init__(self, max_pixels: int = MAX_PIXELS, seconds: float = SECONDS) -> None:
        self.max_pixels = max_pixels
        self._small = DecodingProcess(min(max_pixels, SMALL_PIXELS), min(seconds, SMALL_SECONDS))
        self._large = DecodingProcess(max_pixels, seconds)

    def pixels(self, data: bytes, tokens: int, side: int) -> np.ndarray:
        """uint8 [h, w, 3] as a vision model reads it. Thread-safe; blocks until done."""
        if not data:
            raise OutriderError("the image is empty")
        if len(data) > MAX_BYTES:
            raise OutriderError(f"the image file has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
        try:
            return self._small.pixels(data, tokens, side)
        except OutriderError:  # it is too large, takes too long or is broken
            return self._large.pixels(data, tokens, side)

    def close(self) -> None:
        """Pending decodes are refused."""
        self._small.close()
        self._large.close()


class DecodingProcess:
    def __init__(self, max_pixels: int, seconds: float) -> None:
        """Limits of one image; `seconds` of wall time."""
        self._max_pixels, self._seconds = max_pixels, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def pixels(self, data: bytes, tokens: int, side: int) -> np.ndarray:
        with self._lock:
            deadline = time.monotonic() + self._seconds
            try:
                process = self._started()
                self._write(process, HEAD.pack(len(data), tokens, side, self._max_pixels) + data, deadline)
                good, height, width = REPLY.unpack(self._read(process, REPLY.size, deadline))
                body = self._read(process, height * width * 3 if good else height, deadline)
            except (OSError, EOFError, TimeoutError):
                self._end()
                raise SPOILED from None
        if not good:
            raise OutriderError(body.decode("utf-8", "replace"))
        return np.frombuffer(body, np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-P", image_processing.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, process_group=0, bufsize=0,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        return self._process

    def _write(self, process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        assert process.stdin is not None
        view, pipe = memoryview(data), process.stdin.fileno()
        os.set_blocking(pipe, False)
        while view:
            _, ready, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            view = view[os.write(pipe, view[: 1 << 20]) :]

    def _read(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        assert process.stdout is not None
        pipe, parts, left = process.stdout.fileno(), [], size
        while left:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(pipe, min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
