"""Tokenisation: encode, decode, chat templates, and incremental detokenisation.

Decoding works on bytes: every token is a byte string (`token_bytes`), and text is their UTF-8. So a stream emits
exactly the text that `decode` returns, and never half a character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial

import jinja2

from ..types import Json, OutriderError, TextFiles, bad_input, require
from .chat_template import ChatTemplate, reserved
from .special_tokens import ChatPrompt, SpecialTokenGuard

Messages = Sequence[Mapping[str, Json]]
LONG_TEXT = 8 << 10  # characters from which a text is encoded in another process
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to 256, 257, … in order."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [b for b in range(256) if b not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(hidden)}


# From the text of a token id: what a template writes for an image, and what is read instead; None: what is written.
ImageText = Callable[[Callable[[int], str | None]], tuple[str, str] | None]


class Tokenizer:
    def __init__(self, files: TextFiles, image_text: ImageText | None = None) -> None:
        if files.build is None:
            missing = f"{files.where} has no tokenizer (tokenizer.json is missing)"
            raise OutriderError(f"{missing}: fetch it with the checkpoint")
        self.files = files
        self.backend = files.build()  # a tokenizers.Tokenizer
        self.eos_ids: tuple[int, ...] = files.eos_ids
        added = self.backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        if not self.eos_ids and "eos_token" in files.specials:
            index = self.backend.token_to_id(files.specials["eos_token"])
            self.eos_ids = () if index is None else (index,)
        # the library exposes the decoder's parts only as JSON
        decoder = None if self.backend.decoder is None else json.loads(self.backend.decoder.__getstate__())
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        if not kinds & {"ByteLevel", "Metaspace", "Replace"}:
            raise OutriderError(f"{files.where}: a tokenizer with decoder {sorted(map(str, kinds))} is not supported")
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_tokens = "ByteFallback" in kinds
        strips = any(s.get("type") == "Strip" and s.get("start") for s in steps)
        metaspace = any(s.get("type") == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
        self.strips_space = strips or metaspace  # the first word's space is the tokenizer's own
        self._image_text = None if image_text is None else image_text(self.backend.id_to_token)
        self._bytes: dict[int, bytes] = {}
        self.texts = TokenTexts(self)
        # a server has `ids` of long texts and the chat template made in other processes
        self.elsewhere: Callable[[str, bool], list[int]] | None = None
        self.render_elsewhere: Callable[[dict[str, Json]], str] | None = None

    # ---- text and ids -----------------------------------------------------------------------------------------------
    def encode(self, text: str, bos: bool = False) -> list[int]:
        """`bos`: this is the start of a prompt, so the tokenizer's prefix tokens are added."""
        ids = self.ids(text, bos)
        first = self.files.bos_id if bos and self.files.add_bos else None
        if first is not None and ids[:1] != [first]:
            ids.insert(0, first)
        return ids

    def ids(self, text: str, special: bool) -> list[int]:
        elsewhere = self.elsewhere  # another thread may take it away
        return self.ids_here(text, special) if elsewhere is None or len(text) <= LONG_TEXT else elsewhere(text, special)

    def ids_here(self, text: str, special: bool) -> list[int]:
        """The tokenizer's own ids. Its `encode` of one text, not of a list, would block all other threads."""
        try:
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:
            odd = "the text is not valid Unicode: it has a lone surrogate, or a byte that is not UTF-8"
            kind = f"a text is needed, got {type(text).__name__}"
            raise OutriderError(odd if isinstance(text, str) else kind) from None
        return ids

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        shown = (i for i in ids if keep_special or i not in self.special_ids)
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token adds to the text; b"" for ids without a token (padding rows of the vocabulary)."""
        known = self._bytes.get(index)
        if known is None:
            known = self._compute_bytes(index)
            self._bytes[index] = known
        return known

    def _compute_bytes(self, index: int) -> bytes:
        token = self.backend.id_to_token(index) if 0 <= index < 1 << 31 else None
        if token is None:
            return b""
        if self._alphabet is not None:
            if all(c in self._alphabet for c in token):
                return bytes(self._alphabet[c] for c in token)
            return bytes(token, "utf-8")
        byte = BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return bytes(token.replace("▁", " "), "utf-8")

    def common_token_ids(self) -> set[int]:
        """Tokens of any text that may be far back in a vocabulary: Latin characters, which SentencePiece puts last,
        end tokens, and special ones unless there are thousands."""
        letters = {self.backend.token_to_id(c) for c in ["▁", *map(chr, range(32, 256))]}
        special = self.special_ids if len(self.special_ids) < 512 else frozenset[int]()
        return {i for i in letters if i is not None} | special | set(self.eos_ids)

    @property
    def json(self) -> str:
        return str(self.backend.to_str())

    # ---- chat -------------------------------------------------------------------------------------------------------
    @property
    def has_chat_template(self) -> bool:
        return self.files.chat_template is not None

    def chat(self, messages: Messages, tools: Json = None) -> list[int]:
        """Ids of a conversation. The template writes bos itself if the model needs one."""
        return self.prompt(messages, tools).ids

    def prompt(
        self, messages: Messages, tools: Json = None, add_generation_prompt: bool = True, **variables: Json
    ) -> ChatPrompt:
        """A conversation encoded: special tokens come from the template, never from a message or a variable."""

        def render(messages: Messages, tools: Json, variables: Mapping[str, Json]) -> str:
            return self.render(messages, tools, add_generation_prompt, **variables)

        return self._control.prompt(messages, tools, variables, render=render)

    @cached_property
    def _control(self) -> SpecialTokenGuard:
        return SpecialTokenGuard(self.backend, partial(self.ids, special=False), self.files.chat_template or "")

    def render(
        self, messages: Messages, tools: Json = None, add_generation_prompt: bool = True, **variables: Json
    ) -> str:
        require(self.has_chat_template, f"{self.files.where} has no chat template: send a plain prompt")
        odd = next(filter(reserved, variables), None)
        require(odd is None, f"the chat template's variable '{str(odd)[:40]}' can't be set")
        context = {"messages": [dict(m) for m in messages], "tools": tools, "documents": None}
        context |= {"add_generation_prompt": add_generation_prompt, **variables, **self.files.specials}
        elsewhere = self.render_elsewhere
        try:
            return self.with_image_text(self._template.render(context) if elsewhere is None else elsewhere(context))
        except OutriderError:
            raise
        except Exception as error:  # a template is untrusted code: any failure is bad input
            why = " ".join(str(error).split())[:200]
            raise OutriderError(f"the chat template refused these messages: {why}") from None

    def with_image_text(self, text: str) -> str:
        return text if self._image_text is None else text.replace(*self._image_text)

    @cached_property
    def _template(self) -> ChatTemplate:
        broken = f"{self.files.where}: the chat template is broken"
        with bad_input(jinja2.TemplateError, lambda error: f"{broken}: {str(error)[:200]}"):
            return ChatTemplate(self.files.chat_template or "")


class TokenTexts(dict[int, str | None]):
    """The text that each token adds, computed when it is first read; None: its bytes are not whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, index: int) -> str | None:
        try:
            text = self._tokenizer.token_bytes(index).decode()
        except UnicodeDecodeError:
            text = None
        self[index] = text
        return text


class Detokenizer:
    """Incremental text: `push` returns whole characters, `flush` the rest (U+FFFD if broken). `prompt`: the tokens
    before; without them the space is dropped that a tokenizer adds to the first word."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), keep_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.keep_special = keep_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space and len(prompt) == 0
        self._whole = True  # no partial character is kept

    def push(self, ids: Iterable[int]) -> str:
        tokenizer = self.tokenizer
        text = ""
        for index in ids:
            if index in tokenizer.special_ids and (not self.keep_special or index in tokenizer.eos_ids):
                continue
            whole = tokenizer.texts[index] if self._whole else None
            if whole is None:
                text += self._utf8.decode(tokenizer.token_bytes(index))
                self._whole = not self._utf8.getstate()[0]
            else:
                text += whole
        return self._first(text) if self._strip else text

    def flush(self) -> str:
        return self._first(self._utf8.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
