"""Fields of a request. Unknown fields are refused by name: a field that is silently ignored is a wrong answer. Accepted
without effect: null, the fields of `INERT`, and clients' additions to messages.

The shapes are OpenAI's, with the extensions that vLLM and llama.cpp share, and our own object `outrider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, model_validator
from pydantic_core import CoreSchema

from ..engine.media import VIDEO, VIDEO_PARTS
from ..types import MAX_DRAFT
from .grammar_source import Kind
from .media_fetch import IMAGE, SOUND, MediaKind
from .spellings import MAX_LOGPROBS, OPENAI, Biases, Integer, Prompts, Texts, Top, spelled

Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
Likeliest = Annotated[Top, Field(ge=0, le=MAX_LOGPROBS)]
Role = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # templates may know others than OpenAI's
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"  # Anthropic's limit
ToolName = Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]


CALLS_OF_ASSISTANT = "only an assistant message may hold tool_calls"
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_KEYS = 512  # maximum keys of an object with fixed fields; more than there are fields


def fail_fast(node: object) -> None:
    """Sets the option on every list and map of a core schema, in place."""
    if isinstance(node, dict):
        if node.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            node["fail_fast"] = True
        node = [child for key, child in node.items() if key != "metadata"]
    for child in node if isinstance(node, list) else ():
        fail_fast(child)


def refuse(wrong: object, why: str) -> None:
    if wrong:
        raise ValueError(why)


class FailFastModel(BaseModel):
    """A model whose validation ends at the first bad item of a list or map: a million errors would cost seconds and
    gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = super().__get_pydantic_core_schema__(source, handler)
        fail_fast(handler.resolve_ref_schema(schema) if schema["type"] == "definition-ref" else schema)
        return schema


class Strict(FailFastModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def few_keys(cls, data: object) -> object:
        """Drops all but the first fields: a few unknown ones suffice for a refusal."""
        return dict(islice(data.items(), MAX_KEYS)) if isinstance(data, dict) and len(data) > MAX_KEYS else data


class Lenient(FailFastModel):
    """Base of parts of a conversation, which clients send back with additions: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Named(Lenient):
    """The model name in a body of any kind."""

    model: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far with every chunk
    include_obfuscation: bool | None = None  # changes nothing here


class TextPart(Lenient):
    """Text, an image or a clip. Thoughts of earlier turns are not rendered again; a refusal is text."""

    type: str = "text"
    text: str = ""
    refusal: str = ""
    image_url: str | dict[str, object] | None = None
    audio_url: str | dict[str, object] | None = None
    input_audio: str | dict[str, object] | None = None
    image: str | None = None  # its data URL or address
    clip: str | None = None  # its data URL or address

    @model_validator(mode="after")
    def is_text(self) -> TextPart:
        self.image = None
        self.clip = None
        if self.type == "refusal":
            self.text = self.refusal
        elif self.type in ("thinking", "redacted_thinking", "reasoning"):
            self.text = ""
        elif self.type in ("image_url", "input_image"):
            self.text = ""
            self.image = url_of(self.image_url, "image_url", IMAGE)
        elif self.type == "audio_url":
            self.text = ""
            self.clip = url_of(self.audio_url, "audio_url", SOUND)
        elif self.type == "input_audio":
            self.text = ""
            self.clip = sound_of(self.input_audio)
        else:
            refuse(self.type in VIDEO_PARTS, VIDEO)
            known = self.type in ("text", "input_text", "output_text")
            refuse(not known, f"parts of type '{self.type[:40]}' can't be read here, only text, images and sound")
            refuse("text" not in self.model_fields_set, "text is missing")
        return self


def url_of(given: object, field: str, kind: MediaKind) -> str:
    """The data URL or address, which clients send bare or as {"url": ..., "detail": ...}."""
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise ValueError(f"{field} is missing")
    if not url[:8].lower().startswith(("data:", "http://", "https://")):
        raise ValueError(f"{kind.subject} not fetched from such an address; send a data URL ({kind.example})")
    return url


def sound_of(given: object) -> str:
    """Converts OpenAI's {"data": base64, "format": "wav"} or Mistral's bare base64 to a data URL. The file's content
    determines its format."""
    data = given.get("data") if isinstance(given, dict) else given
    if not isinstance(data, str) or not data:
        raise ValueError('input_audio needs data: {"data": "<base64>", "format": "wav"}')
    return data if data[:5].lower() == "data:" else f"data:audio/*;base64,{data}"


class WithText(Lenient):
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())


class FunctionCall(Lenient):
    name: ToolName
    arguments: str | dict[str, object] | None = Field(default=None, description="JSON text")


class ToolCallIn(Lenient):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(WithText):
    role: Role
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # as it was before there were tools
    prefix: bool | None = None  # Mistral's and DeepSeek's continue_final_message

    @model_validator(mode="after")
    def fits_role(self) -> Message:
        refuse(self.tool_calls and self.role != "assistant", CALLS_OF_ASSISTANT)
        refuse(self.content is None and self.role not in ("assistant", "tool", "function"), "content is missing")
        if self.function_call is not None and not self.tool_calls:
            self.tool_calls = [ToolCallIn(id="call_0", function=self.function_call)]
        return self

    @property
    def images(self) -> list[str]:
        """Data URLs and addresses, in order."""
        return [p.image for p in self.content if p.image] if isinstance(self.content, list) else []

    @property
    def clips(self) -> list[str]:
        """Data URLs and addresses, in order."""
        return [p.clip for p in self.content if p.clip] if isinstance(self.content, list) else []

    @property
    def has_media(self) -> bool:
        return bool(self.images or self.clips)


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """A function. Fields beside it (`cache_control`) are ignored."""

    type: Literal["function"]
    function: Function


class SchemaFormat(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(SchemaFormat):
    """The format of an answer. The schema may stand next to the type, as in llama.cpp, Anthropic's and the Responses
    API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def whole(self) -> ResponseFormat:
        named = self.type == "json_schema"
        refuse(self.json_schema and not named, "json_schema goes with type 'json_schema', and only with it")
        refuse(named and self.json_schema is None and self.schema_ is None, "type 'json_schema' needs a schema")
        return self

    @property
    def wanted(self) -> dict[str, object]:
        """The schema that the answer must match."""
        inner = self.json_schema.schema_ if self.json_schema is not None else None
        return inner or self.schema_ or {"type": "object"}


# vLLM's names: fields of `structured_outputs`, or with the prefix "guided_"
GUIDES: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "gbnf"}


class StructuredOutputs(Strict):
    """vLLM's constraints on an answer; one may be set."""

    json_: str | dict[str, object] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class PredictedOutput(WithText):
    """OpenAI's predicted outputs: used as a draft, so it changes only the speed."""

    type: Literal["content"]


class OutriderOptions(Strict):
    """Our own object in a request."""

    stats: bool = False  # add the object `outrider` with the drafting statistics to the answer
    token_kinds: bool = False  # name each token accepted | corrected | bonus | plain
    draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT)] = "auto"  # 0: plain decoding


# Accepted but ignored, since clients send them; counted in the metric `outrider_ignored_fields`.
INERT = (
    "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user",
    "modalities", "audio", "verbosity", "cache_prompt", "request_id", "add_special_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "timings_per_token", "return_progress", "id_slot", "prompt_cache_options",
    # parameters of samplers that are off
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dynatemp_low", "dynatemp_high", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "smoothing_curve",
)  # fmt: skip


def writes_text(modalities: object) -> bool:
    """True if a request accepts text. OpenAI's examples of sound also request speech; they are answered in text."""
    return modalities is None or (isinstance(modalities, list) and "text" in modalities)


class Common(Strict):
    model: str | None = None  # default: the first model served
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Texts, Field(max_length=16)] | None = None
    max_tokens: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None  # -1: as many as the context holds
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    # beyond OpenAI's
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None  # llama.cpp's name for it
    min_tokens: Annotated[Integer, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=65536)] | None = None
    include_stop_str_in_output: bool | None = None
    echo: bool | None = None  # the answer repeats the prompt, or an assistant message at its end
    prompt_logprobs: Likeliest | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # writes tokens of logprobs as "token_id:15"
    # keep the prompt's last n tokens (truncation_side "right": its first); -1: as many as fit
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = (
        None  # prefixes are shared only between requests with the same salt
    )
    # among the waiting requests of one client; lower comes first
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, object] | None = None  # llama.cpp's
    grammar: str | None = None  # llama.cpp's GBNF, or Lark
    outrider: OutriderOptions = OutriderOptions()
    ignored: Annotated[tuple[str, ...], Field(exclude=True)] = ()  # the fields of INERT that were sent
    defaults: ClassVar[Mapping[str, float]] = OPENAI  # the protocol's sampling, for models without a recommendation

    @model_validator(mode="before")
    @classmethod
    def without_inert(cls, data: object) -> object:
        """Drops null fields and sets aside those that have no effect."""
        if not isinstance(data, dict):
            return data
        fields = spelled({k: v for k, v in data.items() if v is not None and k not in INERT and k != "ignored"})
        if fields.get("model") == "":
            del fields["model"]  # clients that know only one model
        refuse(not writes_text(data.get("modalities")), 'modalities: only "text" is supported')
        return {**fields, "ignored": tuple(k for k in INERT if data.get(k) is not None)}

    @model_validator(mode="after")
    def consistent(self) -> Common:
        refuse(self.stream_options and not self.stream, "stream_options needs stream: true")
        streamed = self.prompt_logprobs is not None and self.stream
        refuse(streamed, "prompt_logprobs are not available when stream is true; echo of completions with logprobs is")
        refuse(any(len(s) > 256 for s in self.stop or ()), "stop strings have at most 256 characters")
        return self

    @property
    def usage(self) -> Literal["final", "continuous"] | None:
        """Chunks of a stream with token counts: none, one at the end, or every one."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return "continuous"
        return "final" if options.include_usage else None

    @property
    def formats(self) -> list[tuple[str, Kind, object]]:
        """Constraints on the answer's form: (field, kind, constraint)."""
        so = self.structured_outputs or StructuredOutputs()
        form = self.response_format
        any_object = {"type": "object"}
        said: list[tuple[str, Kind, object]] = [
            ("response_format", "json_schema", form.wanted if form is not None and form.type != "text" else None),
            ("structured_outputs.json_object", "json_schema", any_object if so.json_object else None),
            ("json_schema", "json_schema", self.json_schema),
            ("grammar", "gbnf", self.grammar or None),
        ]
        for name, kind in GUIDES.items():
            said.append((f"structured_outputs.{name}", kind, getattr(so, "json_" if name == "json" else name)))
            said.append((f"guided_{name}", kind, getattr(self, f"guided_{name}")))
        return [(field, kind, what) for field, kind, what in said if what is not None]


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] | None = None  # as it was before there were tools
    function_call: Literal["none", "auto"] | Function | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer continues the last message, the assistant's
    prediction: PredictedOutput | None = None

    @model_validator(mode="after")
    def chat_consistent(self) -> ChatRequest:
        if self.functions and not self.tools:
            self.tools = [Tool(type="function", function=f) for f in self.functions]
            call = self.function_call
            self.tool_choice = Tool(type="function", function=call) if isinstance(call, Function) else call
        refuse(self.limit == 0, "max_tokens must be at least 1, or -1 for as many as fit")
        refuse(self.top_logprobs and not self.logprobs, "top_logprobs needs logprobs: true")
        refuse(self.tool_choice not in (None, "none", "auto") and not self.tools, "tool_choice needs tools")
        if isinstance(self.tool_choice, Tool):
            name = self.tool_choice.function.name
            known = [t.function.name for t in self.tools or []]
            refuse(name not in known, f"tool_choice names '{name}', which is not among tools")
        options = self.chat_template_kwargs or {}
        for name in ("continue_final_message", "add_generation_prompt"):  # as transformers spells them
            if isinstance(options.get(name), bool) and getattr(self, name) is None:
                setattr(self, name, options[name])
                self.chat_template_kwargs = options = {k: v for k, v in options.items() if k != name}
        last = self.messages[-1]
        twice = [m.role for m in self.messages[-2:]] == ["assistant", "assistant"]
        refuse(twice, "messages can't end with two assistant messages; put what they say into one")
        if last.prefix and last.role == "assistant":
            self.continue_final_message = True
        goes_on = self.continue_final_message
        begins = self.add_generation_prompt
        refuse(goes_on and last.role != "assistant", "continue_final_message needs an assistant message at the end")
        refuse(goes_on and begins, "continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def limit(self) -> int | None:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if limit == -1 else limit

    @property
    def has_media(self) -> bool:
        """Whether images or clips must be decoded."""
        return any(message.has_media for message in self.messages)

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives reported with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    logprobs: Likeliest | None = None
    best_of: Annotated[Integer, Field(ge=1, le=128)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def completion_consistent(self) -> CompletionRequest:
        n = self.n or 1
        best_of = self.best_of or n
        refuse(best_of < n, "best_of must be at least n")
        refuse(best_of > n and self.stream, "best_of can't be streamed")
        return self

    @property
    def limit(self) -> int | None:
        if self.max_tokens is None:
            return 16  # OpenAI's default
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
