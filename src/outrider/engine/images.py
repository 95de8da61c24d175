"""Images in prompts: `ImageEncoder.encode` decodes (files in a subprocess), resizes and runs the vision model; the most
recent images are cached by content. `soft_prompt.expand` puts them into a prompt."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..models import image_processing
from ..models.image_processing import HEAD, REPLY, check_size, pixels
from ..models.vision import VisionModel
from ..types import OutriderError, SoftSpan, bad_input, require
from .child_process import ChildLost, ChildProcess
from .media import data_url, read_file
from .soft_prompt import PlaceholderIds, SpanCache

DECODE_SECONDS = 60.0  # of wall time for one file: on a busy machine a long decode gets little processor time
MAX_BYTES = 64 << 20  # of one file
MAX_PIXELS = 64_000_000  # of one image, by its header
# a screenshot of 1920 x 1080, which takes a tenth of a second
SMALL_PIXELS = 1 << 21
SMALL_SECONDS = 2.0
SPOILED = "the image took too much memory or time to decode, and was refused"
CACHED_IMAGES = 64  # images whose soft tokens are kept
VERSION = b"1"  # of the preprocessing: other pixels, other digests


class ImageEncoder:
    def __init__(self, model: VisionModel, tokens: int, max_images: int, max_pixels: int) -> None:
        self.model = model
        self.config = model.config
        self.noun = "image"
        self.max_items = max_images
        config = model.config
        self.ids = PlaceholderIds(config.placeholder_id, config.boi_id, config.image_id, end=config.eoi_id)
        self.tokens = tokens
        self.decoder = ImageDecoder(max_pixels)
        self._spans = SpanCache(CACHED_IMAGES)

    def encode(self, image: object) -> SoftSpan:
        """A path, the bytes of a file, a data URL, a PIL image or uint8 [h, w, 3 or 4 or nothing]; as a span at 0."""
        pixels = np.ascontiguousarray(self._pixels(image))
        config = self.config
        long = max(pixels.shape[:2]) // (config.side if config.kind == "unified" else config.patch)
        if not config.square and long > config.positions:
            raise OutriderError(f"the image is too narrow: {long} patches long, and the model knows {config.positions}")
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, salt=VERSION)
        digest.update(str(pixels.shape).encode())
        key = digest.digest()

        def span() -> SoftSpan:
            soft_tokens = self.model.encode(torch.from_numpy(pixels.copy()))
            return SoftSpan(0, soft_tokens, key, bidirectional=config.bidirectional, pad_id=config.pad_id)

        return self._spans.get(key, span)

    def _pixels(self, image: object) -> np.ndarray:
        tokens, side = (0, self.config.square) if self.config.square else (self.tokens, self.config.side)
        if isinstance(image, str) and image[:5].lower() == "data:":
            image = data_url(image, "image", MAX_BYTES)
        elif isinstance(image, str | os.PathLike):
            data = read_file(Path(image), "image", MAX_BYTES)
            with bad_input(OutriderError, lambda error: f"{image}: {error}"):
                return self.decoder.pixels(data, tokens, side)
        if isinstance(image, bytes | bytearray | memoryview):
            return self.decoder.pixels(bytes(image), tokens, side)
        with bad_input((ValueError, OSError), str):
            if not isinstance(image, Image.Image):
                image = Image.fromarray(as_array(image))
            check_size(*image.size, self.decoder.max_pixels)
            return pixels(image, tokens, side)

    def close(self) -> None:
        self.decoder.close()


def as_array(image: object) -> np.ndarray:
    try:
        array = np.asarray(image)
    except Exception:
        array = np.empty(0)
    good = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)))
    got = f"{type(image).__name__} {array.shape}"
    require(good and array.size > 0, f"an image is a path, bytes, a PIL image or uint8 [h, w, 3], got {got}")
    return array


# ---- untrusted files -------------------------------------------------------------------------------------------------
class ImageDecoder:
    """Decodes files in subprocesses with limits on time and memory: a hostile file ends its process only, and is
    refused. Small images have a process of their own, so that they never wait for a large one."""

    def __init__(self, max_pixels: int = MAX_PIXELS, seconds: float = DECODE_SECONDS) -> None:
        self.max_pixels = max_pixels
        self._small = DecodingProcess(min(max_pixels, SMALL_PIXELS), min(seconds, SMALL_SECONDS))
        self._large = DecodingProcess(max_pixels, seconds)

    def pixels(self, data: bytes, tokens: int, side: int) -> np.ndarray:
        """uint8 [h, w, 3] as a vision model reads it. Thread-safe; blocks until done."""
        require(len(data) > 0, "the image is empty")
        require(len(data) <= MAX_BYTES, f"the image file has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
        try:
            return self._small.pixels(data, tokens, side)
        except OutriderError:  # it is too large, takes too long or is broken
            return self._large.pixels(data, tokens, side)

    def close(self) -> None:
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
            raise OutriderError(SPOILED) from None
        good, height, width = REPLY.unpack_from(said)
        body = said[REPLY.size :]
        if not good:
            raise OutriderError(body.decode("utf-8", "replace"))
        return np.frombuffer(body, np.uint8).reshape(height, width, 3)
