"""From a validated body to engine requests: messages to a prompt, fields to sampling parameters, formats to grammars.

Runs off the event loop (long prompts take a while to tokenise). Everything that can be wrong with a request is found
here and raised as an `ApiError`, so that a request which reaches the engine runs.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import JsonValue

from ..engine.chat_template import reserved
from ..engine.grammar import AllowedTokens, CompiledGrammar, GrammarCompiler
from ..engine.special_tokens import ChatPrompt
from ..engine.step import Request
from ..engine.text import LONG, Tokenizer
from ..types import Json, OutriderError, SamplingParams
from .errors import ApiError, bad, check_size
from .grammar_source import GrammarSource, build
from .output import Parser, ParserChain, PlainText
from .reasoning import GEMMA4_CHANNEL, THINK_TAGS, ThoughtFormat, Thoughts
from .runner import EngineLike
from .schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Message,
    NamedTool,
    OutriderOptions,
    PredictedOutput,
    StreamOptions,
)
from .settings import ServerSettings, without_paths
from .tool_grammar import MAX_CALLS
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, GEMMA_RESPONSE, JSON_CLOSE, JSON_OPEN, GemmaCalls, JsonCalls

if TYPE_CHECKING:
    from ..llm import LLM

TOOLS_PROMPT = """You can call functions. These are available:
<tools>{tools}</tools>

When a function is needed, answer with nothing but a list of calls in this format, with arguments of the right types:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function is needed, answer the user directly."""


@dataclass(frozen=True)
class ServedModel:
    """What the server needs of a loaded model."""

    engine: EngineLike
    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    note: str = ""  # one line about the drafter
    nbytes: int = 0  # weights and K/V; 0: nobody counted
    places: int = 0  # sequences at once; 0: as many as the settings say

    @classmethod
    def of(cls, llm: LLM, say: Callable[[str], None] = lambda _: None) -> ServedModel:
        """say: is told, in a line, what the engine made ready and how long that took, where it took time."""
        if llm.tokenizer is None:
            raise OutriderError(f"{llm.name} has no tokenizer, so it can't be served")
        note = without_paths(llm.drafter_note)
        ready = llm.engine.serve()
        if ready:
            say(ready)
        return cls(llm.engine, llm.tokenizer, llm.config.vocab_size, llm.engine.max_context, note, llm.nbytes)


@dataclass(frozen=True)
class Dialect:
    """How this model writes thoughts and tool calls, found out from its vocabulary and template."""

    tools: Literal["gemma4", "json"]
    thoughts: ThoughtFormat
    template_tools: bool  # the chat template writes the tools into the prompt

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Dialect:
        gemma = len(tokenizer.encode(GEMMA_OPEN, bos=False)) == 1
        function: Json = {"name": "zq_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        probe: Json = {"type": "function", "function": function}
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
    priority: int = 0  # among the waiting requests of one client: lower comes first
    continuous_usage: bool = False
    return_ids: bool = False
    functions: bool = False  # calls are told as they were before there were tools
    best: tuple[int, int] = (1, 1)  # keep so many of each prompt's so many answers
    hide_logprobs: bool = False  # they were computed to choose the best
    max_zero: bool = False  # max_tokens: 0: nothing is wanted but the prompt
    prompt_logprobs: int | None = None  # score the prompt, with so many alternatives
    echo_logprobs: bool = False  # and tell it with the answer's
    grammar: GrammarSource | None = None  # what the answers must match, to be compiled before the job can run

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many answers it has."""
        return sum(len(p) for p in {id(r.prompt): r.prompt for r in self.requests}.values())

    def under(self, grammar: CompiledGrammar) -> Job:
        return replace(
            self, requests=[replace(r, params=replace(r.params, grammar=grammar)) for r in self.requests], grammar=None
        )


class Preparer:
    def __init__(self, backend: ServedModel, settings: ServerSettings) -> None:
        self._backend, self._settings = backend, settings
        self.tokenizer = backend.tokenizer
        self.dialect = Dialect.of(backend.tokenizer)
        response = self.tokenizer.encode(GEMMA_RESPONSE, bos=False)
        self._hand_over = (
            tuple(response) if len(response) == 1 else ()
        )  # Gemma 4 hands over to the tool with this token

    # ---- the two kinds of call

    def chat(self, body: ChatRequest, stats: bool) -> Job:
        self._check_model(body.model)
        use_tools = bool(body.tools) and body.tool_choice != "none"
        forced = use_tools and body.tool_choice not in (None, "auto")
        format_ = self._format(body)
        prompt = self._prompt(body, use_tools)
        ids = prompt.ids
        grammar = (
            self._tool_grammar(body, format_ if not forced else None)
            if forced or (use_tools and format_ is not None)
            else format_
        )
        if grammar is not None and (body.min_tokens or body.ignore_eos):
            field = "min_tokens" if body.min_tokens else "ignore_eos"
            raise bad(f"{field} can't be combined with {grammar.field}.", field)
        params = self._params(body, ids, body.limit, (body.top_logprobs or 0) if body.logprobs else None)
        tail = prompt.written[-64:]

        def parser() -> Parser:
            thoughts = Thoughts(self.dialect.thoughts, tail)
            if not use_tools:
                return thoughts if format_ is None else PlainText()
            return ParserChain(thoughts, GemmaCalls() if self.dialect.tools == "gemma4" else JsonCalls())

        job = self._job(
            body, [ids], params, parser, stats, one_call=body.parallel_tool_calls is False or body.functions is not None
        )
        hint = self._hint(body.prediction)
        if hint:
            job = replace(job, requests=[replace(r, hint=hint) for r in job.requests])
        return replace(job, grammar=grammar, functions=body.functions is not None, prompt_logprobs=body.prompt_logprobs)

    def completion(self, body: CompletionRequest, stats: bool) -> Job:
        self._check_model(body.model)
        prompts = body.prompts
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_beginning(prompt, "prompt")
        encoded = [self._encode(p, bos=True) if isinstance(p, str) else self.token_ids(p) for p in prompts]
        longest = max(encoded, key=len)
        limit = body.limit if body.max_tokens is not None else 16  # OpenAI's default
        best_of = max(body.best_of or 1, body.n or 1)
        keep = body.n or 1
        asked = 0 if body.logprobs is None and best_of > keep else body.logprobs  # to know which are the best
        params = self._params(body, longest, limit, asked)
        job = self._job(body, encoded, params, PlainText, stats, many=best_of)
        scored = body.prompt_logprobs if body.prompt_logprobs is not None else (body.logprobs if body.echo else None)
        job = replace(
            job, grammar=self._format(body), best=(keep, best_of), hide_logprobs=body.logprobs is None,
            prompt_logprobs=scored,
            max_zero=limit == 0, echo_logprobs=bool(body.echo) and body.logprobs is not None,
        )  # fmt: skip
        if not body.echo:
            return job
        texts = [p if isinstance(p, str) else self.tokenizer.decode(ids) for p, ids in zip(prompts, encoded)]
        return replace(job, echoes=tuple(t for t in texts for _ in range(best_of)))

    # ---- before any work

    def answers(self, body: Common) -> int:
        """How many answers a call asks for; refuses what can be seen to be too much without reading the text."""
        n = body.n or 1
        many = n
        if isinstance(body, CompletionRequest):
            n = max(n, body.best_of or 1)
            listed = (
                body.prompt if isinstance(body.prompt, list) and not isinstance(next(iter(body.prompt), 0), int) else []
            )
            self._check_answers(n, n * len(listed))  # before any of them is looked at
            prompts = body.prompts
            if not prompts or any(not p for p in prompts):
                raise bad("The prompt is empty.", "prompt")
            many = n * len(prompts)
            for prompt in prompts:
                self._check_length(len(prompt), "prompt", isinstance(prompt, str))
        elif isinstance(body, ChatRequest):
            self._check_length(sum(len(m.text) for m in body.messages), "messages", True)
        self._check_answers(n, many)
        return many

    def _check_answers(self, n: int, many: int) -> None:
        if n > self._settings.max_choices or many > self._settings.max_answers:
            most = (
                f"n can be at most {self._settings.max_choices}, prompts times n at most {self._settings.max_answers}"
            )
            raise bad(f"This call asks for {many} answers; {most}.", "n")

    def _check_length(self, length: int, field: str, text: bool) -> None:
        """No token is longer than the longest one, so a text beyond this many characters can't fit, whatever it
        says."""
        most = self.longest_prompt * (self._longest_token if text else 1)
        if length > most:
            message = (
                f"{field}: {length} {'characters' if text else 'tokens'}; at most {most} can fit into the context here."
            )
            raise bad(message, field, "context_length_exceeded")

    @property
    def longest_prompt(self) -> int:
        context = self._backend.max_context
        return min(self._settings.max_prompt or context - 1, context - 1)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)

    # ---- prompt

    @property
    def max_context(self) -> int:
        return self._backend.max_context

    def conversation(self, body: ChatRequest) -> ChatPrompt:
        """What the model would read of it."""
        self.answers(body)
        return self._prompt(body, bool(body.tools) and body.tool_choice != "none")

    def tokens(self, text: str, special: bool) -> list[int]:
        self._check_length(len(text), "prompt", True)
        return self._encode(text, bos=special)

    def token_ids(self, prompt: Sequence[object], field: str = "prompt") -> list[int]:
        ids: list[int] = []
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._backend.vocab_size:
                shown = token if isinstance(token, int) else type(token).__name__
                raise bad(
                    f"{field}: a token id must be an integer in 0..{self._backend.vocab_size - 1}, got {shown}.", field
                )
            ids.append(token)
        return ids

    def _prompt(self, body: ChatRequest, use_tools: bool) -> ChatPrompt:
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []] if use_tools else None
        messages = [self._message(m) for m in body.messages]
        for message in body.messages:
            if message.role == "user":  # what others have said a template may leave out
                self._check_beginning(message.text, "messages")
        if not self.dialect.template_tools:
            self._check_beginning(json.dumps(tools) if tools else "", "tools")
            messages = _spell_out_tools(messages, tools)
            tools = None
        options: dict[str, JsonValue] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options = {
                "enable_thinking": body.reasoning_effort != "none",
                "reasoning_effort": body.reasoning_effort,
                **options,
            }
        for name in options:
            if reserved(name):
                raise bad(f"chat_template_kwargs can't set '{name[:40]}'.", "chat_template_kwargs")
        last = str(messages.pop()["content"]) if body.continue_final_message else ""
        begin = True if body.continue_final_message else body.add_generation_prompt is not False
        try:
            prompt = self.tokenizer.prompt(messages, tools=tools, add_generation_prompt=begin, **options)
            return prompt if not last else ChatPrompt(prompt.ids + self._continued(last), prompt.written + last)
        except OutriderError as e:
            raise bad(_one_line(e), "messages", "template_error") from e
        except (UnicodeError, TypeError) as e:
            raise bad("The text is not valid Unicode.") from e

    def _continued(self, text: str) -> list[int]:
        """The beginning of an answer, as text: what it spells of control tokens is left out."""
        return [t for t in self.tokenizer.encode(text) if t not in self.tokenizer.special_ids]

    def _hint(self, prediction: PredictedOutput | None) -> tuple[int, ...]:
        if prediction is None:
            return ()
        text = (
            prediction.content if isinstance(prediction.content, str) else "".join(p.text for p in prediction.content)
        )
        self._check_length(len(text), "prediction", True)
        return tuple(self._encode(text, bos=False))

    def _message(self, message: Message) -> dict[str, JsonValue]:
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        out: dict[str, JsonValue] = {"role": role, "content": message.text}
        if message.calls:
            calls: list[JsonValue] = []
            for call in message.calls:
                given = call.function.arguments or "{}"
                if isinstance(given, str) and len(given) > LONG:
                    check_size(given.encode("utf-8", "replace"))  # it is a body of its own
                try:
                    arguments: JsonValue = json.loads(given) if isinstance(given, str) else cast(JsonValue, given)
                except (ValueError, RecursionError):
                    arguments = cast(
                        JsonValue, given
                    )  # a call that was cut off comes back as it was: the conversation can go on
                calls.append(
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": arguments},
                    }
                )
            out["tool_calls"] = calls
        if role == "tool":
            out["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            out["name"] = message.name
        return out

    def _encode(self, text: str, bos: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, bos=bos)
        except (UnicodeError, TypeError) as e:
            raise bad("The text is not valid Unicode.") from e

    def _check_beginning(self, text: str, field: str) -> None:
        """Where the beginning of a text has more than half as many tokens again as fit, the rest need not be looked
        at."""
        head = 3 * self.longest_prompt
        if len(text) > max(LONG, head) and len(self._encode(text[:head], bos=False)) > head // 2:
            message = f"{field}: more than {head // 2} tokens; at most {self.longest_prompt} are allowed here."
            raise bad(message, field, "context_length_exceeded")

    # ---- parameters

    def _params(self, body: Common, ids: Sequence[int], limit: int | None, logprobs: int | None) -> SamplingParams:
        """As they were asked for; `_fit` makes them fit behind a prompt."""
        longest = self.longest_prompt
        if len(ids) > longest:
            raise bad(
                f"The prompt has {len(ids)} tokens; at most {longest} are allowed here.",
                "messages",
                "context_length_exceeded",
            )
        seed = body.seed if body.seed is not None else secrets.randbits(31)
        asked = {
            "min_p": body.min_p, "repetition_penalty": body.repetition_penalty or body.repeat_penalty,
            "presence_penalty": body.presence_penalty, "frequency_penalty": body.frequency_penalty,
            "min_tokens": body.min_tokens, "ignore_eos": body.ignore_eos,
        }  # fmt: skip
        params = SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            logit_bias={int(k): v for k, v in (body.logit_bias or {}).items()},
            top_k=max(0, body.top_k or 0),
            top_p=max(
                body.top_p if body.top_p is not None else 1.0, 1e-6
            ),  # 0 keeps the most likely token, as the peers have it
            bad_words=tuple(w for word in body.bad_words or () for w in self._spellings(word)),
            grammar=self._allowed(body.allowed_token_ids),
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=(
                *(body.stop_token_ids or ()),
                *(self._hand_over if isinstance(body, ChatRequest) and body.tools else ()),
            ),
            max_tokens=max(self._backend.max_context, body.min_tokens or 0) if limit is None else max(1, limit),
            seed=seed & (2**63 - 1),
            logprobs=logprobs,
            keep_special=isinstance(body, ChatRequest)
            and self.dialect.tools == "gemma4",  # its tags are control tokens
            **{k: v for k, v in asked.items() if v is not None},  # type: ignore[arg-type]
        )
        try:
            return params.validate(self._backend.vocab_size)
        except OutriderError as e:
            raise bad(str(e)) from e

    def _fit(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """Both bounds of an answer's length, as far as the context has room behind this prompt."""
        most = max(1, min(params.max_tokens, self._backend.max_context - len(ids)))
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word as it begins a text and as it follows another."""
        ways = [self._encode(word, bos=False)] + ([] if word.startswith(" ") else [self._encode(" " + word, bos=False)])
        return list(dict.fromkeys(tuple(w) for w in ways if w))

    def _allowed(self, ids: Sequence[int] | None) -> AllowedTokens | None:
        if ids is None:
            return None
        if max(ids) >= self._backend.vocab_size:
            raise bad(f"allowed_token_ids: at most {self._backend.vocab_size - 1} is a token id.", "allowed_token_ids")
        return AllowedTokens(ids, self._backend.vocab_size)

    def _job(
        self,
        body: Common,
        prompts: list[list[int]],
        params: SamplingParams,
        parser: Callable[[], Parser],
        stats: bool,
        one_call: bool = False,
        many: int | None = None,
    ) -> Job:
        n = many or body.n or 1
        options = body.outrider or OutriderOptions()
        options = options.model_copy(update={"stats": options.stats or stats})
        k = None if options.draft_tokens == "auto" else options.draft_tokens
        group = uuid.uuid4().hex
        requests = [
            Request(
                f"{group}-{p * n + i}",
                ids,
                replace(fitting, seed=(params.seed + i) & (2**63 - 1)),
                draft_tokens=k,
                drafter=k != 0,
            )
            for p, (ids, fitting) in enumerate((ids, self._fit(params, ids)) for ids in prompts)
            for i in range(n)
        ]
        streamed = body.stream_options or StreamOptions()
        return Job(
            requests, parser, options, params.seed, bool(body.stream),
            bool(streamed.include_usage or streamed.continuous_usage_stats), one_call,
            continuous_usage=bool(streamed.continuous_usage_stats), priority=body.priority or 0,
            return_ids=bool(body.return_token_ids),
        )  # fmt: skip

    def _check_model(self, name: str | None) -> None:
        """With one model served, it need not be named."""
        if name is not None and name != self._settings.model_name:
            message = f"The model '{name[:100]}' does not exist; this server has '{self._settings.model_name}'."
            raise ApiError(404, message, "model", "model_not_found")

    # ---- grammars

    def _format(self, body: Common) -> GrammarSource | None:
        """What the answer must match, by whichever of the fields it was said."""
        formats = body.formats
        if not formats:
            return None
        field, kind, what = formats[0]
        if len(formats) > 1:
            raise bad(f"{field} and {formats[1][0]} both say what the answer must be; send one.", formats[1][0])
        if body.allowed_token_ids is not None:
            raise bad(f"allowed_token_ids can't be combined with {field}.", "allowed_token_ids")
        return GrammarSource(kind, what if isinstance(what, str) else _dumps(what, field), field)

    def _tool_grammar(self, body: ChatRequest, format_: GrammarSource | None = None) -> GrammarSource:
        """Calls of these functions; with a format, those or an answer of that form."""
        functions = [(t.function.name, t.function.parameters or {"type": "object"}) for t in body.tools or []]
        most = 1 if body.parallel_tool_calls is False else MAX_CALLS
        if isinstance(body.tool_choice, NamedTool):
            wanted = body.tool_choice.function.name
            functions, most = [f for f in functions if f[0] == wanted][:1], 1
        payload: dict[str, object] = {"functions": functions, "most": most}
        if format_ is not None and format_.kind != "json_schema":
            raise bad(f"{format_.field} can't be combined with tools; a JSON schema can.", format_.field)
        if format_ is not None:
            payload["format"] = json.loads(format_.payload)
        if self.dialect.tools == "json":
            return GrammarSource("json_calls", _dumps(payload, "tools"), "tools")
        payload["ids"] = {tag: self._token_id(tag) for tag in (GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE)}
        return GrammarSource("gemma_calls", _dumps(payload, "tools"), "tools")

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer.json, self._backend.vocab_size, sorted(self.tokenizer.eos_ids))

    def compiled(self, job: Job) -> Job:
        """The job with its grammar compiled here and now, without bounds: for requests of our own side only."""
        if job.grammar is None:
            return job
        try:
            return job.under(self._compiler.compile(build(job.grammar)))
        except OutriderError as e:
            raise bad(_one_line(e), job.grammar.field) from e

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


def _dumps(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as e:
        raise bad(f"{field}: it nests too deep.", field) from e


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
