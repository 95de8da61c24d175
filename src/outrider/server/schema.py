"""What a request may hold. Unknown fields are refused by name: a field that is silently ignored is a wrong answer.

The shapes are OpenAI's; fields after the comment `ours` are extensions other engines share (top_k, min_p, ...) or our
own object `outrider`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

from ..types import MAX_DRAFT
from .errors import bad

Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: ToolName
    arguments: str = Field(description="JSON text")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what we sent earlier; not rendered again, as the models' own templates ask
    refusal: None = None  # the openai client echoes it

    @model_validator(mode="after")
    def fits_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only an assistant message may hold tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("only a tool message may hold tool_call_id")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool message needs tool_call_id")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class OutriderOptions(Strict):
    """Our own object in a request."""

    stats: bool = False  # add the object `outrider` with the drafting statistics to the answer
    token_kinds: bool = False  # name each token accepted | corrected | bonus | plain
    draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT)] = "auto"  # 0: plain decoding
    stream_smoothing: bool = False  # spread the tokens of one cycle over the time of a cycle


class Common(Strict):
    model: str | None = None  # one model is served: it may be left out
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    user: str | None = None  # accepted for compatibility; not logged, not used
    # ours
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    outrider: OutriderOptions | None = None

    @field_validator("stop")
    @classmethod
    def few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or not all(0 < len(s) <= 256 for s in stops):
            raise ValueError("at most 16 stop strings of 1 to 256 characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and (len(value) > 1024 or not all(k.isascii() and k.isdigit() and len(k) < 10 for k in value)):
            raise ValueError("keys must be token ids, at most 1024 of them")
        return value

    @model_validator(mode="after")
    def consistent(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096), FailFast()]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def chat_consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [t.function.name for t in self.tools or []]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names '{self.tool_choice.function.name}', which is not among tools")
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; send one")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(Common):
    prompt: str | list[object] = Field(description="A text, token ids, or a list of either.")  # a long list is looked at when there is room
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @model_validator(mode="after")
    def completion_consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported")
        return self

    @property
    def prompts(self) -> list[str | list[object]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        if not all(isinstance(p, str | list) for p in self.prompt):
            raise bad("prompt must be a text, token ids, or a list of either.", "prompt")
        return [p for p in self.prompt if isinstance(p, str | list)]
