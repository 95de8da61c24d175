"""From a validated body to engine requests: messages to a prompt, fields to sampling parameters, formats to grammars.

Runs off the event loop (long prompts take a while to tokenise). Everything that can be wrong with a request is found
here and raised as an `ApiError`, so that a request which reaches the engine runs.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from pydantic import JsonValue

from ..engine.chat_template import reserved
from ..engine.grammar import AllowedTokens
from ..engine.soft_prompt import continued
from ..engine.special_tokens import ChatPrompt
from ..engine.step import Request
from ..engine.text import LONG_TEXT
from ..types import OutriderError, SamplingParams
from .answer import Job
from .dialect import Dialect, Infill, in_turns, spell_out_tools
from .errors import ContextOverflow, bad, bad_if, check_size
from .grammar_source import MAX_CALLS, GrammarSource
from .model_info import ServedModel
from .output import Parser, ParserChain, PlainText, loaded
from .reasoning import Thoughts
from .request_media import check_media, media_of, template_parts, with_soft_tokens
from .schema import ChatRequest, Common, CompletionRequest, Message, Tool
from .settings import ServerSettings
from .spellings import UNCHANGED
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, GEMMA_RESPONSE, GemmaCalls, JsonCalls
from .transcription import TranscriptionRequest, transcription_job


class Preparer:
    def __init__(self, backend: ServedModel, settings: ServerSettings) -> None:
        self.backend = backend
        self._settings = settings
        self.name = settings.model_name
        self.tokenizer = backend.tokenizer
        self._longest_token = max(map(len, self.tokenizer.backend.get_vocab()), default=1)
        self.dialect = Dialect.of(backend.tokenizer)
        self._tag = self.tokenizer.backend.token_to_id
        # Gemma 4 hands over to the tool with this token
        response_token = self._tag(GEMMA_RESPONSE)
        self._hand_over = () if response_token is None else (response_token,)
        self.infill = Infill.of(self.tokenizer)

    def job(self, body: ChatRequest | CompletionRequest) -> Job:
        if isinstance(body, TranscriptionRequest):
            return transcription_job(self, body)
        return self._chat(body) if isinstance(body, ChatRequest) else self._completion(body)

    def _chat(self, body: ChatRequest) -> Job:
        forced = body.uses_tools and body.tool_choice not in (None, "auto")
        grammar = format_ = self._format(body)
        prompt = self._prompt(body)
        ids = self.fitting(prompt.ids, "messages", self.kept(body.truncate_prompt_tokens, body.truncation_side))
        if forced or (body.uses_tools and format_ is not None):
            grammar = self._tool_grammar(body, format_ if not forced else None)
        if grammar is not None and (body.min_tokens or body.ignore_eos):
            field = "min_tokens" if body.min_tokens else "ignore_eos"
            raise bad(f"{field} can't be combined with {grammar.field}.", field)
        tail = prompt.written[-64:]

        def parser() -> Parser:
            thoughts = Thoughts(self.dialect.thoughts, tail)
            if not body.uses_tools:
                return thoughts if format_ is None else PlainText()
            return ParserChain(thoughts, GemmaCalls() if self.dialect.tools == "gemma4" else JsonCalls())

        params = self.sampling_params(body, body.alternatives, self._hand_over if body.tools else ())
        n = body.n or 1
        last = body.messages[-1]
        guess = body.prediction
        hint = () if guess is None else tuple(self.tokens(guess.text, False, "prediction"))
        requests = self.engine_requests(body, [ids], params=params, n=n, hint=hint)
        echoes = (last.text,) * n if body.echo and last.role == "assistant" else ()
        return Job(body, requests, parser=parser, seed=params.seed, candidates=n, echoes=echoes, grammar=grammar)

    def _completion(self, body: CompletionRequest) -> Job:
        prompts = body.prompt
        window = self.kept(body.truncate_prompt_tokens, body.truncation_side)
        encoded: list[list[int]] = []
        for prompt in prompts:
            ids = self._filled_in(prompt, body.suffix) if body.suffix else self.prompt_ids(prompt, "prompt", window)
            encoded.append(self.fitting(ids, "prompt", window))
        n = max(body.best_of or 1, body.n or 1)
        logprobs = body.logprobs
        if logprobs is None and n > (body.n or 1):
            logprobs = 0  # needed to rank the candidates
        ends = self.infill.ends if body.suffix and self.infill is not None else ()
        params = self.sampling_params(body, logprobs, ends)
        requests = self.engine_requests(body, encoded, params=params, n=n)
        echoes: tuple[str, ...] = ()
        if body.echo:
            whole = [isinstance(p, str) and window is None for p in prompts]
            texts = [str(p) if w else self.tokenizer.decode(ids) for p, w, ids in zip(prompts, whole, encoded)]
            echoes = tuple(t for t in texts for _ in range(n))
        return Job(
            body, requests, parser=PlainText, seed=params.seed, candidates=n, echoes=echoes, grammar=self._format(body)
        )

    def engine_requests(
        self, body: Common, prompts: list[list[int]], *, params: SamplingParams, n: int, hint: tuple[int, ...] = ()
    ) -> list[Request]:
        """`n` requests for each prompt. Both bounds of the answer's length are cut to the room in the context."""
        draft_tokens = body.outrider.draft_tokens
        k = None if draft_tokens == "auto" else draft_tokens
        group = uuid.uuid4().hex
        out: list[Request] = []
        for ids in prompts:
            most = max(1, min(params.max_tokens, self.backend.max_context - len(ids)))
            fitting = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
            spans = getattr(ids, "spans", ())
            for i in range(n):
                seeded = replace(fitting, seed=(params.seed + i) & (2**63 - 1))
                id = f"{group}-{len(out)}"
                out.append(Request(id, ids, seeded, draft_tokens=k, drafter=k != 0, spans=spans, hint=hint))
        return out

    # ---- before any work

    def answers(self, body: ChatRequest | CompletionRequest) -> int:
        """Number of answers of a call. Refuses too many before any text is read."""
        n = body.n or 1
        prompts = list[str | list[object]]()
        field = "prompt"
        if isinstance(body, ChatRequest):
            prompts = ["".join(m.text for m in body.messages)]
            field = "messages"
        else:
            n = max(n, body.best_of or 1)
            prompts = body.prompt
            bad_if(not prompts or not all(prompts), "The prompt is empty.", "prompt")
        many = n * len(prompts)
        most = self._settings
        allowed = f"n can be at most {most.max_choices}, prompts times n at most {most.max_answers}"
        refused = n > most.max_choices or many > most.max_answers
        bad_if(refused, f"This call asks for {many} answers; {allowed}.", "n")
        for prompt in prompts if body.truncate_prompt_tokens is None else ():
            self.check_length(prompt, field)
        return many

    def check_length(self, prompt: str | list[object], field: str) -> None:
        """Refuses a prompt before tokenising if it is certainly too long: no token of text exceeds the longest one."""
        texts = [prompt] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, str)]
        tokens = max([len(text) // self._longest_token for text in texts], default=0)
        if isinstance(prompt, list):
            tokens = max(tokens, len(prompt))
        if tokens > self.longest_prompt:
            raise self._overflow(tokens, field, at_least=bool(texts))

    def _overflow(self, tokens: int, field: str, at_least: bool = False) -> ContextOverflow:
        context = self.backend.max_context
        return ContextOverflow(tokens, field=field, most=self.longest_prompt, context=context, at_least=at_least)

    @property
    def longest_prompt(self) -> int:
        context = self.backend.max_context
        return min(self._settings.max_prompt or context - 1, context - 1)

    # ---- prompt

    def conversation(self, body: ChatRequest) -> ChatPrompt:
        """Renders a conversation as the model's prompt."""
        self.answers(body)
        return self._prompt(body)

    def tokens(self, text: str, special: bool, field: str = "prompt") -> list[int]:
        self.check_length(text, field)
        return self._encode(text, bos=special)

    def prompt_ids(self, prompt: str | list[object], field: str, keep: slice | None = None) -> list[int]:
        """Token ids of a text, or of token ids with texts between them. keep: the tokens that truncation leaves."""
        if isinstance(prompt, str) and keep is not None:  # text beyond their maximum length cannot be among them
            left = keep.stop is None
            most = max(LONG_TEXT, (-keep.start if left else keep.stop) * self._longest_token)
            prompt = prompt[-most:] if left else prompt[:most]
        if isinstance(prompt, str):
            if keep is None:
                self._check_beginning(prompt, field)
            return self._encode(prompt, bos=True)
        ids: list[int] = []
        last = self.backend.vocab_size - 1
        for i, part in enumerate(prompt):
            if isinstance(part, str):
                ids += self._encode(part, bos=i == 0)
            elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= last:
                ids.append(part)
            else:
                shown = part if isinstance(part, int) else type(part).__name__
                raise bad(f"{field}: a token id must be an integer in 0..{last}, got {shown}.", field)
        return ids

    def kept(self, asked: int | None, side: str | None) -> slice | None:
        """The tokens that `truncate_prompt_tokens` and `truncation_side` keep; None: all, and prompts that are too long
        are refused."""
        if asked is None:
            return None
        field = "truncate_prompt_tokens"
        most = self.longest_prompt
        bad_if(asked == 0 or asked > most, f"{field} must be -1 or in 1..{most}.", field)
        most = most if asked == -1 else asked
        return slice(most) if side == "right" else slice(-most, None)

    def fitting(self, ids: list[int], field: str, keep: slice | None) -> list[int]:
        ids = ids if keep is None else ids[keep]
        if len(ids) > self.longest_prompt:
            raise self._overflow(len(ids), field)
        return ids

    def _filled_in(self, prompt: str | list[object], suffix: str) -> list[int]:
        """The fill-in-the-middle prompt of a text and its suffix."""
        if self.infill is None:
            raise bad("suffix: this model has no tokens for filling in the middle of a text; leave it out.", "suffix")
        if not isinstance(prompt, str):
            raise bad("suffix needs a prompt that is a text.", "suffix")
        self.check_length(suffix, "suffix")
        for text, field in ((prompt, "prompt"), (suffix, "suffix")):
            self._check_beginning(text, field)
        first, second, third = self.infill.marks
        before = self._encode(prompt, bos=False)
        after = self._encode(suffix, bos=False)
        return [*self._encode("", bos=True), first, *before, second, *after, third]

    def _prompt(self, body: ChatRequest) -> ChatPrompt:
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []] if body.uses_tools else None
        messages = [self._message(m) for m in body.messages]
        media = media_of(body.messages)
        if media:
            check_media(media, body, self.backend)
        for message in body.messages:
            # messages of other roles may be left out by the template
            if message.role == "user" and body.truncate_prompt_tokens is None:
                self._check_beginning(message.text, "messages")
        if not self.dialect.template_tools:
            self._check_beginning(json.dumps(tools) if tools else "", "tools")
            messages = spell_out_tools(messages, tools)
            tools = None
        if self.dialect.turns:
            messages = in_turns(messages)
        options: dict[str, JsonValue] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            effort = body.reasoning_effort
            options = {"enable_thinking": effort != "none", "reasoning_effort": effort, **options}
        for name in options:
            bad_if(reserved(name), f"chat_template_kwargs can't set '{name[:40]}'.", "chat_template_kwargs")
        last = _text_to_continue(messages.pop()) if body.continue_final_message else ""
        begin = True if body.continue_final_message else body.add_generation_prompt is not False
        try:
            prompt = self.tokenizer.prompt(messages, tools=tools, add_generation_prompt=begin, **options)
            if media:
                hosts = self._settings.allow_image_hosts
                prompt = replace(prompt, ids=with_soft_tokens(prompt.ids, media, self.backend, hosts=hosts))
            if not last:
                return prompt
            # as text: control tokens that the beginning of an answer spells are removed
            text = [t for t in self.tokenizer.encode(last) if t not in self.tokenizer.special_ids]
            ids = continued(prompt.ids, text)
            return ChatPrompt(ids, prompt.written + last, prompt.text + last)
        except OutriderError as e:
            raise bad(" ".join(str(e).split())[:300], "messages", "template_error") from e
        except (UnicodeError, TypeError) as e:
            raise bad("The text is not valid Unicode.") from e

    @property
    def sees(self) -> bool:
        return not isinstance(self.backend.vision, str)

    @property
    def hears(self) -> bool:
        return not isinstance(self.backend.audio, str)

    def _message(self, message: Message) -> dict[str, JsonValue]:
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        out: dict[str, JsonValue] = {"role": role, "content": message.text}
        if message.has_media and isinstance(message.content, list):
            out["content"] = template_parts(message.content)
        if message.tool_calls:
            calls: list[JsonValue] = []
            for call in message.tool_calls:
                text = call.function.arguments or "{}"
                if isinstance(text, str) and len(text) > LONG_TEXT:
                    check_size(text.encode("utf-8", "replace"))  # a JSON text inside the body has the same limits
                # a call that was cut off comes back unchanged, so that the conversation can continue
                arguments = cast(JsonValue, loaded(text, text) if isinstance(text, str) else text)
                function: JsonValue = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call.id, "type": "function", "function": function})
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
        """Refuses a text if its beginning alone has 1.5 times the tokens that fit."""
        head = 3 * self.longest_prompt
        if len(text) > max(LONG_TEXT, head) and len(self._encode(text[:head], bos=False)) > head // 2:
            raise self._overflow(head // 2, field, at_least=True)

    # ---- sampling

    def defaults(self, protocol: Mapping[str, float]) -> dict[str, float]:
        """Sampling for fields that the request leaves out: the model's generation_config, else the protocol's
        defaults."""
        return {**UNCHANGED, **(self.tokenizer.files.sampling or protocol)}

    def sampling_params(
        self, body: ChatRequest | CompletionRequest, logprobs: int | None, ends: tuple[int, ...]
    ) -> SamplingParams:
        """Sampling parameters of a request. ends: tokens that end an answer, besides the model's own."""
        limit = body.limit
        seed = body.seed if body.seed is not None else secrets.randbits(31)
        same = ("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")
        options = {name: getattr(body, name) for name in same}
        options["repetition_penalty"] = body.repetition_penalty or body.repeat_penalty
        chosen = {
            name: default if getattr(body, name) is None else getattr(body, name)
            for name, default in self.defaults(body.defaults).items()
        }
        bias: dict[int, float] = {}
        never: list[tuple[int, ...]] = []
        for key, value in (body.logit_bias or {}).items():
            for token in (key,) if isinstance(key, int) else self._encode(key, bos=False):
                if value is False:
                    never.append((token,))
                else:
                    bias[token] = float(value)
        vocab = self.backend.vocab_size
        allowed = body.allowed_token_ids
        for field, ids in (
            ("logit_bias", [*bias, *(t for w in never for t in w)]),
            ("stop_token_ids", body.stop_token_ids),
            ("allowed_token_ids", allowed),
        ):
            most = max(ids or (), default=0)
            bad_if(most >= vocab, f"{field}: {most} is outside the vocabulary (0..{vocab - 1}).", field)
        words = body.bad_words or []  # at the beginning of a text, and behind a space
        spelled = [self._encode(way, bos=False) for word in words for way in (word, f" {word.removeprefix(' ')}")]
        params = SamplingParams(
            temperature=chosen["temperature"],
            logit_bias=bias,
            top_k=max(0, int(chosen["top_k"])),
            top_p=max(chosen["top_p"], 1e-6),  # 0 keeps the likeliest token, as in vLLM and llama.cpp
            min_p=chosen["min_p"],
            bad_words=(*never, *dict.fromkeys(tuple(ids) for ids in spelled if ids)),
            grammar=None if allowed is None else AllowedTokens(allowed, vocab),
            stop=tuple(filter(None, body.stop or ())),
            include_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=(*(body.stop_token_ids or ()), *ends),
            max_tokens=max(self.backend.max_context, body.min_tokens or 0) if limit is None else max(1, limit),
            seed=seed & (2**63 - 1),
            logprobs=logprobs,
            # tags of tool calls are control tokens
            keep_special=isinstance(body, ChatRequest) and self.dialect.tools == "gemma4",
            **{k: v for k, v in options.items() if v is not None},
        )
        try:
            return params.validate(vocab)
        except OutriderError as e:
            raise bad(str(e)) from e

    # ---- grammars

    def _format(self, body: Common) -> GrammarSource | None:
        """The grammar that the answer must match, from whichever field of the request gives one."""
        formats = body.formats
        if not formats:
            return None
        field, kind, what = formats[0]
        other = formats[-1][0]
        bad_if(len(formats) > 1, f"{field} and {other} both constrain the answer; send only one.", other)
        both = body.allowed_token_ids is not None
        bad_if(both, f"allowed_token_ids can't be combined with {field}.", "allowed_token_ids")
        return GrammarSource(kind, what if isinstance(what, str) else _dumps(what, field), field)

    def _tool_grammar(self, body: ChatRequest, format_: GrammarSource | None = None) -> GrammarSource:
        """Grammar of calls of these functions; with a format, of such calls or an answer in that format."""
        described = [tool.function for tool in body.tools or []]
        functions = [(f.name, f.parameters or {"type": "object"}, f.strict is True) for f in described]
        most = 1 if body.parallel_tool_calls is False else MAX_CALLS
        if isinstance(body.tool_choice, Tool):
            wanted = body.tool_choice.function.name
            functions = [f for f in functions if f[0] == wanted][:1]
            most = 1
        payload: dict[str, object] = {"functions": functions, "most": most}
        if format_ is not None and format_.kind != "json_schema":
            raise bad(f"{format_.field} can't be combined with tools; a JSON schema can.", format_.field)
        if format_ is not None:
            payload["format"] = json.loads(format_.payload)
        if self.dialect.tools == "json":
            return GrammarSource("json_calls", _dumps(payload, "tools"), "tools")
        payload["ids"] = {tag: self._tag(tag) for tag in (GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE)}
        return GrammarSource("gemma_calls", _dumps(payload, "tools"), "tools")


def _text_to_continue(message: dict[str, JsonValue]) -> str:
    """The text that the answer continues."""
    content = message["content"]
    if not isinstance(content, str):
        raise bad("continue_final_message: the message to continue may hold text only, no images or sound.", "messages")
    return content


def _dumps(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as e:
        raise bad(f"{field}: it nests too deep.", field) from e
