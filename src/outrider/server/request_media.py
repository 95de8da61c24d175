"""Images and clips in a request's messages: refused if the model does not take them, else turned into soft tokens of
the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from ..engine.media import Media
from ..engine.soft_prompt import SoftEncoder, SoftInputs, expand
from ..types import OutriderError
from .errors import bad
from .media_fetch import IMAGE, SOUND, MediaKind, fetch
from .model_info import ServedModel
from .schema import ChatRequest, Message, TextPart


def media_of(messages: Sequence[Message]) -> Media:
    """Data URLs and addresses, in order."""
    images: list[object] = [image for message in messages for image in message.images]
    clips: list[object] = [clip for message in messages for clip in message.clips]
    return Media(images, clips)


def check_media(media: Media, body: ChatRequest, model: ServedModel) -> None:
    """Refuses media that the model does not take or that a field of the request excludes."""
    noun = "images" if media.images else "sound"
    for field in ("truncate_prompt_tokens", "prompt_logprobs"):
        if getattr(body, field) is not None:
            raise bad(f"{field} can't be combined with {noun}.", field)
    for items, encoder in ((media.images, model.vision), (media.audio, model.audio)):
        if items and isinstance(encoder, str):
            raise bad(f"{encoder[:1].upper()}{encoder[1:]}.", "messages")


def with_soft_tokens(ids: Sequence[int], media: Media, model: ServedModel, hosts: str) -> list[int]:
    """Replaces the prompt's placeholders. hosts: hosts that files may be fetched from."""
    inputs: list[SoftInputs] = []
    try:
        for items, encoder, kind in ((media.images, model.vision, IMAGE), (media.audio, model.audio, SOUND)):
            if items:
                assert not isinstance(encoder, str), "check_media has refused it"
                _check_count(items, encoder)
                inputs.append(SoftInputs(encoder, [_content(str(item), hosts, kind) for item in items]))
        return expand(ids, inputs)
    except OutriderError as error:
        raise bad(" ".join(str(error).split())[:300], "messages", "invalid_media") from error


def _check_count(items: Sequence[object], encoder: SoftEncoder) -> None:
    """Refuses too many images or clips before any is fetched."""
    if len(items) > encoder.max_items:
        message = f"{len(items)} {encoder.noun}s; at most {encoder.max_items} are allowed in a prompt"
        raise OutriderError(message)


def _content(url: str, hosts: str, kind: MediaKind) -> str | bytes:
    return url if url[:5].lower() == "data:" else fetch(url, hosts, kind)


def template_parts(parts: Sequence[TextPart]) -> list[JsonValue]:
    """The parts of a message as chat templates read them."""
    return [_template_part(part) for part in parts]


def _template_part(part: TextPart) -> JsonValue:
    if part.image:
        return {"type": "image"}
    if part.clip:
        return {"type": "audio"}
    return {"type": "text", "text": part.text}
