"""A request's sampling parameters: its own values, else the model's generation_config.json, else the protocol's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.grammar import AllowedTokens
from ..types import OutriderError, SamplingParams
from .errors import bad
from .schema import ChatRequest, Common, CompletionRequest
from .spellings import UNCHANGED

if TYPE_CHECKING:
    from .model_info import ServedModel


class RequestSampling:
    def __init__(self, backend: ServedModel, encode: Callable[..., list[int]], gemma_tools: bool) -> None:
        """encode: text -> ids, with `bos`. gemma_tools: tool calls are written with control tokens."""
        self._backend, self._encode, self._gemma_tools = backend, encode, gemma_tools

    def params(
        self, body: ChatRequest | CompletionRequest, logprobs: int | None, ends: tuple[int, ...]
    ) -> SamplingParams:
        """Of a request; `fit` makes them fit behind a prompt. ends: tokens that end it besides the model's own."""
        limit = body.limit
        seed = body.seed if body.seed is not None else secrets.randbits(31)
        same = ("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")
        asked = {name: getattr(body, name) for name in same}
        asked["repetition_penalty"] = body.repetition_penalty or body.repeat_penalty
        chosen = {
            name: default if getattr(body, name) is None else getattr(body, name)
            for name, default in self.defaults(body.defaults).items()
        }
        bias, never = self._biases(body)
        for field, ids in (
            ("logit_bias", [*bias, *(t for w in never for t in w)]),
            ("stop_token_ids", body.stop_token_ids),
        ):
            if (most := max(ids or (), default=0)) >= self._backend.vocab_size:
                raise bad(f"{field}: {most} is outside the vocabulary (0..{self._backend.vocab_size - 1}).", field)
        params = SamplingParams(
            temperature=chosen["temperature"],
            logit_bias=bias,
            top_k=max(0, int(chosen["top_k"])),
            top_p=max(chosen["top_p"], 1e-6),  # 0 keeps the most likely token, as the peers have it
            min_p=chosen["min_p"],
            bad_words=(*never, *(w for word in body.bad_words or () for w in self._spellings(word))),
            grammar=self._allowed(body.allowed_token_ids),
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            stop_token_ids=(*(body.stop_token_ids or ()), *ends),
            max_tokens=max(self._backend.max_context, body.min_tokens or 0) if limit is None else max(1, limit),
            seed=seed & (2**63 - 1),
            logprobs=logprobs,
            keep_special=isinstance(body, ChatRequest) and self._gemma_tools,  # its tags are control tokens
            **{k: v for k, v in asked.items() if v is not None},
        )
        try:
            return params.validate(self._backend.vocab_size)
        except OutriderError as e:
            raise bad(str(e)) from e

    def defaults(self, protocol: Mapping[str, float]) -> dict[str, float]:
        """What a request that says nothing gets: what the model's maker says, else the protocol's."""
        return {**UNCHANGED, **(self._backend.tokenizer.files.sampling or protocol)}

    def _biases(self, body: Common) -> tuple[dict[int, float], list[tuple[int, ...]]]:
        """(biases by token, tokens that may not come). A text's bias is that of each of its tokens."""
        bias: dict[int, float] = {}
        never: list[tuple[int, ...]] = []
        for key, value in (body.logit_bias or {}).items():
            for token in (key,) if isinstance(key, int) else self._encode(key, bos=False):
                if value is False:
                    never.append((token,))
                else:
                    bias[token] = float(value)
        return bias, never

    def fit(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
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
