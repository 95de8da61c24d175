"""The tokenizer and the chat template inside a GGUF file, rebuilt for the `tokenizers` library: byte-level BPE
("gpt2"), and SentencePiece-like BPE with merges recovered from scores ("llama") or stored ("gemma4").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..types import OutriderError, TextFiles, bad_input
from .gguf import GGUF
from .gguf_config import eos_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

# token types (2: unknown, 6: a byte)
NORMAL = 1
CONTROL = 3
USER = 4
UNUSED = 5
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # how text is cut before merging, by tokenizer.ggml.pre; None: GPT-2's own pattern
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,
    "llama-bpe": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,
    "smollm": None,
    "gpt-2": None,
}

GGUF_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
# recommended sampling
RANGES = {"temperature": (0.0, 2.0), "top_p": (1e-6, 1.0), "top_k": (0, 1 << 31), "min_p": (0.0, 1.0)}
log = logging.getLogger("outrider")


def text_files(file: GGUF) -> TextFiles:
    meta = file.meta
    tokens = meta.get("tokenizer.ggml.tokens")
    family = meta.get("tokenizer.ggml.model")
    pre = meta.get("tokenizer.ggml.pre")
    specials = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and isinstance(tokens, list) and index < len(tokens):
            specials[name] = tokens[index]
    template = meta.get("tokenizer.chat_template")
    bos = meta.get("tokenizer.ggml.bos_token_id")
    add_bos = meta.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # the format's defaults
        add_bos = family in ("llama", "gemma4") or pre == "llama-bpe"
    return TextFiles(
        where=str(file.path),
        build=(lambda: build(file)) if isinstance(tokens, list) and tokens else None,
        chat_template=template if isinstance(template, str) else None,
        specials=specials,
        bos_id=bos if type(bos) is int else None,
        eos_ids=tuple(eos_ids(file)),
        add_bos=bool(add_bos) and type(bos) is int,
        sampling=advised(meta, {name: f"general.sampling.{key}" for name, key in GGUF_NAMES.items()}, str(file.path)),
    )


def advised(given: Mapping[str, object], names: Mapping[str, str], where: str) -> dict[str, float]:
    """The recommended sampling parameters by our names. Values that make no sense are dropped with a warning."""
    settings: dict[str, float] = {}
    for name, key in names.items():
        value = given.get(key)
        low, high = RANGES[name]
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            settings[name] = int(value) if name == "top_k" else value
        elif value is not None:
            log.warning("%s: %s is %r, not a number in %g..%g: ignored", where, key, value, low, high)
    return settings


def build(file: GGUF) -> Tokenizer:
    family = file.meta.get("tokenizer.ggml.model")
    tokens = file.meta["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)  # `text` builds only of those
    types = file.meta.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(len(tokens), NORMAL, np.int32)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise OutriderError(f"{file.path}: tokenizer.ggml.token_type does not match its {len(tokens)} tokens")
    if family == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif family == "llama":
        tokenizer = _sentencepiece(file, tokens, _scored_merges(file, tokens, types), prefix=True)
    elif family == "gemma4":
        tokenizer = _sentencepiece(file, tokens, _stored_merges(file), prefix=False)
        # a run of newlines is never cut
        types = np.where([t != "" and not t.strip("\n") for t in tokens], USER, types)
    else:
        raise OutriderError(
            f"{file.path}: tokenizer model {str(family)[:40]!r} is not supported; known: gpt2, llama, gemma4"
        )
    from tokenizers import AddedToken

    typed = list(zip(tokens, types.tolist(), strict=True))
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER, tokenizer.add_tokens)):
        add([AddedToken(t, special=kind == CONTROL, normalized=False) for t, its in typed if its == kind and t])
    return tokenizer


def _byte_level(file: GGUF, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    pre = file.meta.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise OutriderError(
            f"{file.path}: pre-tokenizer {str(pre)[:40]!r} is not supported; known: {', '.join(SPLITS)}"
        )
    tokenizer = Tokenizer(_bpe(file, tokens, _stored_merges(file), ignore_merges=pre == "llama-bpe"))
    split = SPLITS[pre]
    if pre == "smollm":
        first: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        first = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(file: GGUF) -> list[tuple[str, str]]:
    merges = file.meta.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise OutriderError(f"{file.path}: its tokenizer lacks tokenizer.ggml.merges")
    return [(a, b) for a, _, b in (m.partition(" ") for m in merges)]


def _bpe(
    file: GGUF, tokens: list[str], merges: list[tuple[str, str]], unknown: str | None = None, **options: bool
) -> models.BPE:
    from tokenizers import models

    what = f"{file.path}: a merge uses a token outside the vocabulary"
    with bad_input(Exception, lambda error: f"{what} ({str(error)[:100]})"):  # the library raises bare Exception
        return models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token=unknown, **options)


def _scored_merges(file: GGUF, tokens: list[str], types: np.ndarray) -> list[tuple[str, str]]:
    """Every way to make a piece out of two pieces; the best-scored piece first, as SentencePiece merges."""
    scores = file.meta.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise OutriderError(f"{file.path}: tokenizer.ggml.scores does not match its {len(tokens)} tokens")
    vocab = {t: i for i, t in enumerate(tokens) if types[i] in (NORMAL, USER, UNUSED)}
    merges = []
    for piece, index in vocab.items():
        score = -float(scores[index])
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            a = vocab.get(left)
            if a is not None:
                b = vocab.get(right)
                if b is not None:
                    merges.append((score, a, b, left, right))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


def _sentencepiece(file: GGUF, tokens: list[str], merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """`prefix`: a space is put before the text unless the metadata says otherwise."""
    from tokenizers import Tokenizer, decoders, normalizers

    index = file.meta.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[index] if type(index) is int and index < len(tokens) else None
    tokenizer = Tokenizer(_bpe(file, tokens, merges=merges, unknown=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(file.meta.get("tokenizer.ggml.add_space_prefix", prefix))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    first = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([first, decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer
