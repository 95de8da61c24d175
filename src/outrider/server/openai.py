"""OpenAI's JSON of chat and text completions: whole answers, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .. import __version__
from ..types import RequestStats
from .answer import MIN_LOGPROB, Answer, AnswerChoice, Delta, Json, Scored, Table, ToolCall, Wire, compact_json
from .output import OutputPart
from .schema import ChatRequest, CompletionRequest

FINGERPRINT = f"outrider-{__version__}"


class OpenAIWire(Wire):
    def __init__(self, shape: type[ChatRequest] | type[CompletionRequest] = ChatRequest) -> None:
        self._shape = shape
        self._chat = shape is ChatRequest
        self._old_calls = False  # the request has `functions`, the form before tools
        self._head_text = ""  # JSON of the fields common to all chunks, without the closing brace
        self._begun: set[int] = set()  # choices with a chunk
        self._offsets: dict[int, int] = {}  # by choice: offset of the next token in the text

    def parse(self, raw: bytes) -> ChatRequest | CompletionRequest:
        body = self._shape.model_validate_json(raw)
        self._old_calls = isinstance(body, ChatRequest) and body.functions is not None
        return body

    # ---- whole

    def whole(self, answer: Answer) -> Json:
        job = answer.job
        choices = [self._whole_choice(answer, i, c) for i, c in enumerate(answer.likeliest)]
        out: Json = {**self._head(answer), "choices": choices, "usage": usage(answer)}
        if self._chat:
            out |= _of_prompt(answer, answer.choices[0])
        if job.body.outrider.stats:
            out["outrider"] = statistics([c.stats for c in answer.choices], job.seed)
        return out

    def _whole_choice(self, answer: Answer, index: int, c: AnswerChoice) -> Json:
        job = answer.job
        body = answer.job.body
        if self._chat:
            message: Json = {"role": "assistant", "content": c.content or (None if c.calls else ""), "refusal": None}
            if c.reasoning:
                message["reasoning_content"] = c.reasoning
            if c.calls and self._old_calls:
                message["function_call"] = _function(c.calls[0])
            elif c.calls:
                message["tool_calls"] = [{"id": t.id, "type": "function", "function": _function(t)} for t in c.calls]
            said: Json = {"index": index, "message": message}
        else:
            text = c.echoed if job.max_zero else c.content
            said = {"index": index, "text": text, **_of_prompt(answer, c)}
        scored = [*_prompt_scores(answer, c), *c.logprobs]
        out = {**self._choice(answer, c, scored=scored, said=said), **self._end(answer, c)}
        if body.return_token_ids:
            out["token_ids"] = [] if job.max_zero else c.ids
        if body.outrider.token_kinds:
            out["outrider"] = {"tokens": c.tokens}
        return out

    # ---- chunks

    def opening(self, answer: Answer) -> str:
        """The first chunk of each choice: the role, or the echoed prompt."""
        if self._chat:
            first = [self._chunk(answer, c, {"role": "assistant", "content": c.echoed}) for c in answer.choices]
        else:
            echoed = [c for c in answer.choices if c.echoed]
            first = [self._chunk(answer, c, {"content": c.echoed}, scored=_prompt_scores(answer, c)) for c in echoed]
        return self._events(answer, first)

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        job = answer.job
        body = answer.job.body
        if job.max_zero:
            delta = Delta(ids=delta.ids)
        fields = [self._fields(choice, part) for part in delta.parts]
        if not fields and (delta.logprobs or delta.tokens or (body.return_token_ids and delta.ids)):
            fields = [{}]  # text may be held back (half a character, a possible tag); its tokens are sent
        out = []
        for i, new in enumerate(fields):
            first: Json = {"token_ids": delta.ids} if body.return_token_ids and i == 0 else {}
            out.append(self._chunk(answer, choice, new, scored=() if i else delta.logprobs, more=first))
            if delta.tokens and i == 0:
                out[-1]["outrider"] = {"tokens": delta.tokens, **delta.draft}
        if choice.finish is not None:
            out.append(self._chunk(answer, choice, {}, more=self._end(answer, choice)))
            if body.outrider.stats:
                out[-1]["outrider"] = statistics([choice.stats], job.seed + choice.index)
        return self._events(answer, out)

    def closing(self, answer: Answer) -> str:
        last: Json = {"choices": [], "usage": usage(answer)}
        return (self._event(answer, last) if answer.job.body.usage is not None else "") + "data: [DONE]\n\n"

    def _fields(self, choice: AnswerChoice, part: OutputPart) -> Json:
        if part.kind in ("content", "reasoning"):
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        begins = part.kind == "call"
        call = choice.calls[part.index]
        function = {"name": call.name, "arguments": ""} if begins else {"arguments": part.text}
        if self._old_calls:
            return {"function_call": function}
        named = {"id": call.id, "type": "function"} if begins else {}
        return {"tool_calls": [{"index": part.index, **named, "function": function}]}

    def _chunk(
        self, answer: Answer, choice: AnswerChoice, delta: Json, scored: Scored = (), more: Json | None = None
    ) -> Json:
        """A chunk without the fields common to all chunks of an answer."""
        said: Json = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        body = {**self._choice(answer, choice, scored=scored, said=said), **(more or {})}
        out: Json = {"choices": [body]}
        if choice.index not in self._begun:
            (out if self._chat else body).update(_of_prompt(answer, choice))
        self._begun.add(choice.index)
        return out

    def _events(self, answer: Answer, chunks: Sequence[Json]) -> str:
        wanted = answer.job.body.usage
        so_far: Json = {}
        if wanted is not None:
            so_far["usage"] = usage(answer) if wanted == "continuous" else None
        return "".join(self._event(answer, {**chunk, **so_far}) for chunk in chunks)

    def _event(self, answer: Answer, chunk: Json) -> str:
        """One event of the stream. The common fields are encoded once per answer."""
        if not self._head_text:
            self._head_text = compact_json(self._head(answer, ".chunk")).removesuffix("}")
        return f"data: {self._head_text},{compact_json(chunk)[1:]}\n\n"

    # ---- both

    def _head(self, answer: Answer, chunk: str = "") -> Json:
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer.id}",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": FINGERPRINT,
            "object": f"chat.completion{chunk}" if self._chat else "text_completion",
        }

    def _choice(self, answer: Answer, choice: AnswerChoice, scored: Scored, said: Json) -> Json:
        logprobs = self._logprobs(answer, choice, scored)
        return {"index": choice.index, "finish_reason": None, "logprobs": logprobs, **said}

    def _end(self, answer: Answer, choice: AnswerChoice) -> Json:
        if answer.job.max_zero:
            return {"finish_reason": "length"}
        why = {} if choice.stopped_by is None else {"stop_reason": choice.stopped_by}
        old_call = self._old_calls and choice.finish == "tool_calls"
        return {"finish_reason": "function_call" if old_call else choice.finish, **why}

    # ---- log-probabilities

    def _logprobs(self, answer: Answer, choice: AnswerChoice, scored: Scored) -> Json | None:
        job = answer.job
        wanted = answer.job.body.alternatives
        if job.max_zero:
            scored = scored[: len(choice.prompt)] if job.echo_logprobs else ()
        if wanted is None or not scored:
            return None
        if self._chat:
            return {"content": answer.entries(scored), "refusal": None}
        at = self._offsets.get(choice.index, 0 if job.echo_logprobs else len(choice.echoed))
        widths = (len(answer.tokenizer.token_bytes(t).decode("utf-8", "replace")) for t, _ in scored)
        *offsets, self._offsets[choice.index] = accumulate(widths, initial=at)
        top = []
        for t, table in scored:  # the chosen token is included whatever its rank, as in vLLM and OpenAI
            best = [] if table is None else [*answer.top(table, wanted), answer.token(t, table[t])]
            top.append(None if table is None else {e["token"]: e["logprob"] for e in best})
        return {
            "tokens": [answer.token(t, 0.0)["token"] for t, _ in scored],
            "token_logprobs": [None if table is None else max(table[t], MIN_LOGPROB) for t, table in scored],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _function(call: ToolCall) -> Json:
    return {"name": call.name, "arguments": call.arguments}


def usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.new_tokens,
        "total_tokens": answer.prompt_tokens + answer.new_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _prompt_scores(answer: Answer, choice: AnswerChoice) -> list[tuple[int, Table]]:
    """Tokens of the prompt with log-probabilities, if the answer includes them."""
    return list(zip(choice.prompt, answer.scores.get(id(choice.prompt), ()))) if answer.job.echo_logprobs else []


def _of_prompt(answer: Answer, choice: AnswerChoice) -> Json:
    """Fields about a prompt, sent once. Log-probabilities are in vLLM's form: {id: {logprob, rank, decoded_token}}."""
    job = answer.job
    out: Json = {"prompt_token_ids": choice.prompt} if job.body.return_token_ids else {}
    if job.prompt_logprobs is None or job.echo_logprobs:
        return out

    def entry(table: dict[int, float]) -> Json:
        best = [(str(t), answer.token(t, table[t])) for t in sorted(table, key=lambda t: -table[t])]
        ranked = enumerate(best, 1)
        return {t: {"logprob": e["logprob"], "rank": rank, "decoded_token": e["token"]} for rank, (t, e) in ranked}

    scores = answer.scores.get(id(choice.prompt), [])
    return {**out, "prompt_logprobs": [None if table is None else entry(table) for table in scores]}


def statistics(per_choice: Sequence[RequestStats | None], seed: int) -> Json:
    """The object `outrider`. Counts are summed over the choices; the time to first token is the shortest."""
    known = [s for s in per_choice if s is not None]

    def sums(*names: str) -> Json:
        return {name: sum(getattr(s, name) for s in known) for name in names}

    def by_position(name: str) -> list[int]:
        return [sum(counts) for counts in zip(*(getattr(s, f"{name}_by_position") for s in known))]

    cycles = sum(s.cycles for s in known)
    accepted = sum(s.accepted for s in known)
    positions = zip(by_position("drafted"), by_position("accepted"))
    return {
        **sums("cycles", "drafted", "accepted", "trees", "branched"),
        "tokens_per_cycle": round((accepted + cycles) / cycles, 4) if cycles else 0.0,
        "by_position": [{"drafted": d, "accepted": a} for d, a in positions if d],
        "prefill_ms": round(1e3 * max((s.prefill_s for s in known), default=0.0), 3),
        "decode_ms": round(1e3 * max((s.decode_s for s in known), default=0.0), 3),
        "ttft_ms": round(1e3 * min((s.ttft_s for s in known), default=0.0), 3),
        "decode_tps": round(sum(s.decode_tps for s in known), 3),
        **sums("prompt_tokens", "cached_tokens", "new_tokens"),
        "seed": seed,
        "drafter_off": next((s.drafter_off for s in known if s.drafter_off), None),
    }
