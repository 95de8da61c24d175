"""Images in prompts: an image becomes soft tokens, and its placeholder becomes a span of image tokens.

`ImageEncoder.encode` decodes (files in a subprocess), resizes and runs the vision model; the most recent images are
cached by content. `expand` replaces each placeholder of a prompt by begin-of-image, n image tokens and end-of-image.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..models import image_processing
from ..models.image_processing import HEAD, REPLY, check_size, pixels
from ..models.vision import VisionModel
from ..prompts import opened
from ..types import OutriderError, SoftSpan, bad_input, require
from .child_process import ChildLost, ChildProcess

DECODE_SECONDS = 60.0  # of wall time for one file: on a busy machine a long decode gets little processor time
MAX_BYTES = 64 << 20  # of one file
MAX_PIXELS = 64_000_000  # of one image, by its header
# a screenshot of 1920 x 1080, which takes a tenth of a second
SMALL_PIXELS = 1 << 21
SMALL_SECONDS = 2.0
SPOILED = OutriderError("the image took too much memory or time to decode, and was refused")
KEPT = 64  # images whose soft tokens are kept
VERSION = b"1"  # of the preprocessing: other pixels, other digests
MEDIA = {"audio": "audio", "input_audio": "audio", "video": "video", "video_url": "video", "input_video": "video"}
IMAGE_PARTS = ("image", "image_url", "input_image")


class SoftPrompt(list[int]):
    spans: tuple[SoftSpan, ...] = ()


def continued(ids: list[int], more: Sequence[int]) -> list[int]:
    out = SoftPrompt([*ids, *more])
    out.spans = getattr(ids, "spans", ())
    return out


class ImageEncoder:
    def __init__(self, model: VisionModel, tokens: int, max_images: int, max_pixels: int) -> None:
        self.model = model
        self.config = model.config
        self.max_images = max_images
        self.tokens = tokens
        self.decoder = ImageDecoder(max_pixels)
        self._kept: OrderedDict[bytes, SoftSpan] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()

    def encode(self, image: object) -> SoftSpan:
        """A path, the bytes of a file, a data URL, a PIL image or uint8 [h, w, 3 or 4 or nothing]; as a span at 0."""
        made = np.ascontiguousarray(self._pixels(image))
        config = self.config
        long = max(made.shape[:2]) // (config.side if config.kind == "unified" else config.patch)
        if not config.square and long > config.positions:
            raise OutriderError(f"the image is too narrow: {long} patches long, and the model knows {config.positions}")
        digest = hashlib.blake2b(made.tobytes(), digest_size=16, salt=VERSION)
        digest.update(str(made.shape).encode())
        key = digest.digest()
        if (found := self._find(key)) is not None:  # without waiting for another client's image
            return found
        with self._encoding:  # one image at a time: its bits depend on no other
            found = self._find(key)
            if found is None:
                soft_tokens = self.model.encode(torch.from_numpy(made.copy()))
                found = SoftSpan(0, soft_tokens, key, config.bidirectional, config.pad_id)
            with self._lock:
                self._kept[key] = found
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return found

    def _find(self, key: bytes) -> SoftSpan | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _pixels(self, image: object) -> np.ndarray:
        tokens, side = (0, self.config.square) if self.config.square else (self.tokens, self.config.side)
        if isinstance(image, str) and image[:5].lower() == "data:":
            image = data_url(image)
        elif isinstance(image, str | os.PathLike):
            data = read_file(Path(image))
            with bad_input(OutriderError, lambda error: f"{image}: {error}"):
                return self.decoder.pixels(data, tokens, side)
        if isinstance(image, bytes | bytearray | memoryview):
            return self.decoder.pixels(bytes(image), tokens, side)
        with bad_input((ValueError, OSError), str):
            if not isinstance(image, Image.Image):
                image = Image.fromarray(as_array(image))
            check_size(*image.size, self.decoder.max_pixels)
            return pixels(image, tokens, side)

    def expand(self, ids: Sequence[int], images: Sequence[object]) -> SoftPrompt:
        """The prompt with every image token replaced by an image: there must be as many."""
        config = self.config
        out = SoftPrompt()
        count = len(images)
        places = ids.count(config.placeholder_id)
        require(count <= self.max_images, f"{count} images; at most {self.max_images} are allowed in a prompt")
        require(count == places, f"{count} images for {places} places in the prompt: does its template take images?")
        spans = []
        left = iter(images)
        for i, token in enumerate(ids):
            if token != config.placeholder_id:
                if token != config.eoi_id or not i or ids[i - 1] != config.placeholder_id:  # else it is there already
                    out.append(token)
                continue
            out.append(config.boi_id)
            spans.append(replace(self.encode(next(left)), start=len(out)))
            out += [config.image_id] * (spans[-1].end - spans[-1].start) + [config.eoi_id]
        out.spans = tuple(spans)
        return out

    def close(self) -> None:
        self.decoder.close()


def data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    require(bool(comma) and head.lower().endswith(";base64"), "an image's data URL must be data:image/...;base64,...")
    require(len(body) <= MAX_BYTES * 4 // 3 + 4, f"the image has more than {MAX_BYTES:,} bytes")
    with bad_input(ValueError, lambda _: "the image is not valid base64"):
        return base64.b64decode("".join(body.split()), validate=True)


def read_file(path: Path) -> bytes:
    if str(path).startswith(("http:/", "https:/")):
        raise OutriderError("images are not fetched from the network: pass a file, or a data URL")
    why = lambda error: f"cannot read the image {path}: {getattr(error, 'strerror', None) or error}"  # noqa: E731
    with bad_input((OSError, ValueError), why), open(path, "rb", opener=opened) as file:
        data = file.read(MAX_BYTES + 1)
    require(len(data) <= MAX_BYTES, f"{path} has more than {MAX_BYTES:,} bytes")
    return data


def as_array(image: object) -> np.ndarray:
    try:
        array = np.asarray(image)
    except Exception:
        array = np.empty(0)
    good = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)))
    got = f"{type(image).__name__} {array.shape}"
    require(good and array.size > 0, f"an image is a path, bytes, a PIL image or uint8 [h, w, 3], got {got}")
    return array


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[object]]:
    """Messages for chat templates, with `{"type": "image"}` in place of each image, and the images in order."""
    out = []
    images = list[object]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_part(part, images) for part in content]
            if not any(part.get("type") == "image" for part in content):  # templates of text models support text only
                content = "".join(str(part.get("text", "")) for part in content)
        out.append({**message, "content": content})
    return out, images


def _part(part: object, images: list[object]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise OutriderError("a part of a message is a text or {'type': 'text' | 'image', ...}")
    kind = part.get("type")
    require(kind not in MEDIA, f"{MEDIA.get(str(kind))} cannot be read here, only text and images")
    if kind not in IMAGE_PARTS:
        return dict(part)
    given = part.get("image", part.get("image_url", part.get("url", part.get("path"))))
    given = given.get("url") if isinstance(given, Mapping) else given
    require(given is not None, "a part of type image needs 'image': a path, bytes, a PIL image or an array")
    images.append(given)
    return {"type": "image"}


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
            raise SPOILED from None
        good, height, width = REPLY.unpack_from(said)
        body = said[REPLY.size :]
        if not good:
            raise OutriderError(body.decode("utf-8", "replace"))
        return np.frombuffer(body, np.uint8).reshape(height, width, 3)
