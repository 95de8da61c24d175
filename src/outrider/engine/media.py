"""Images and clips as callers pass them: parts of messages, data URLs, paths."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..prompts import opened
from ..types import OutriderError, bad_input, require

VIDEO = "video needs a decoder, which is not included: send frames of it as images, and its sound as a clip"
VIDEO_PARTS = ("video", "video_url", "input_video")
IMAGE_PARTS = ("image", "image_url", "input_image")
AUDIO_PARTS = ("audio", "audio_url", "input_audio")


@dataclass
class Media:
    """The images and clips of a conversation, each in order."""

    images: list[object] = field(default_factory=list)
    audio: list[object] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.audio)


def take_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Media]:
    """Messages for chat templates, with `{"type": "image"}` in place of each image and `{"type": "audio"}` in place of
    each clip, and the images and clips."""
    out = []
    media = Media()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [_part(part, media) for part in content]
            if any(part.get("type") in ("image", "audio") for part in parts):
                content = parts
            else:  # templates of text models support text only
                content = "".join(str(part.get("text", "")) for part in parts)
        out.append({**message, "content": content})
    return out, media


def _part(part: object, media: Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise OutriderError("a part of a message is a text or {'type': 'text' | 'image' | 'audio', ...}")
    kind = part.get("type")
    require(kind not in VIDEO_PARTS, VIDEO)
    if kind in IMAGE_PARTS:
        image = _content(part, ("image", "image_url", "url", "path"), "url")
        require(image is not None, "a part of type image needs 'image': a path, bytes, a PIL image or an array")
        media.images.append(image)
        return {"type": "image"}
    if kind in AUDIO_PARTS:
        clip = _content(part, ("audio", "audio_url", "input_audio", "url", "path"), "url", "data")
        if isinstance(part.get("input_audio"), Mapping) and isinstance(clip, str):
            clip = base64_bytes(clip, "sound")
        require(clip is not None, "a part of type audio needs 'audio': a path, bytes or (samples, rate)")
        media.audio.append(clip)
        return {"type": "audio"}
    return dict(part)


def _content(part: Mapping[str, Any], names: Sequence[str], *inner_names: str) -> object:
    """The first of these entries; inside of an object the first of `inner_names` that it has."""
    content = next((part[name] for name in names if part.get(name) is not None), None)
    if isinstance(content, Mapping):
        return next((content[name] for name in inner_names if content.get(name) is not None), content)
    return content


def data_url(url: str, noun: str, max_bytes: int) -> bytes:
    """The bytes of a data URL. noun: image or sound, for errors."""
    head, comma, body = url.partition(",")
    form = "data:image/...;base64,..." if noun == "image" else "data:audio/...;base64,..."
    require(bool(comma) and head.lower().endswith(";base64"), f"the data URL of the {noun} must be {form}")
    require(len(body) <= max_bytes * 4 // 3 + 4, f"the {noun} has more than {max_bytes:,} bytes")
    return base64_bytes(body, noun)


def base64_bytes(text: str, noun: str) -> bytes:
    with bad_input(ValueError, lambda _: f"the {noun} is not valid base64"):
        return base64.b64decode("".join(text.split()), validate=True)


def read_file(path: Path, noun: str, max_bytes: int) -> bytes:
    if str(path).startswith(("http:/", "https:/")):
        raise OutriderError(f"{noun}s are not fetched from the network: pass a file, or a data URL")

    def why(error: Exception) -> str:
        return f"cannot read the {noun} {path}: {getattr(error, 'strerror', None) or error}"

    with bad_input((OSError, ValueError), why), open(path, "rb", opener=opened) as file:
        data = file.read(max_bytes + 1)
    require(len(data) <= max_bytes, f"{path} has more than {max_bytes:,} bytes")
    return data
