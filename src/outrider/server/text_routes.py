"""Routes of vLLM and llama.cpp for token ids and rendered conversations: /tokenize, /detokenize, /apply-template,
/tokenizer_info."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from .answer import Json
from .errors import bad
from .prepare import Preparer
from .schema import ChatRequest, Lenient, TokenId


class TokenizeRequest(Lenient):
    """A text, or a conversation: `messages` and the other fields of a chat request that shape its prompt."""

    model_config = ConfigDict(extra="allow")
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name for the text
    messages: list[object] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Lenient):
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


def tokenize(raw: bytes, preparer: Preparer) -> Json:
    body = TokenizeRequest.model_validate_json(raw)
    text = body.prompt if body.prompt is not None else body.content
    if body.messages is not None:
        options = {k: v for k, v in (body.model_extra or {}).items() if k in ChatRequest.model_fields}
        ids = preparer.conversation(ChatRequest.model_validate({**options, "messages": body.messages})).ids
    elif text is not None:
        add_special = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
        if add_special is None:
            add_special = body.prompt is not None  # vLLM's default is true, llama.cpp's false
        ids = preparer.tokens(text, add_special)
    else:
        raise bad("Missing field: 'prompt'.", "prompt", "missing_field")
    pieces = [preparer.tokenizer.token_bytes(t) for t in ids]
    out: Json = {"tokens": ids, "count": len(ids), "max_model_len": preparer.backend.max_context}
    if body.with_pieces:
        out["tokens"] = [{"id": t, "piece": piece(p)} for t, p in zip(ids, pieces)]
    if body.return_token_strs:
        out["token_strs"] = [p.decode("utf-8", "replace") for p in pieces]
    return out


def piece(data: bytes) -> str | list[int]:
    """A token in llama.cpp's form: text, or bytes if they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(raw: bytes, preparer: Preparer) -> Json:
    ids = DetokenizeRequest.model_validate_json(raw).tokens
    text = preparer.tokenizer.decode(ids, keep_special=True)
    return {"prompt": text, "content": text}


def apply_template(raw: bytes, preparer: Preparer) -> Json:
    return {"prompt": preparer.conversation(ChatRequest.model_validate_json(raw)).text}


def tokenizer_info(_: bytes, preparer: Preparer) -> Json:
    """Facts for clients that tokenise here: lm-eval asks for them."""
    files = preparer.tokenizer.files
    tokenizer = preparer.tokenizer
    ends = [tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids]
    named: Json = {name: files.specials.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        **named,
        "eos_token": named["eos_token"] or (ends[0] if ends else None),
        "chat_template": files.chat_template,
        "model_max_length": preparer.backend.max_context,
        "tokenizer_class": "outrider",
    }
