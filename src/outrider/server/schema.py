"""What a request may hold. Unknown fields are refused by name: a field that is silently ignored is a wrong answer.
Taken without effect are null, the fields of `INERT`, and what clients have added to messages.

The shapes are OpenAI's, with the extensions that vLLM and llama.cpp share, and our own object `outrider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, field_validator, model_validator
from pydantic_core import CoreSchema

from ..types import MAX_DRAFT
from .grammar_source import Kind
from .spellings import MOST_LOGPROBS, OPENAI, Biases, Integer, Top, chat, sampling, split_prompts

Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
Likeliest = Annotated[Top, Field(ge=0, le=MOST_LOGPROBS)]
Role = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # templates may know others than OpenAI's
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]  # Anthropic's limit


MAX_KEYS = 512  # of one object with fixed fields; more than there are names for


def fail_fast(node: object) -> None:
    """Set the option on every list and map of a core schema, in place."""
    if isinstance(node, dict):
        if node.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            node["fail_fast"] = True
        for key, child in node.items():
            if key != "metadata":
                fail_fast(child)
    elif isinstance(node, list):
        for child in node:
            fail_fast(child)


class FailFastModel(BaseModel):
    """Validation ends at the first bad item of a list or map: a million errors cost seconds and gigabytes."""

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
        """Of a thousand unknown fields the first few are enough for a refusal."""
        return dict(islice(data.items(), MAX_KEYS)) if isinstance(data, dict) and len(data) > MAX_KEYS else data


class Lenient(FailFastModel):
    """Parts of a conversation, which clients send back with additions: what is not known is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Named(Lenient):
    """Of any body, the model it is for."""

    model: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far with every chunk
    include_obfuscation: bool | None = None  # changes nothing here


class TextPart(Lenient):
    """Text, or an image as a URL. Thoughts of earlier turns are not rendered again; a refusal is text."""

    type: str = "text"
    text: str = ""
    refusal: str = ""
    image_url: str | dict[str, object] | None = None
    image: str | None = None  # its data URL or address

    @model_validator(mode="after")
    def is_text(self) -> TextPart:
        if self.type == "refusal":
            self.text = self.refusal
        elif self.type in ("thinking", "redacted_thinking", "reasoning"):
            self.text = ""
        elif self.type in ("image_url", "input_image"):
            self.text, self.image = "", image_of(self.image_url)
        elif self.type not in ("text", "input_text", "output_text"):
            raise ValueError(f"parts of type '{self.type[:40]}' can't be read here, only text and images")
        elif "text" not in self.model_fields_set:
            raise ValueError("text is missing")
        return self


def image_of(given: object) -> str:
    """A data URL or an address, as clients send it: bare or as {"url": ..., "detail": ...}."""
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise ValueError("image_url is missing")
    if not url[:8].lower().startswith(("data:", "http://", "https://")):
        raise ValueError("images are not fetched from such an address; send a data URL (data:image/png;base64,...)")
    return url


def joined(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(p.text for p in content or ())


class FunctionCall(Lenient):
    name: ToolName
    arguments: str | dict[str, object] | None = Field(default=None, description="JSON text")


class ToolCallIn(Lenient):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Lenient):
    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # as it was before there were tools
    prefix: bool | None = None  # Mistral's and DeepSeek's continue_final_message

    @model_validator(mode="after")
    def fits_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant message may hold tool_calls")
        if self.content is None and self.role not in ("assistant", "tool", "function"):
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        return joined(self.content)

    @property
    def images(self) -> list[str]:
        """Data URLs and addresses, in order."""
        return [p.image for p in self.content if p.image] if isinstance(self.content, list) else []

    @property
    def calls(self) -> list[ToolCallIn]:
        old = [ToolCallIn(id="call_0", function=self.function_call)] if self.function_call is not None else []
        return list(self.tool_calls or old)


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """What clients put beside the function (`cache_control`) changes nothing of it."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    # llama.cpp: next to type json_object or json_schema
    schema_: dict[str, object] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def whole(self) -> ResponseFormat:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("type 'json_schema' needs json_schema")
        return self

    @property
    def wanted(self) -> dict[str, object]:
        """The schema that answers must match."""
        inner = self.json_schema.schema_ if self.json_schema is not None else None
        return inner or self.schema_ or {"type": "object"}


class StructuredOutputs(Strict):
    """vLLM's; one of them."""

    json_: str | dict[str, object] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class PredictedOutput(Strict):
    """OpenAI's predicted outputs: here a source of drafts, so it changes nothing but the speed."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return joined(self.content)


class OutriderOptions(Strict):
    """Our own object in a request."""

    stats: bool = False  # add the object `outrider` with the drafting statistics to the answer
    token_kinds: bool = False  # name each token accepted | corrected | bonus | plain
    draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT)] = "auto"  # 0: plain decoding


# Taken because clients send them, and of no effect on an answer here; counted in the metric `outrider_ignored_fields`.
INERT = (
    "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user",
    "modalities",
    "verbosity", "cache_prompt", "request_id", "add_special_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "timings_per_token", "return_progress", "id_slot", "prompt_cache_options",
)  # fmt: skip


class Common(Strict):
    model: str | None = None  # left out: the first that is served
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
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
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs as "token_id:15"
    # keep the prompt's last n tokens (truncation_side "right": its first); -1: as many as fit
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # where tokens are left out
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # prefixes are shared with this salt
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
    ignored: Annotated[tuple[str, ...], Field(exclude=True)] = ()  # which of INERT were sent
    defaults: ClassVar[Mapping[str, float]] = OPENAI  # the protocol's sampling, for models that say nothing of it

    @model_validator(mode="before")
    @classmethod
    def without_inert(cls, data: object) -> object:
        """What is null was not sent. Fields that change nothing are set aside."""
        if not isinstance(data, dict):
            return data
        kept = sampling({k: v for k, v in data.items() if v is not None and k not in INERT and k != "ignored"})
        if kept.get("model") == "":
            del kept["model"]  # clients that know of one model only
        modalities = data.get("modalities")
        if modalities is not None and modalities != ["text"]:
            raise ValueError("modalities: only text is spoken here")
        return {**kept, "ignored": tuple(k for k in INERT if data.get(k) is not None)}

    @field_validator("stop")
    @classmethod
    def few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or not all(len(s) <= 256 for s in stops):
            raise ValueError("at most 16 stop strings of up to 256 characters")
        return value

    @model_validator(mode="after")
    def consistent(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def usage(self) -> Literal["final", "continuous"] | None:
        """Where in a stream it is told: in a chunk of its own at the end, or in every chunk as well."""
        options = self.stream_options or StreamOptions()
        return "continuous" if options.continuous_usage_stats else "final" if options.include_usage else None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(s for s in given if s)

    @property
    def formats(self) -> list[tuple[str, Kind, object]]:
        """Everything that says what the answer must match: (field, kind, what)."""
        so = self.structured_outputs or StructuredOutputs()
        form = self.response_format
        any_object = {"type": "object"}
        said: list[tuple[str, Kind, object]] = [
            ("response_format", "json_schema", form.wanted if form is not None and form.type != "text" else None),
            ("structured_outputs.json", "json_schema", so.json_),
            ("structured_outputs.regex", "regex", so.regex),
            ("structured_outputs.choice", "choice", so.choice),
            ("structured_outputs.grammar", "gbnf", so.grammar),
            ("structured_outputs.json_object", "json_schema", any_object if so.json_object else None),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "gbnf", self.guided_grammar),
            ("json_schema", "json_schema", self.json_schema),
            ("grammar", "gbnf", self.grammar or None),
        ]
        return [(field, kind, what) for field, kind, what in said if what is not None]


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=128)] | None = None  # as it was before there were tools
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the last message is the assistant's and goes on
    echo: bool | None = None  # the answer repeats an assistant message at the end
    prompt_logprobs: Likeliest | None = None
    prediction: PredictedOutput | None = None

    @model_validator(mode="before")
    @classmethod
    def as_we_spell_it(cls, data: object) -> object:
        return chat({k: v for k, v in data.items() if v is not None}) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def chat_consistent(self) -> ChatRequest:
        if self.functions and not self.tools:
            self.tools = [Tool(type="function", function=f) for f in self.functions]
            call = self.function_call
            self.tool_choice = NamedTool(type="function", function=call) if isinstance(call, NamedFunction) else call
        if self.limit == 0:
            raise ValueError("max_tokens must be at least 1, or -1 for as many as fit")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [t.function.name for t in self.tools or []]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names '{self.tool_choice.function.name}', which is not among tools")
        options = self.chat_template_kwargs or {}
        for name in ("continue_final_message", "add_generation_prompt"):  # as transformers spells them
            if isinstance(options.get(name), bool) and getattr(self, name) is None:
                setattr(self, name, options[name])
                self.chat_template_kwargs = options = {k: v for k, v in options.items() if k != name}
        if [m.role for m in self.messages[-2:]] == ["assistant", "assistant"]:
            raise ValueError("messages can't end with two assistant messages; put what they say into one")
        if self.messages[-1].prefix and self.messages[-1].role == "assistant":
            self.continue_final_message = True
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not available when stream is true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs an assistant message at the end")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def limit(self) -> int | None:
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if asked == -1 else asked

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens that are told with each token; None: no log-probabilities are told."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    # a long list is looked at when there is room
    prompt: str | list[object] = Field(description="A text, token ids, or a list of either.")
    logprobs: Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[Integer, Field(ge=1, le=128)] | None = None
    suffix: str | None = None
    prompt_logprobs: Likeliest | None = None

    @field_validator("prompt")
    @classmethod
    def texts_or_ids(cls, value: str | list[object]) -> str | list[object]:
        split_prompts(value, "prompt")
        return value

    @model_validator(mode="after")
    def completion_consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of must be at least n")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not available when stream is true; echo with logprobs is")
        if (self.best_of or 1) > (self.n or 1) and self.stream:
            raise ValueError("best_of can't be streamed")
        return self

    @property
    def limit(self) -> int | None:
        return None if self.max_tokens == -1 else 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[object]]:
        return split_prompts(self.prompt, "prompt")
