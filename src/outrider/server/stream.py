"""Events to OpenAI's JSON: whole answers, and the chunks of a stream. Pure: no sockets, no clock but `created`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, cast

from ..engine.engine import Event
from ..engine.step import Request
from ..engine.text import Detokenizer, Tokenizer
from ..types import RequestStats
from .output import OutputPart, Parser, join
from .prepare import Job
from .wire import Json


def single_tokens(event: Event) -> list[Event]:
    """The event as one for each of its tokens; the last one ends the answer if it did."""
    if len(event.tokens) < 2:
        return [event]
    tables: Sequence[dict[int, float] | None] = (
        event.logprobs if event.logprobs is not None else [None] * len(event.tokens)
    )
    parts = [
        replace(
            event,
            tokens=[t],
            kinds=[k],
            texts=[x],
            logprobs=None if p is None else [p],
            finish_reason=None,
            stats=None,
            error=None,
        )
        for t, k, x, p in zip(event.tokens, event.kinds, event.texts, tables)
    ]
    parts[1:] = [replace(part, tree=None, drafts=None) for part in parts[1:]]
    parts[-1] = replace(parts[-1], finish_reason=event.finish_reason, stats=event.stats, error=event.error)
    return parts


Table = dict[int, float] | None  # {token id: logprob}; None for a token that nothing stands before


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: CalledFunction


class TokenEntry(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@dataclass
class Update:
    """What one event adds to an answer."""

    parts: list[OutputPart] = field(default_factory=list)
    deltas: list[Json] = field(default_factory=list)
    logprobs: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)  # [text, kind]
    tree: Json | None = None  # the draft, where it branched
    draft: list[str] = field(default_factory=list)  # the draft, where it did not
    ids: list[int] = field(default_factory=list)


class ChoiceWriter:
    """One answer on its way: takes events, remembers the whole, gives out what is new."""

    def __init__(
        self, index: int, request: Request, parser: Parser, tokenizer: Tokenizer, job: Job, echo: str = ""
    ) -> None:
        self.index = index
        self._tokenizer, self._parser, self._one_call = tokenizer, parser, job.one_call
        self._pieces = Detokenizer(tokenizer, request.prompt) if job.options.token_kinds else None
        self.content, self.reasoning = echo, ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[tuple[int, dict[int, float]]] = []
        self.tokens: list[list[str]] = []  # [text, kind]
        self.new_tokens = 0
        self.ids: list[int] = []
        self.prompt = request.prompt
        self.echoed = echo
        self.offset = 0 if job.echo_logprobs else len(echo)  # where in the text the next token's entry begins
        self.finish: str | None = None
        self.stopped_by: str | int | None = None  # the stop string or the stop token that ended it
        self._stop_ids = frozenset(request.params.stop_token_ids) - frozenset(tokenizer.eos_ids)
        self.begun = False  # a chunk of a stream was made
        self.stats: RequestStats | None = None

    def take(self, event: Event) -> Update:
        """What is new with this event. Where only one call is wanted the answer ends at the token that begins the
        second one."""
        update = Update()
        for part in single_tokens(event) if self._one_call else [event]:
            if self.finish is None:
                self._take(part, update)
        update.deltas = [self._remember(p) for p in join(update.parts)]
        return update

    def _take(self, event: Event, update: Update) -> None:
        parts = self._parser.feed("".join(event.texts))
        self.new_tokens += len(event.tokens)
        self.ids += event.tokens
        update.ids += event.tokens
        if event.finish_reason is not None:
            complete = event.finish_reason == "stop"
            parts += self._parser.finish(complete)
            self.stats = event.stats
            self.finish = "tool_calls" if complete and self._parser.calls else event.finish_reason
            last = event.tokens[-1] if event.tokens and event.tokens[-1] in self._stop_ids else None
            self.stopped_by = (event.stopped_by or last) if self.finish == "stop" else None
        update.parts += self._first_call_only(parts) if self._one_call else parts
        if event.logprobs is not None:
            new = list(zip(event.tokens, event.logprobs))
            self.logprobs += new
            update.logprobs += new
        if self._pieces is not None:
            tokens = [[self._piece(t), kind] for t, kind in zip(event.tokens, event.kinds)]
            self.tokens += tokens
            update.tokens += tokens
            if event.tree is not None and event.tree.chain < len(event.tree.parents):  # a tree may be a line after all
                update.tree = {
                    "tokens": self._texts(event.tree.tokens),
                    "parents": event.tree.parents,
                    "path": event.tree.path,
                }
            elif event.drafts:
                update.draft = self._texts(event.drafts)

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.token_bytes(t).decode("utf-8", "replace") for t in tokens]

    @property
    def mean_logprob(self) -> float:
        return sum(table[t] for t, table in self.logprobs) / max(1, len(self.logprobs))

    def _piece(self, token: int) -> str:
        assert self._pieces is not None
        return "" if token in self._tokenizer.eos_ids else self._pieces.push([token])

    def _first_call_only(self, parts: list[OutputPart]) -> list[OutputPart]:
        kept = [p for p in parts if p.kind not in ("call", "args") or p.index == 0]
        if len(kept) < len(parts) and self.finish is None:
            self.finish = "tool_calls"  # the second call began: enough
        return kept

    def _remember(self, part: OutputPart) -> Json:
        if part.kind == "content":
            self.content += part.text
            return {"content": part.text}
        if part.kind == "reasoning":
            self.reasoning += part.text
            return {"reasoning_content": part.text}
        if part.kind == "call":
            id = f"call_{secrets.token_hex(12)}"
            self.calls.append({"id": id, "type": "function", "function": {"name": part.text, "arguments": ""}})
            return {
                "tool_calls": [
                    {
                        "index": part.index,
                        "id": id,
                        "type": "function",
                        "function": {"name": part.text, "arguments": ""},
                    }
                ]
            }
        self.calls[part.index]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


class Writer:
    """Builds the answers of one call. `chat` or `/v1/completions`."""

    def __init__(self, job: Job, tokenizer: Tokenizer, model: str, chat: bool, fingerprint: str) -> None:
        self._job, self._tokenizer, self._chat = job, tokenizer, chat
        kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._object, self._chunk_object = kind, kind + ".chunk" if chat else kind
        echoes = job.echoes or ("",) * len(job.requests)
        self.choices = [
            ChoiceWriter(i, r, job.parser(), tokenizer, job, e) for i, (r, e) in enumerate(zip(job.requests, echoes))
        ]
        self._by_id = {r.id: c for r, c in zip(job.requests, self.choices)}
        self.scores: dict[int, list[Table]] = {}  # by the prompt's identity: what the model thought of its tokens

    def choice(self, id: str) -> ChoiceWriter:
        return self._by_id[id]

    @property
    def scored_tokens(self) -> int:
        """Tokens that are told with their log-probabilities."""
        return sum(len(c.logprobs) for c in self.choices) + sum(map(len, self.scores.values()))

    # ---- whole

    def whole(self) -> Json:
        told = [self._choice(i, c) for i, c in enumerate(self._kept())]
        out: Json = {**self._head, "object": self._object, "choices": told, "usage": self.usage()}
        if self._chat and self._job.prompt_logprobs is not None:
            out["prompt_logprobs"] = self._prompt_logprobs(self.choices[0])
        if self._chat and self._job.return_ids:
            out["prompt_token_ids"] = self.choices[0].prompt
        if self._job.options.stats:
            out["outrider"] = statistics([c.stats for c in self.choices], self._job.seed)
        return out

    def _kept(self) -> list[ChoiceWriter]:
        """Of each prompt's answers the likeliest, by the mean of their tokens' log-probabilities."""
        keep, of = self._job.best
        if keep == of:
            return self.choices
        groups = [self.choices[i : i + of] for i in range(0, len(self.choices), of)]
        return [c for group in groups for c in sorted(group, key=lambda c: -c.mean_logprob)[:keep]]

    def _choice(self, index: int, c: ChoiceWriter) -> Json:
        out: Json = {
            "index": index,
            "finish_reason": c.finish,
            "logprobs": self._logprobs(c, [*self._scored(c), *c.logprobs]),
        }
        if self._chat:
            message: Json = {"role": "assistant", "content": c.content or (None if c.calls else ""), "refusal": None}
            if c.reasoning:
                message["reasoning_content"] = c.reasoning
            if c.calls and self._job.functions:
                message["function_call"] = c.calls[0]["function"]
                out["finish_reason"] = "function_call" if c.finish == "tool_calls" else c.finish
            elif c.calls:
                message["tool_calls"] = c.calls
            out["message"] = message
        else:
            out["text"] = c.echoed if self._job.max_zero else c.content
        if self._job.max_zero:
            out["finish_reason"] = "length"
        elif c.stopped_by is not None:
            out["stop_reason"] = c.stopped_by
        if self._job.return_ids:
            out["token_ids"] = [] if self._job.max_zero else c.ids
            if not self._chat:
                out["prompt_token_ids"] = c.prompt
        if not self._chat and self._job.prompt_logprobs is not None and not self._job.echo_logprobs:
            out["prompt_logprobs"] = self._prompt_logprobs(c)
        if self._job.options.token_kinds:
            out["outrider"] = {"tokens": c.tokens}
        return out

    # ---- chunks

    def opening(self) -> list[Json]:
        """The first chunk of each choice: the role, or the echoed prompt."""
        if self._chat:
            first: list[Json] = [self._chunk(c, {"role": "assistant", "content": c.echoed}) for c in self.choices]
        else:
            first = [self._chunk(c, {"content": c.echoed}, self._scored(c)) for c in self.choices if c.echoed]
        return [{**chunk, "usage": self.usage()} for chunk in first] if self._job.continuous_usage else first

    def chunks(self, event: Event) -> list[Json]:
        choice = self.choice(event.id)
        if choice.finish is not None:
            return []
        update = choice.take(event)
        deltas, logprobs, tokens = update.deltas, update.logprobs, update.tokens
        if self._job.max_zero:
            deltas, logprobs, tokens = [], [], []
        if not deltas and (logprobs or tokens or (self._job.return_ids and update.ids)):
            deltas = [{}]  # text is held back (half a character, a possible tag), the tokens are not
        out = []
        for i, delta in enumerate(deltas):
            chunk = self._chunk(choice, delta, logprobs if i == 0 else None)
            if tokens and i == 0:
                draft = (
                    {"tree": update.tree}
                    if update.tree is not None
                    else {"draft": update.draft}
                    if update.draft
                    else {}
                )
                chunk["outrider"] = {"tokens": tokens, **draft}
            if self._job.return_ids and i == 0:
                cast(list[Json], chunk["choices"])[0]["token_ids"] = update.ids
            out.append(chunk)
        if choice.finish is not None:
            finish = "length" if self._job.max_zero else choice.finish
            last = self._chunk(
                choice, {}, finish="function_call" if self._job.functions and finish == "tool_calls" else finish
            )
            if choice.stopped_by is not None and not self._job.max_zero:
                cast(list[Json], last["choices"])[0]["stop_reason"] = choice.stopped_by
            if self._job.options.stats:
                last["outrider"] = statistics([choice.stats], self._job.seed + choice.index)
            out.append(last)
        if self._job.include_usage:
            for chunk in out:
                chunk["usage"] = self.usage() if self._job.continuous_usage else None
        return out

    def closing(self) -> list[Json]:
        if not self._job.include_usage:
            return []
        return [{**self._head, "object": self._chunk_object, "choices": [], "usage": self.usage()}]

    def _chunk(
        self,
        choice: ChoiceWriter,
        delta: Json,
        logprobs: Sequence[tuple[int, Table]] | None = None,
        finish: str | None = None,
    ) -> Json:
        body: Json = {
            "index": choice.index,
            "finish_reason": finish,
            "logprobs": self._logprobs(choice, logprobs or []),
        }
        if self._chat:
            calls = delta.get("tool_calls")
            body["delta"] = (
                {"function_call": cast(list[Json], calls)[0]["function"]} if self._job.functions and calls else delta
            )
        else:
            body["text"] = delta.get("content", "")
        out: Json = {**self._head, "object": self._chunk_object, "choices": [body]}
        if self._job.return_ids and not choice.begun:
            (out if self._chat else body)["prompt_token_ids"] = choice.prompt
        choice.begun = True
        return out

    # ---- parts of both

    def usage(self) -> Json:
        new = 0 if self._job.max_zero else sum(c.new_tokens for c in self.choices)
        prompt = self._job.prompt_tokens
        cached = min((c.stats.cached_tokens for c in self.choices if c.stats is not None), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _scored(self, choice: ChoiceWriter) -> list[tuple[int, Table]]:
        """The prompt's own tokens, where they are told with the answer's."""
        scores = self.scores.get(id(choice.prompt)) if self._job.echo_logprobs else None
        return list(zip(choice.prompt, scores)) if scores is not None else []

    def _prompt_logprobs(self, choice: ChoiceWriter) -> list[Json | None]:
        """vLLM's shape: per token {id: {logprob, rank, decoded_token}}."""
        out: list[Json | None] = []
        for table in self.scores.get(id(choice.prompt), []):
            entry: Json = {}
            for rank, (token, value) in enumerate(sorted((table or {}).items(), key=lambda item: -item[1]), 1):
                entry[str(token)] = {
                    "logprob": max(value, -9999.0),
                    "rank": rank,
                    "decoded_token": self._token(token, value)["token"],
                }
            out.append(entry if table is not None else None)
        return out

    def _logprobs(self, choice: ChoiceWriter, entries: Sequence[tuple[int, Table]]) -> Json | None:
        wanted = self._job.requests[0].params.logprobs
        if self._job.max_zero and not self._job.echo_logprobs:
            return None
        if self._job.max_zero:
            entries = entries[: len(choice.prompt)]
        if wanted is None or self._job.hide_logprobs or not entries:
            return None
        if self._chat:
            content = [
                {**self._token(t, table[t]), "top_logprobs": self._top(table, wanted)}
                for t, table in entries
                if table is not None
            ]
            return {"content": content, "refusal": None}
        tokens = [self._token(t, 0.0)["token"] for t, _ in entries]
        offsets = []
        for t, _ in entries:
            offsets.append(choice.offset)
            choice.offset += len(self._tokenizer.token_bytes(t).decode("utf-8", "replace"))
        # vLLM and OpenAI tell the chosen token among them, wherever it stands.
        top = [
            None
            if table is None
            else {e["token"]: e["logprob"] for e in [*self._top(table, wanted), self._token(t, table[t])]}
            for t, table in entries
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [None if table is None else max(table[t], -9999.0) for t, table in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, table: dict[int, float], wanted: int) -> list[TokenEntry]:
        best = sorted(table.items(), key=lambda item: -item[1])[:wanted]
        return [self._token(t, v) for t, v in best]

    def _token(self, token: int, logprob: float) -> TokenEntry:
        raw = self._tokenizer.token_bytes(token)
        text = f"token_id:{token}" if self._job.tokens_as_ids else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}  # JSON has no -inf


def statistics(per_choice: Sequence[RequestStats | None], seed: int) -> Json:
    """The object `outrider`: counts are summed over the choices, the time to first token is the first choice's to
    speak."""
    known = [s for s in per_choice if s is not None]
    width = max((i + 1 for s in known for i, d in enumerate(s.drafted_by_position) if d), default=0)
    cycles, accepted = sum(s.cycles for s in known), sum(s.accepted for s in known)
    off = next((s.drafter_off for s in known if s.drafter_off), None)
    return {
        "cycles": cycles,
        "drafted": sum(s.drafted for s in known),
        "accepted": accepted,
        "trees": sum(s.trees for s in known),
        "branched": sum(s.branched for s in known),
        "tokens_per_cycle": round((accepted + cycles) / cycles, 4) if cycles else 0.0,
        "by_position": [
            {
                "drafted": sum(s.drafted_by_position[i] for s in known),
                "accepted": sum(s.accepted_by_position[i] for s in known),
            }
            for i in range(width)
        ],
        "prefill_ms": round(1e3 * max((s.prefill_s for s in known), default=0.0), 3),
        "decode_ms": round(1e3 * max((s.decode_s for s in known), default=0.0), 3),
        "ttft_ms": round(1e3 * min((s.ttft_s for s in known), default=0.0), 3),
        "decode_tps": round(sum(s.decode_tps for s in known), 3),
        "prompt_tokens": sum(s.prompt_tokens for s in known),
        "cached_tokens": sum(s.cached_tokens for s in known),
        "new_tokens": sum(s.new_tokens for s in known),
        "seed": seed,
        "drafter_off": off,
    }
