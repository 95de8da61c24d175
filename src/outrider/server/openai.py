"""OpenAI's JSON of chat and text completions: whole answers, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from .. import __version__
from ..types import RequestStats
from .answer import LEAST, Answer, AnswerChoice, Delta, Json, Table, ToolCall, sse
from .errors import ApiError
from .output import OutputPart
from .schema import ChatRequest, CompletionRequest

FINGERPRINT = f"outrider-{__version__}"


class OpenAIWire:
    media_type = "text/event-stream"
    still_working = ": still working\n\n"

    def __init__(self, shape: type[ChatRequest] | type[CompletionRequest] = ChatRequest) -> None:
        self._shape = shape
        self._begun: set[int] = set()  # choices that a chunk was made of
        self._offsets: dict[int, int] = {}  # of choices: where in the text the next token's entry begins

    def parse(self, raw: bytes) -> ChatRequest | CompletionRequest:
        return self._shape.model_validate_json(raw)

    def error(self, error: ApiError) -> str:
        return sse(error.body())

    # ---- whole

    def whole(self, answer: Answer) -> Json:
        job, chat = answer.job, isinstance(answer.job.body, ChatRequest)
        choices = [self._choice(answer, i, c) for i, c in enumerate(answer.kept)]
        out: Json = {**_head(answer), "choices": choices, "usage": usage(answer)}
        if chat and job.prompt_logprobs is not None:
            out["prompt_logprobs"] = _prompt_logprobs(answer, answer.choices[0])
        if chat and job.body.return_token_ids:
            out["prompt_token_ids"] = answer.choices[0].prompt
        if job.body.outrider.stats:
            out["outrider"] = statistics([c.stats for c in answer.choices], job.seed)
        return out

    def _choice(self, answer: Answer, index: int, c: AnswerChoice) -> Json:
        job, body = answer.job, answer.job.body
        scored = [*_prompt_scores(answer, c), *c.logprobs]
        out: Json = {"index": index, "finish_reason": c.finish, "logprobs": self._logprobs(answer, c, scored)}
        if isinstance(body, ChatRequest):
            message: Json = {"role": "assistant", "content": c.content or (None if c.calls else ""), "refusal": None}
            if c.reasoning:
                message["reasoning_content"] = c.reasoning
            if c.calls and body.functions is not None:
                message["function_call"] = _function(c.calls[0])
                out["finish_reason"] = "function_call" if c.finish == "tool_calls" else c.finish
            elif c.calls:
                message["tool_calls"] = [{"id": t.id, "type": "function", "function": _function(t)} for t in c.calls]
            out["message"] = message
        else:
            out["text"] = c.echoed if job.max_zero else c.content
        if job.max_zero:
            out["finish_reason"] = "length"
        elif c.stopped_by is not None:
            out["stop_reason"] = c.stopped_by
        if body.return_token_ids:
            out["token_ids"] = [] if job.max_zero else c.ids
        if not isinstance(body, ChatRequest):
            if body.return_token_ids:
                out["prompt_token_ids"] = c.prompt
            if job.prompt_logprobs is not None and not job.echo_logprobs:
                out["prompt_logprobs"] = _prompt_logprobs(answer, c)
        if job.body.outrider.token_kinds:
            out["outrider"] = {"tokens": c.tokens}
        return out

    # ---- chunks

    def opening(self, answer: Answer) -> str:
        """The first chunk of each choice: the role, or the echoed prompt."""
        if isinstance(answer.job.body, ChatRequest):
            first = [self._chunk(answer, c, {"role": "assistant", "content": c.echoed}) for c in answer.choices]
        else:
            echoed = [c for c in answer.choices if c.echoed]
            first = [self._chunk(answer, c, {"content": c.echoed}, _prompt_scores(answer, c)) for c in echoed]
        so_far = {"usage": usage(answer)} if answer.job.body.usage == "continuous" else {}
        return "".join(sse({**chunk, **so_far}) for chunk in first)

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        job, body = answer.job, answer.job.body
        told = Delta(ids=delta.ids) if job.max_zero else delta
        fields = [self._fields(answer, choice, part) for part in told.parts]
        if not fields and (told.logprobs or told.tokens or (body.return_token_ids and told.ids)):
            fields = [{}]  # text is held back (half a character, a possible tag), the tokens are not
        out = []
        for i, new in enumerate(fields):
            first: Json = {"token_ids": told.ids} if body.return_token_ids and i == 0 else {}
            out.append(self._chunk(answer, choice, new, () if i else told.logprobs, None, first))
            if told.tokens and i == 0:
                out[-1]["outrider"] = {"tokens": told.tokens, **told.draft}
        if choice.finish is not None:
            finish = "length" if job.max_zero else choice.finish
            old_call = finish == "tool_calls" and isinstance(body, ChatRequest) and body.functions is not None
            why: Json = {} if choice.stopped_by is None or job.max_zero else {"stop_reason": choice.stopped_by}
            out.append(self._chunk(answer, choice, {}, (), "function_call" if old_call else finish, why))
            if job.body.outrider.stats:
                out[-1]["outrider"] = statistics([choice.stats], job.seed + choice.index)
        if body.usage is not None:
            so_far = usage(answer) if body.usage == "continuous" else None
            out = [{**chunk, "usage": so_far} for chunk in out]
        return "".join(map(sse, out))

    def closing(self, answer: Answer) -> str:
        last: Json = {**_head(answer, ".chunk"), "choices": [], "usage": usage(answer)}
        return (sse(last) if answer.job.body.usage is not None else "") + "data: [DONE]\n\n"

    def _fields(self, answer: Answer, choice: AnswerChoice, part: OutputPart) -> Json:
        if part.kind in ("content", "reasoning"):
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        begins, call = part.kind == "call", choice.calls[part.index]
        function = {"name": call.name, "arguments": ""} if begins else {"arguments": part.text}
        if isinstance(answer.job.body, ChatRequest) and answer.job.body.functions is not None:
            return {"function_call": function}
        named = {"id": call.id, "type": "function"} if begins else {}
        return {"tool_calls": [{"index": part.index, **named, "function": function}]}

    def _chunk(
        self,
        answer: Answer,
        choice: AnswerChoice,
        delta: Json,
        logprobs: Sequence[tuple[int, Table]] = (),
        finish: str | None = None,
        more: Json | None = None,
    ) -> Json:
        chat = isinstance(answer.job.body, ChatRequest)
        scored = self._logprobs(answer, choice, logprobs)
        body: Json = {"index": choice.index, "finish_reason": finish, "logprobs": scored}
        body |= {"delta": delta} if chat else {"text": delta.get("content", "")}
        out: Json = {**_head(answer, ".chunk"), "choices": [body]}
        if answer.job.body.return_token_ids and choice.index not in self._begun:
            (out if chat else body)["prompt_token_ids"] = choice.prompt
        self._begun.add(choice.index)
        body |= more or {}
        return out

    # ---- log-probabilities

    def _logprobs(self, answer: Answer, choice: AnswerChoice, scored: Sequence[tuple[int, Table]]) -> Json | None:
        job, wanted = answer.job, answer.job.body.alternatives
        if job.max_zero:
            scored = scored[: len(choice.prompt)] if job.echo_logprobs else ()
        if wanted is None or not scored:
            return None
        if isinstance(job.body, ChatRequest):
            return {"content": answer.entries(scored), "refusal": None}
        offsets = []
        at = self._offsets.get(choice.index, 0 if job.echo_logprobs else len(choice.echoed))
        for t, _ in scored:
            offsets.append(at)
            at += len(answer.tokenizer.token_bytes(t).decode("utf-8", "replace"))
        self._offsets[choice.index] = at
        top = []
        for t, table in scored:  # vLLM and OpenAI include the chosen token, whatever its rank
            best = [] if table is None else [*answer.top(table, wanted), answer.token(t, table[t])]
            top.append(None if table is None else {e["token"]: e["logprob"] for e in best})
        return {
            "tokens": [answer.token(t, 0.0)["token"] for t, _ in scored],
            "token_logprobs": [None if table is None else max(table[t], LEAST) for t, table in scored],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _head(answer: Answer, chunk: str = "") -> Json:
    chat = isinstance(answer.job.body, ChatRequest)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer.id}",
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": FINGERPRINT,
        "object": f"chat.completion{chunk}" if chat else "text_completion",
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
    """The prompt's own tokens, if the answer includes them."""
    return list(zip(choice.prompt, answer.scores.get(id(choice.prompt), ()))) if answer.job.echo_logprobs else []


def _prompt_logprobs(answer: Answer, choice: AnswerChoice) -> list[Json | None]:
    """vLLM's shape: per token {id: {logprob, rank, decoded_token}}."""
    out: list[Json | None] = []
    for table in answer.scores.get(id(choice.prompt), []):
        best = sorted((table or {}).items(), key=lambda item: -item[1])
        told = [(t, rank, answer.token(t, value)) for rank, (t, value) in enumerate(best, 1)]
        entry: Json = {
            str(t): {"logprob": e["logprob"], "rank": rank, "decoded_token": e["token"]} for t, rank, e in told
        }
        out.append(entry if table is not None else None)
    return out


def statistics(per_choice: Sequence[RequestStats | None], seed: int) -> Json:
    """The object `outrider`: counts are summed over the choices, the time to first token is the shortest."""
    known = [s for s in per_choice if s is not None]
    width = max((i + 1 for s in known for i, d in enumerate(s.drafted_by_position) if d), default=0)

    def sums(*names: str) -> Json:
        return {name: sum(getattr(s, name) for s in known) for name in names}

    cycles, accepted = sum(s.cycles for s in known), sum(s.accepted for s in known)
    return {
        **sums("cycles", "drafted", "accepted", "trees", "branched"),
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
        **sums("prompt_tokens", "cached_tokens", "new_tokens"),
        "seed": seed,
        "drafter_off": next((s.drafter_off for s in known if s.drafter_off), None),
    }
