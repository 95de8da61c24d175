"""Decodes untrusted image files in subprocesses with limits on time and memory.

A file that makes the decoder take gigabytes or minutes, or crash, ends its process only: the file is refused, and the
next one starts a new process. Small images have a process of their own, so that they never wait for a large one.
A process runs models/image_processing.py, with frames on stdin and stdout.
"""

from __future__ import annotations

import numpy as np

from ..models import image_processing
from ..models.image_processing import HEAD, REPLY
from ..types import OutriderError
from .child_process import ChildLost, ChildProcess

DECODE_SECONDS = 20.0  # of wall time for one file
MAX_BYTES = 64 << 20  # of one file
MAX_PIXELS = 64_000_000  # of one image, by its header
SMALL_PIXELS, SMALL_SECONDS = 1 << 21, 2.0  # a screenshot of 1920 x 1080, which takes a tenth of a second
SPOILED = OutriderError("the image took too much memory or time to decode, and was refused")


class ImageDecoder:
    def __init__(self, max_pixels: int = MAX_PIXELS, seconds: float = DECODE_SECONDS) -> None:
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


class DecodingProcess(ChildProcess):
    def __init__(self, max_pixels: int, seconds: float) -> None:
        """Limits of one image; `seconds` of wall time."""
        super().__init__(image_processing.__file__, seconds=seconds)
        self._max_pixels = max_pixels

    def pixels(self, data: bytes, tokens: int, side: int) -> np.ndarray:
        try:
            said = self.call(HEAD.pack(tokens, side, self._max_pixels) + data)
        except ChildLost:
            raise SPOILED from None
        (good, height, width), body = REPLY.unpack_from(said), said[REPLY.size :]
        if not good:
            raise OutriderError(body.decode("utf-8", "replace"))
        return np.frombuffer(body, np.uint8).reshape(height, width, 3)
