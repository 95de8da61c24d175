"""From a validated body to engine requests: messages to a prompt, fields to sampling parameters, formats to grammars.

Runs off the event loop (long prompts take a while to tokenise). Everything that can be wrong with a request is found
here and raised as an `ApiError`, so that a request which reaches the engine runs.
"""

from __future__ import annotations

import json
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..engine.control import ChatPrompt
from ..engine.grammar import Grammar, GrammarCompiler
from ..engine.scheduler import Request
from ..engine.text import Tokenizer
from ..types import OutriderError, SamplingParams
from .errors import ApiError, bad
from .output import Chain, Parser, Plain
from .reasoning import GEMMA4_CHANNEL, THINK_TAGS, ThoughtFormat, Thoughts
from .runner import EngineLike
from .schema import ChatRequest, Common, CompletionRequest, Message, NamedTool, OutriderOptions
from .settings import ServerSettings
from .tool_grammar import MAX_CALLS, gemma_calls, json_calls
from .tools import GEMMA_OPEN, GEMMA_RESPONSE, JSON_CLOSE, JSON_OPEN, GemmaCalls, JsonCalls

TOOLS_PROMPT = """You can call functions. These are available:
<tools>{tools}</tools>

When a function is needed, answer with nothing but a list of calls in this format, with arguments of the right types:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function is needed, answer the user directly."""


@dataclass(frozen=True)
class Backend:
    """What the server needs of a loaded model."""

    engine: EngineLike
    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    note: str = ""  # one line about the drafter

    @classmethod
    def of(cls, llm: Any) -> Backend:
        if llm.tokenizer is None:
            raise OutriderError(f"{llm.name} has no tokenizer, so it can't be served")
        return cls(llm.engine, llm.tokenizer, llm.config.vocab_size, llm.engine.max_context, llm.drafter_note)


@dataclass(frozen=True)
class Dialect:
    """How this model writes thoughts and tool calls, found out from its vocabulary and template."""

    tools: Literal["gemma4", "json"]
    thoughts: ThoughtFormat
    template_tools: bool  # the chat template writes the tools into the prompt

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Dialect:
        gemma = len(tokenizer.encode(GEMMA_OPEN, bos=False)) == 1
        function = {"name": "zq_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        probe = {"type": "function", "function": function}
        try:
            shown = "zq_probe" in tokenizer.render([{"role": "user", "content": "x"}], tools=[probe])
        except OutriderError:
            shown = False
        return cls("gemma4" if gemma else "json", GEMMA4_CHANNEL if gemma else THINK_TAGS, shown)


@dataclass(frozen=True)
class Job:
    """One HTTP call: its engine requests (choice i is requests[i]) and how to read their answers."""

    requests: list[Request]
    parser: Callable[[], Parser]
    options: OutriderOptions
    seed: int
    stream: bool
    include_usage: bool
    one_call: bool = False  # parallel_tool_calls: false
    echoes: tuple[str, ...] = ()  # /v1/completions with echo: the prompt's text, per request

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many answers it has."""
        return sum(len(p) for p in {id(r.prompt): r.prompt for r in self.requests}.values())


class Preparer:
    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self._backend, self._settings = backend, settings
        self.tokenizer = backend.tokenizer
        self.dialect = Dialect.of(backend.tokenizer)
        response = self.tokenizer.encode(GEMMA_RESPONSE, bos=False)
        self._hand_over = tuple(response) if len(response) == 1 else ()  # Gemma 4 hands over to the tool with this token
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # requests are prepared on several threads

    # ---- the two kinds of call

    def chat(self, body: ChatRequest, stats: bool) -> Job:
        self._check_model(body.model)
        use_tools = bool(body.tools) and body.tool_choice != "none"
        forced = use_tools and body.tool_choice not in (None, "auto")
        structured = body.response_format is not None and body.response_format.type != "text"
        if use_tools and structured:
            raise bad("response_format can't be combined with tools; set tool_choice to 'none' or drop one.", "response_format")
        prompt = self._prompt(body, use_tools)
        ids = prompt.ids
        grammar: Grammar | None = None
        if structured:
            grammar = self._format_grammar(body)
        elif forced:
            grammar = self._tool_grammar(body)
        if grammar is not None and (body.min_tokens or body.ignore_eos):
            field = "min_tokens" if body.min_tokens else "ignore_eos"
            raise bad(f"{field} can't be combined with response_format or a forced tool call.", field)
        params = self._params(body, ids, body.limit, (body.top_logprobs or 0) if body.logprobs else None, grammar)
        tail = prompt.written[-64:]

        def parser() -> Parser:
            thoughts = Thoughts(self.dialect.thoughts, tail)
            if not use_tools:
                return thoughts if not structured else Plain()
            return Chain(thoughts, GemmaCalls() if self.dialect.tools == "gemma4" else JsonCalls())

        return self._job(body, [ids], params, parser, stats, one_call=body.parallel_tool_calls is False)

    def completion(self, body: CompletionRequest, stats: bool) -> Job:
        self._check_model(body.model)
        prompts = body.prompts
        if not prompts or any(not p for p in prompts):
            raise bad("The prompt is empty.", "prompt")
        if len(prompts) * (body.n or 1) > self._settings.max_choices:
            raise bad(f"At most {self._settings.max_choices} answers a call (prompts times n).", "n")
        encoded = [self._encode(p, bos=True) if isinstance(p, str) else p for p in prompts]
        for token in (t for ids in encoded for t in ids):
            if token >= self._backend.vocab_size:
                raise bad(f"Token id {token} is outside the vocabulary (0..{self._backend.vocab_size - 1}).", "prompt")
        longest = max(encoded, key=len)
        room = max(1, self._backend.max_context - len(longest))
        limit = body.max_tokens if body.max_tokens is not None else min(16, room)  # 16 is OpenAI's default
        params = self._params(body, longest, limit, body.logprobs, None)
        job = self._job(body, encoded, params, Plain, stats)
        if not body.echo:
            return job
        texts = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
        return replace(job, echoes=tuple(t for t in texts for _ in range(body.n or 1)))

    # ---- prompt

    def _prompt(self, body: ChatRequest, use_tools: bool) -> ChatPrompt:
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []] if use_tools else None
        messages = [self._message(m) for m in body.messages]
        if not self.dialect.template_tools:
            messages = _spell_out_tools(messages, tools)
            tools = None
        options = {} if body.reasoning_effort is None else {"enable_thinking": body.reasoning_effort != "none"}
        try:
            return self.tokenizer.prompt(messages, tools=tools, **options)
        except OutriderError as e:
            raise bad(_one_line(e), "messages", "template_error") from e
        except (UnicodeError, TypeError) as e:
            raise bad("The text is not valid Unicode.") from e

    def _message(self, message: Message) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                try:
                    arguments = json.loads(call.function.arguments or "{}")
                except (ValueError, RecursionError) as e:
                    raise bad("tool_calls[].function.arguments is not valid JSON.", "messages") from e
                calls.append({"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}})
            out["tool_calls"] = calls
        if message.role == "tool":
            out["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            out["name"] = message.name
        return out

    def _encode(self, text: str, bos: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, bos=bos)
        except (UnicodeError, TypeError) as e:
            raise bad("The text is not valid Unicode.") from e

    # ---- parameters

    def _params(self, body: Common, ids: Sequence[int], limit: int | None, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
        context = self._backend.max_context
        longest = min(self._settings.max_prompt or context - 1, context - 1)
        if len(ids) > longest:
            raise bad(f"The prompt has {len(ids)} tokens; at most {longest} are allowed here.", "messages", "context_length_exceeded")
        if limit is not None and len(ids) + limit > context:
            message = f"The prompt has {len(ids)} tokens and {limit} more are asked for; the context holds {context}."
            raise bad(message, "max_tokens", "context_length_exceeded")
        seed = body.seed if body.seed is not None else secrets.randbits(31)
        asked = {
            "top_k": body.top_k, "top_p": body.top_p, "min_p": body.min_p, "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty, "frequency_penalty": body.frequency_penalty,
            "min_tokens": body.min_tokens, "ignore_eos": body.ignore_eos,
        }  # fmt: skip
        params = SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            logit_bias={int(k): v for k, v in (body.logit_bias or {}).items()},
            stop=body.stops,
            stop_token_ids=(*(body.stop_token_ids or ()), *(self._hand_over if isinstance(body, ChatRequest) and body.tools else ())),
            max_tokens=limit if limit is not None else context - len(ids),
            seed=seed & (2**63 - 1),
            logprobs=logprobs,
            grammar=grammar,
            keep_special=isinstance(body, ChatRequest) and self.dialect.tools == "gemma4",  # its tags are control tokens
            **{k: v for k, v in asked.items() if v is not None},  # type: ignore[arg-type]
        )
        try:
            return params.validate(self._backend.vocab_size)
        except OutriderError as e:
            raise bad(str(e)) from e

    def _job(
        self,
        body: Common,
        prompts: list[list[int]],
        params: SamplingParams,
        parser: Callable[[], Parser],
        stats: bool,
        one_call: bool = False,
    ) -> Job:
        n = body.n or 1
        if n > self._settings.max_choices:
            raise bad(f"n can be at most {self._settings.max_choices} here.", "n")
        options = body.outrider or OutriderOptions()
        options = options.model_copy(update={"stats": options.stats or stats})
        k = None if options.draft_tokens == "auto" else options.draft_tokens
        group = uuid.uuid4().hex
        requests = [
            Request(f"{group}-{p * n + i}", ids, replace(params, seed=(params.seed + i) & (2**63 - 1)), draft_tokens=k, drafter=k != 0)
            for p, ids in enumerate(prompts)
            for i in range(n)
        ]
        usage = body.stream_options is not None and body.stream_options.include_usage
        return Job(requests, parser, options, params.seed, bool(body.stream), usage, one_call)

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            message = f"The model '{name[:100]}' does not exist; this server has '{self._settings.model_name}'."
            raise ApiError(404, message, "model", "model_not_found")

    # ---- grammars

    def _format_grammar(self, body: ChatRequest) -> Grammar:
        assert body.response_format is not None
        spec = body.response_format.json_schema
        try:
            if spec is None or spec.schema_ is None:
                return self.compiler.json_object()
            return self.compiler.json_schema(spec.schema_)
        except OutriderError as e:
            raise bad(str(e), "response_format") from e

    def _tool_grammar(self, body: ChatRequest) -> Grammar:
        functions = [(t.function.name, t.function.parameters or {"type": "object"}) for t in body.tools or []]
        most = 1 if body.parallel_tool_calls is False else MAX_CALLS
        if isinstance(body.tool_choice, NamedTool):
            wanted = body.tool_choice.function.name
            functions, most = [f for f in functions if f[0] == wanted][:1], 1
        try:
            if self.dialect.tools == "gemma4":
                return self.compiler.lark(gemma_calls(functions, most, self._token_id))
            return self.compiler.lark(json_calls(functions, most))
        except (OutriderError, RecursionError, TypeError) as e:
            raise bad(_one_line(e), "tools") from e

    @property
    def compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer.json, self._backend.vocab_size, sorted(self.tokenizer.eos_ids))
            return self._compiler

    def _token_id(self, text: str) -> int:
        ids = self.tokenizer.encode(text, bos=False)
        if len(ids) != 1:
            raise OutriderError(f"the tokenizer has no token {text}")
        return ids[0]


def _spell_out_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """For templates that know nothing of tools: definitions go into the system message, calls and results into text."""
    out = []
    for message in messages:
        text = message["content"]
        if message.get("tool_calls"):
            calls = [c["function"] for c in message["tool_calls"]]
            text += JSON_OPEN + json.dumps(calls, ensure_ascii=False) + JSON_CLOSE
        if message["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>{text}</tool_response>"})
        else:
            out.append({"role": message["role"], "content": text})
    if tools:
        prompt = TOOLS_PROMPT.format(tools=json.dumps([t["function"] for t in tools], ensure_ascii=False))
        if out[0]["role"] == "system":
            out[0] = {"role": "system", "content": f"{out[0]['content']}\n\n{prompt}"}
        else:
            out.insert(0, {"role": "system", "content": prompt})
    return out


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
