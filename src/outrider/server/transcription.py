"""Transcriptions and translations of sound: OpenAI's /v1/audio routes.

The model is a chat model. A file becomes a conversation of one message, the instruction that Gemma's makers recommend
and the clip behind it, without thoughts and at temperature 0. A file longer than a clip is cut where it is quietest,
and its pieces are heard side by side. The model times no words, so timestamps are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, JsonValue, ValidationError, field_validator

from ..engine.audio import AudioEncoder
from ..engine.media import base64_bytes
from ..engine.soft_prompt import SoftInputs, expand
from ..models.audio_config import MAX_SECONDS, SAMPLE_RATE
from ..types import OutriderError
from .answer import JSON_TYPE, Answer, AnswerChoice, Delta, Job, Json, Wire, encoded, sse
from .errors import bad, from_validation, read
from .languages import language_name
from .multipart import FORM, FormPart, read_form, refuse_other_types
from .output import Parser
from .reasoning import Thoughts
from .schema import ChatRequest, FailFastModel, Lenient, refuse

if TYPE_CHECKING:
    from .prepare import Preparer

MAX_FILE_SECONDS = 600.0
MAX_HINT = 2_000  # maximum characters of `prompt`
# an answer that repeats itself ends: tokens of a piece
TOKENS_PER_SECOND = 16
MIN_TOKENS = 32
# where a long file is cut: in the last seconds of a piece, in the middle of its quietest tenth of a second
CUT_SECONDS = 5.0
QUIET_SAMPLES = SAMPLE_RATE // 10
MIN_PIECE_SECONDS = 1.0
FORMATS = ("json", "text", "verbose_json")
STYLE = """

Follow these specific instructions for formatting the answer:
* Only output the {result}, with no newlines.
* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 instead of three."""
HINT = "\n* This text stands before it, or shows its names and its style: {hint}"


class TranscriptionForm(FailFastModel):
    """Fields of a form beside its file, converted from text. Empty fields count as not sent."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    language: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_HINT)] = ""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def format_without_times(cls, value: object) -> object:
        why = "the model times no words and tells no speakers apart; json, text and verbose_json (without segments)"
        refuse(value not in FORMATS, f"{why} are offered")
        return value

    @field_validator("language")
    @classmethod
    def known_language(cls, value: str | None) -> str | None:
        if value is None or value.lower() == "auto":  # whisper.cpp's and faster-whisper's word for it
            return None
        refuse(language_name(value) is None, "send an ISO 639-1 code such as en, or leave it out")
        return value


class InputAudio(Lenient):
    data: str


class JsonSound(Lenient):
    """OpenRouter's body: the file in base64, as in a message."""

    input_audio: InputAudio


class TranscriptionRequest(ChatRequest):
    """A conversation of one message, the instruction; the sound follows it."""

    sound: bytes
    format: Literal["json", "text", "verbose_json"]
    task: Literal["transcribe", "translate"]
    language: str
    seconds: float = 0.0  # length of the whole file, known after decoding

    @property
    def has_media(self) -> bool:
        return True


class TranscriptionWire(Wire):
    def __init__(self, content_type: str, task: Literal["transcribe", "translate"]) -> None:
        self._content_type = content_type
        self._task = task
        self._num_sent = 0  # characters streamed so far
        self.whole_type = JSON_TYPE

    def check_type(self, kind: str, from_browser: bool) -> None:
        if kind != JSON_TYPE:
            refuse_other_types(self._content_type)

    def read(self, raw: bytes) -> ChatRequest:
        """Reads a form without counting its values: the bytes of sound are not JSON."""
        is_form = self._content_type.partition(";")[0].strip().lower() == FORM
        if not is_form:
            return read(raw, self.parse)
        parts = read_form(self._content_type, raw, "the part 'file'")
        file = parts.pop("file", None)
        if file is None or not (file.content or file.filename):
            raise bad("Missing field: 'file'.", "file", "missing_field")
        fields = {name: part.text(name) for name, part in parts.items()}
        try:
            return self._request(fields, file)
        except ValidationError as error:
            raise from_validation(error) from None

    def parse(self, raw: bytes) -> ChatRequest:
        fields = JsonFields.model_validate_json(raw).model_extra or {}
        data = JsonSound.model_validate_json(raw).input_audio.data
        try:
            sound = base64_bytes(data, "sound")
        except OutriderError as error:
            raise bad(f"{error}.", "input_audio") from None
        del fields["input_audio"]
        return self._request(fields, FormPart(sound))

    def _request(self, fields: Mapping[str, object], file: FormPart) -> ChatRequest:
        sent = {name.removesuffix("[]"): value for name, value in fields.items() if value not in ("", None)}
        for name in ("timestamp_granularities", "include"):
            what = "timestamps" if name.startswith("time") else "log-probabilities"
            if name in sent:
                raise bad(f"{name}: {what} of transcriptions are not offered; leave it out.", name)
        form = TranscriptionForm.model_validate(sent)
        self.whole_type = "text/plain; charset=utf-8" if form.response_format == "text" else JSON_TYPE
        language = "" if form.language is None else language_name(form.language) or ""
        text = instruction(self._task, language, form.prompt)
        return TranscriptionRequest(
            model=form.model,
            messages=[{"role": "user", "content": text}],  # type: ignore[list-item]  # validated here
            temperature=form.temperature,
            seed=form.seed,
            top_p=form.top_p,
            top_k=form.top_k,
            max_completion_tokens=form.max_completion_tokens,
            stream=form.stream,
            sound=file.content,
            format=form.response_format,
            task=self._task,
            language=language,
        )

    # ---- answers
    def body(self, answer: Answer) -> bytes:
        request = request_of(answer)
        if request.format == "text":
            return text_of(answer).encode("utf-8", "replace")
        return encoded(self.whole(answer))

    def whole(self, answer: Answer) -> Json:
        request = request_of(answer)
        text = text_of(answer)
        if request.format == "json":
            return {"text": text, "usage": usage(answer)}
        seconds = round(request.seconds, 3)
        duration = {"type": "duration", "seconds": math.ceil(seconds)}
        language = request.language.lower()
        return {"task": request.task, "language": language, "duration": seconds, "text": text, "usage": duration}

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        new = text_of(answer)[self._num_sent :]
        self._num_sent += len(new)
        return sse({"type": "transcript.text.delta", "delta": new}) if new else ""

    def closing(self, answer: Answer) -> str:
        end: Json = {"type": "transcript.text.done", "text": text_of(answer), "usage": usage(answer)}
        return sse(end) + "data: [DONE]\n\n"


class JsonFields(FailFastModel):
    model_config = ConfigDict(extra="allow")


def instruction(task: str, language: str, hint: str) -> str:
    """Instruction to the model about the clip that follows. language: the language of the speech; empty if unknown."""
    if task == "translate":
        source = f" in {language}" if language else ""
        text = f"Translate the following speech segment{source} into English text." + STYLE.format(result="translation")
    else:
        target = f"in {language} into {language} text." if language else "in its original language."
        text = f"Transcribe the following speech segment {target}" + STYLE.format(result="transcription")
    words = " ".join(hint.split())
    return text + HINT.format(hint=words) if words else text


def request_of(answer: Answer) -> TranscriptionRequest:
    body = answer.job.body
    assert isinstance(body, TranscriptionRequest)
    return body


def text_of(answer: Answer) -> str:
    """The text so far: the pieces up to the first that is not finished."""
    texts: list[str] = []
    for choice in answer.choices:
        texts.append(choice.content.strip())
        if choice.finish is None:
            break
    return " ".join(filter(None, texts))


def usage(answer: Answer) -> Json:
    audio_tokens = sum(span.end - span.start for request in answer.job.requests for span in request.spans)
    details = {"text_tokens": answer.prompt_tokens - audio_tokens, "audio_tokens": audio_tokens}
    return {
        "type": "tokens",
        "input_tokens": answer.prompt_tokens,
        "input_token_details": details,
        "output_tokens": answer.new_tokens,
        "total_tokens": answer.prompt_tokens + answer.new_tokens,
    }


# ---- to the engine
def transcription_job(preparer: Preparer, body: TranscriptionRequest) -> Job:
    """Makes one engine request per piece of the file."""
    encoder = preparer.backend.audio
    if isinstance(encoder, str):
        raise bad(f"{encoder[:1].upper()}{encoder[1:]}.", "model")
    try:
        samples = encoder.samples(body.sound, MAX_FILE_SECONDS)
        body.seconds = len(samples) / SAMPLE_RATE
        pieces = cut_into_pieces(samples)
        parts: list[JsonValue] = [{"type": "text", "text": body.messages[0].text}, {"type": "audio"}]
        messages: list[dict[str, JsonValue]] = [{"role": "user", "content": parts}]
        prompt = preparer.tokenizer.prompt(messages, enable_thinking=False, reasoning_effort="none")
        prompts = [_with_clip(prompt.ids, encoder, piece) for piece in pieces]
    except OutriderError as error:
        raise bad(" ".join(str(error).split())[:300], "file") from error
    for ids in prompts:
        preparer.fitting(ids, "file", None)
    tail = prompt.written[-64:]

    def parser() -> Parser:
        return Thoughts(preparer.dialect.thoughts, tail)

    params = preparer.sampling_params(body, None, ())
    limit = MIN_TOKENS + TOKENS_PER_SECOND * math.ceil(max(map(len, pieces)) / SAMPLE_RATE)
    params = replace(params, max_tokens=min(params.max_tokens, limit))
    requests = preparer.engine_requests(body, prompts, params=params, n=1)
    return Job(body, requests, parser=parser, seed=params.seed)


def _with_clip(ids: list[int], encoder: AudioEncoder, piece: np.ndarray) -> list[int]:
    return expand(ids, [SoftInputs(encoder, [(piece, SAMPLE_RATE)])])


def cut_into_pieces(samples: np.ndarray) -> list[np.ndarray]:
    """Cuts sound into pieces of at most 30 s. None is shorter than a second unless it is the only one."""
    longest = int(MAX_SECONDS * SAMPLE_RATE)
    pieces: list[np.ndarray] = []
    while len(samples) > longest:
        end = min(longest, len(samples) - int(MIN_PIECE_SECONDS * SAMPLE_RATE))
        begin = end - int(CUT_SECONDS * SAMPLE_RATE)
        cut = begin + quietest(samples[begin:end])
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]


def quietest(samples: np.ndarray) -> int:
    """The middle of the tenth of a second with the least energy."""
    energy = np.cumsum(np.square(samples, dtype=np.float64))
    windows = energy[QUIET_SAMPLES:] - energy[:-QUIET_SAMPLES]
    return int(windows.argmin()) + QUIET_SAMPLES // 2
