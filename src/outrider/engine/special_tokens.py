"""Keeps messages from forging special tokens: only those that the chat template wrote are encoded as special tokens.

A conversation is rendered a second time with stand-ins (single characters that it does not hold) for the characters
that begin and end special tokens in all untrusted text. The special tokens of that rendering are the template's. If
the plain rendering has no others, it is encoded as it is; otherwise the second one is, by a copy of the tokenizer with
unguessable names for its special tokens.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as Backend

from ..types import Json, OutriderError, require

Variables = Mapping[str, Json]
# (messages, tools, variables) -> the template's text
Renderer = Callable[[Sequence[Mapping[str, Json]], Json, Variables], str]
SPELLED = "a message spells control tokens, and this tokenizer"  # how errors begin
PLAIN = "_-.,/:\"'"  # punctuation of keys, roles and JSON: never replaced
PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    ids: list[int]
    written: str  # its text, with stand-ins where a message has brackets like those of control text
    text: str  # its text as the template renders it


class SpecialTokenGuard:
    def __init__(self, backend: Backend, encode: Callable[[str], list[int]], template: str) -> None:
        """Guarded tokens: the special ones, and added ones in brackets that the template itself writes (`<tool_call>`,
        `</think>`). `encode`: the backend's, without special tokens."""
        self._backend = backend
        self._encode = encode
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        markers: list[str] = []
        for index, token in backend.get_added_tokens_decoder().items():
            text = token.content
            if token.special and text.strip():
                self._ids[text] = index
            elif len(text) > 2 and text[0] in "<[" and text in template:
                self._ids[text] = index
                markers.append(text)
        edges = {c for t in self._ids for c in (t[0], t[-1]) if not c.isalnum() and not c.isspace() and c not in PLAIN}
        words = [t for t in self._ids if t[0] not in edges and t[-1] not in edges]
        self._all = _any_of(self._ids)
        spelt = [re.escape(t[0]) + f"(?={re.escape(t[1:])})" for t in words] + [re.escape(c) for c in sorted(edges)]
        self._outside = re.compile("|".join(spelt) or r"(?!)")
        # An assistant's own thoughts and calls hold such marks, and templates look for them there.
        self._own = re.compile("|".join([f"({_any_of(markers).pattern})", *spelt]))
        unknown = encode(chr(0x10FFFD))  # the answer to a character that no tokenizer has
        self._counted = frozenset(self._ids.values()) - frozenset(unknown)

    def prompt(
        self, messages: Sequence[Mapping[str, Json]], tools: Json, variables: Variables, render: Renderer
    ) -> ChatPrompt:
        plain = render(messages, tools, variables)
        ids = self._encode(plain)
        outside = [messages, tools, list(variables.values())]
        if not any(self._outside.search(text) for text in _strings(outside)):
            written = plain
            back = {}
        else:
            back = self._stand_ins(plain + "".join(_strings(outside)))
            there = {original: c for c, original in back.items()}
            masked = [_masked(m, self._own if m.get("role") == "assistant" else self._outside, there) for m in messages]
            more = {name: _masked(value, self._outside, there) for name, value in variables.items()}
            written = render(masked, _masked(tools, self._outside, there), more)  # type: ignore[arg-type]
        matches = [m[0] for m in self._all.finditer(written)]
        if [m[0] for m in self._all.finditer(plain)] == matches and self._no_more(ids, matches):
            return ChatPrompt(ids, written, plain)
        ids = self._encode_apart(written, back)
        require(self._no_more(ids, matches), f"{SPELLED} cannot tell them from the template's: leave them out")
        return ChatPrompt(ids, written, plain)

    def _no_more(self, ids: Iterable[int], found: Iterable[str]) -> bool:
        """Every special token among `ids` was written by the template, in its order."""
        written = iter([self._ids[t] for t in found])
        return all(i in written for i in ids if i in self._counted)

    def _stand_ins(self, text: str) -> dict[str, str]:
        """For each character to be replaced, one that does not occur in `text`, not even as a JSON escape."""
        characters = set(text)
        private = (chr(code) for part in PRIVATE for code in part)
        free = (c for c in private if c not in characters and json.dumps(c)[1:-1] not in text)
        wanted = {t[0] for t in self._ids} | {t[-1] for t in self._ids}
        try:
            return {next(free): c for c in sorted(wanted)}
        except StopIteration:
            raise OutriderError("a message holds every private-use character there is: leave some out") from None

    def _encode_apart(self, written: str, back: Mapping[str, str]) -> list[int]:
        with self._lock:  # making the copy takes seconds and memory: once for all threads
            twin, names = self._twin
        pieces = []
        at = 0
        for match in self._all.finditer(written):
            pieces += [_restored(written[at : match.start()], back), names[match[0]]]
            at = match.end()
        pieces.append(_restored(written[at:], back))
        ids: list[int] = twin.encode_batch_fast(["".join(pieces)], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _twin(self) -> tuple[Backend, dict[str, str]]:
        """A copy of the tokenizer with unguessable names for its special tokens."""
        raw = json.loads(self._backend.to_str())
        secret = secrets.token_hex(8)
        names = {text: f"\uf8f0{secret}:{index}\uf8f1" for text, index in self._ids.items()}
        for entry in raw["added_tokens"]:
            if entry["content"] in names:
                entry |= {"content": names[entry["content"]], "normalized": False}
        model = raw["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):  # Unigram: [piece, score]
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("merges"), list):
            pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
            model["merges"] = [[a, b] for a, b in pairs if a not in names and b not in names and a + b not in names]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        twin = Backend.from_str(json.dumps(raw))
        odd = next((text for text, index in self._ids.items() if twin.token_to_id(names[text]) != index), None)
        require(odd is None, f"{SPELLED} cannot take {odd} for text: leave them out")
        return twin, names


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest alternative, as the tokenizer does."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def _masked(value: Json, pattern: re.Pattern[str], stand_in: Mapping[str, str]) -> Json:
    if isinstance(value, str):
        return pattern.sub(lambda m: m[0] if m.lastindex else stand_in[m[0]], value)
    if isinstance(value, Mapping):
        return {str(_masked(k, pattern, stand_in)): _masked(v, pattern, stand_in) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(v, pattern, stand_in) for v in value]
    return value


def _restored(text: str, back: Mapping[str, str]) -> str:
    for stand_in, original in back.items():
        text = text.replace(stand_in, original).replace(json.dumps(stand_in)[1:-1], original)
    return text
