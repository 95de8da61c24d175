"""An answer in progress, independent of the protocol.

A `Job` is the request. An `Answer` has one choice per sequence of the job, and a choice turns the engine's events into
increments (`Delta`). A protocol is a `Wire`: it turns a body into our request and renders the answer.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..engine.engine import Event
from ..engine.step import Request
from ..engine.text import Detokenizer, Tokenizer
from ..types import RequestStats
from .errors import ApiError, read
from .grammar_source import GrammarSource
from .output import OutputPart, Parser, join
from .schema import ChatRequest, CompletionRequest

Json = dict[str, object]
Table = dict[int, float] | None  # {token id: logprob}; None for the first token, which has no context
Scored = Sequence[tuple[int, Table]]  # tokens with their log-probabilities
MIN_LOGPROB = -9999.0  # JSON has no -inf
JSON_TYPE = "application/json"
CURL_TYPE = "application/x-www-form-urlencoded"  # the content type that `curl -d` sends with any body


@dataclass(frozen=True)
class Job:
    """One call: its engine requests (choice i is requests[i]) and how to read their answers."""

    body: ChatRequest | CompletionRequest
    requests: list[Request]
    parser: Callable[[], Parser]
    seed: int
    candidates: int = 1  # answers computed per prompt (best_of); the likeliest `n` are returned
    echoes: tuple[str, ...] = ()  # per request: text of the prompt that the answer repeats
    grammar: GrammarSource | None = None  # the grammar of the answers, compiled before the job runs

    @property
    def max_zero(self) -> bool:
        """True for max_tokens: 0 of /v1/completions, which only scores the prompt."""
        return isinstance(self.body, CompletionRequest) and self.body.limit == 0

    @property
    def one_call(self) -> bool:
        body = self.body
        return isinstance(body, ChatRequest) and (body.parallel_tool_calls is False or body.functions is not None)

    @property
    def echo_logprobs(self) -> bool:
        """True if the answer includes the prompt's tokens with their log-probabilities."""
        body = self.body
        return isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives reported for each token of a scored prompt."""
        echoed = self.body.alternatives if self.echo_logprobs else None
        return echoed if self.body.prompt_logprobs is None else self.body.prompt_logprobs

    @property
    def prompts(self) -> list[list[int]]:
        """Distinct prompts of the requests; several answers may share one."""
        return list({id(r.prompt): r.prompt for r in self.requests}.values())


@dataclass
class ToolCall:
    name: str
    arguments: str = ""  # JSON text
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass
class Delta:
    """Increment that one event adds to a choice."""

    parts: list[OutputPart] = field(default_factory=list)
    logprobs: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)  # [text, kind]
    draft: Json = field(default_factory=dict)  # {"tree": ...} for a draft with branches, else {"draft": ...}
    ids: list[int] = field(default_factory=list)


class AnswerChoice:
    """Collects the events of one sequence and returns the increment of each."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer) -> None:
        request = job.requests[index]
        self.index = index
        self.prompt = request.prompt
        self._tokenizer = tokenizer
        self._parser = job.parser()
        self._one_call = job.one_call
        self._pieces = Detokenizer(tokenizer, request.prompt) if job.body.outrider.token_kinds else None
        self.echoed = job.echoes[index] if job.echoes else ""
        self.content = self.echoed
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[tuple[int, dict[int, float]]] = []
        self.tokens: list[list[str]] = []  # [text, kind]
        self.ids: list[int] = []
        self.finish: str | None = None
        self.stopped_by: str | int | None = None  # the stop string or token that ended the answer
        self._stop_ids = frozenset(request.params.stop_token_ids) - frozenset(tokenizer.eos_ids)
        self.stats: RequestStats | None = None

    def take(self, event: Event) -> Delta:
        """If only one call is allowed, the answer ends at the token that begins the second one."""
        tokens = event.tokens
        parts = list[OutputPart]()
        parser = self._parser
        for i, text in enumerate(event.texts if self._one_call else ["".join(event.texts)], 1):
            parts += parser.feed(text)
            if self._one_call and parser.calls > 1:
                tokens = event.tokens[:i]
                break
        if event.finish_reason is not None and len(tokens) == len(event.tokens):
            complete = event.finish_reason == "stop"
            parts += parser.finish(complete)
            self.stats = event.stats
            self.finish = "tool_calls" if complete and parser.calls else event.finish_reason
            last = tokens[-1] if tokens and tokens[-1] in self._stop_ids else None
            self.stopped_by = (event.stopped_by or last) if self.finish == "stop" else None
        elif self._one_call and parser.calls > 1:
            self.finish = "tool_calls"
        if self._one_call:
            parts = [p for p in parts if p.index == 0 or p.kind not in ("call", "args")]
        delta = Delta(join(parts), list(zip(tokens, event.logprobs or ())), ids=tokens)
        if self._pieces is not None:
            tree = event.tree
            shown = self._pieces
            ends = self._tokenizer.eos_ids
            delta.tokens = [["" if t in ends else shown.push([t]), kind] for t, kind in zip(tokens, event.kinds)]
            if tree is not None and tree.chain < len(tree.parents):  # a tree without branches is a chain
                delta.draft = {"tree": {"tokens": self._texts(tree.tokens), "parents": tree.parents, "path": tree.path}}
            elif event.drafts:
                delta.draft = {"draft": self._texts(event.drafts)}
        for p in delta.parts:
            if p.kind == "content":
                self.content += p.text
            elif p.kind == "reasoning":
                self.reasoning += p.text
            elif p.kind == "call":
                self.calls.append(ToolCall(p.text))
            else:
                self.calls[p.index].arguments += p.text
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens
        self.ids += tokens
        return delta

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.token_bytes(t).decode("utf-8", "replace") for t in tokens]

    @property
    def parts(self) -> list[OutputPart]:
        """The whole answer so far, as parts."""
        calls = [(OutputPart("call", c.name, i), OutputPart("args", c.arguments, i)) for i, c in enumerate(self.calls)]
        said = [OutputPart("reasoning", self.reasoning), OutputPart("content", self.content)]
        return join([*said, *itertools.chain(*calls)])

    @property
    def mean_logprob(self) -> float:
        return sum(table[t] for t, table in self.logprobs) / max(1, len(self.logprobs))


class Answer:
    """All choices of one call."""

    def __init__(self, job: Job, tokenizer: Tokenizer, model: str) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.model = model
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.choices = [AnswerChoice(i, job, tokenizer) for i in range(len(job.requests))]
        self._by_id = {r.id: c for r, c in zip(job.requests, self.choices)}
        self.scores: dict[int, list[Table]] = {}  # by the prompt's identity: log-probabilities of its tokens

    def take(self, event: Event) -> tuple[AnswerChoice, Delta] | None:
        """Returns an event's choice and its increment; None if the choice has already ended."""
        choice = self._by_id[event.id]
        return (choice, choice.take(event)) if choice.finish is None else None

    @property
    def finished(self) -> bool:
        return all(c.finish is not None for c in self.choices)

    @property
    def likeliest(self) -> list[AnswerChoice]:
        """The `n` likeliest answers of each prompt, by mean log-probability of their tokens."""
        num_wanted = self.job.body.n or 1
        num_candidates = self.job.candidates
        if num_wanted == num_candidates:
            return self.choices
        out: list[AnswerChoice] = []
        for start in range(0, len(self.choices), num_candidates):
            candidates = self.choices[start : start + num_candidates]
            out += sorted(candidates, key=lambda c: -c.mean_logprob)[:num_wanted]
        return out

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.job.prompts))

    @property
    def new_tokens(self) -> int:
        return 0 if self.job.max_zero else sum(len(c.ids) for c in self.choices)

    @property
    def cached_tokens(self) -> int:
        return min((c.stats.cached_tokens for c in self.choices if c.stats is not None), default=0)

    @property
    def scored_tokens(self) -> int:
        """Number of tokens with log-probabilities."""
        return sum(len(c.logprobs) for c in self.choices) + sum(map(len, self.scores.values()))

    # ---- log-probabilities in the form shared by OpenAI's chat, Ollama's and the Responses API

    def entries(self, scored: Scored) -> list[Json]:
        wanted = self.job.body.alternatives
        if wanted is None:
            return []
        known = [(t, table) for t, table in scored if table is not None]
        return [{**self.token(t, table[t]), "top_logprobs": self.top(table, wanted)} for t, table in known]

    def top(self, table: dict[int, float], wanted: int) -> list[Json]:
        return [self.token(t, v) for t, v in sorted(table.items(), key=lambda item: -item[1])[:wanted]]

    def token(self, token: int, logprob: float) -> Json:
        raw = self.tokenizer.token_bytes(token)
        as_id = self.job.body.return_tokens_as_token_ids
        text = f"token_id:{token}" if as_id else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


class Wire(Protocol):
    """Parses requests and renders answers, streams and errors of one protocol. Every call has its own instance, which
    may keep state."""

    media_type: str = "text/event-stream"
    whole_type: str = JSON_TYPE  # content type of an answer that is not streamed
    still_working: str = ": still working\n\n"  # heartbeat in a silent stream

    def parse(self, raw: bytes) -> ChatRequest | CompletionRequest: ...
    def whole(self, answer: Answer) -> Json: ...
    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str: ...
    def closing(self, answer: Answer) -> str: ...

    def check_type(self, kind: str, from_browser: bool) -> None:
        """Refuses a body of the wrong content type before it is read. from_browser: a web page sent it; only curl may
        leave the type at its default."""
        is_json = kind == JSON_TYPE or kind.endswith("+json")
        if not is_json and (kind != CURL_TYPE or from_browser):
            message = "The body must be JSON: send 'Content-Type: application/json'."
            raise ApiError(415, message, code="unsupported_media_type")

    def read(self, raw: bytes) -> ChatRequest | CompletionRequest:
        """Validates a body; raises `ApiError` if it is wrong."""
        return read(raw, self.parse)

    def body(self, answer: Answer) -> bytes:
        """Encodes an answer that is sent in one piece."""
        return encoded(self.whole(answer))

    def opening(self, answer: Answer) -> str:
        return ""

    def error(self, error: ApiError) -> str:
        return sse(error.body())


def encoded(value: object) -> bytes:
    """Encodes as JSON, large lists in pieces: the encoder holds the interpreter until one call of it is done."""
    return "".join(_pieces(value, 5)).encode()


def _pieces(value: object, depth: int) -> Iterator[str]:
    named = value if isinstance(value, dict) else None
    inner: Collection[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    if depth == 0 or not any(isinstance(v, dict | list) for v in inner):
        yield json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return
    before = "[" if named is None else "{"
    for name, v in zip(itertools.repeat("") if named is None else named, inner):
        yield before if named is None else f"{before}{json.dumps(name, ensure_ascii=False)}:"
        yield from _pieces(v, depth - 1)
        before = ","
    yield "]" if named is None else "}"


def sse(data: Json, event: str | None = None) -> str:
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {compact_json(data)}\n\n"


def compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments_of(text: str) -> object:
    """A call's arguments as a JSON object: NaN becomes null, a lone surrogate a ?. Empty if the call was cut off."""
    try:
        arguments = json.loads(text or "{}", parse_constant=lambda word: None)
        return json.loads(json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
