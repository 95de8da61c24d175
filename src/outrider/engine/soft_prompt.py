"""Prompts with soft tokens: every placeholder of an image or a clip becomes begin, n soft positions and end.

A `SoftEncoder` (images.py, audio.py) turns one item into a `SoftSpan`; `expand` places the spans of all kinds in one
pass over the prompt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..types import SoftSpan, require


class SoftPrompt(list[int]):
    """Token ids with the spans of soft tokens among them."""

    spans: tuple[SoftSpan, ...] = ()


def continued(ids: list[int], more: Sequence[int]) -> list[int]:
    """The prompt with more tokens behind it, and its spans."""
    out = SoftPrompt([*ids, *more])
    out.spans = getattr(ids, "spans", ())
    return out


@dataclass(frozen=True)
class PlaceholderIds:
    placeholder: int  # what a template writes for an item
    begin: int
    soft: int  # the id at every soft position
    end: int


class SoftEncoder(Protocol):
    noun: str  # of one item: "image"
    max_items: int  # in a prompt
    ids: PlaceholderIds

    def encode(self, item: object) -> SoftSpan:
        """The item's soft tokens, as a span that starts at 0."""


@dataclass(frozen=True)
class SoftInputs:
    """The items of one kind in a prompt, in the order of their placeholders."""

    encoder: SoftEncoder
    items: Sequence[object]


def expand(ids: Sequence[int], inputs: Sequence[SoftInputs]) -> SoftPrompt:
    """The prompt with every placeholder of these kinds replaced by an item: there must be as many."""
    for kind in inputs:
        encoder = kind.encoder
        num_items = len(kind.items)
        num_places = ids.count(encoder.ids.placeholder)
        plural = f"{num_items} {encoder.noun}{'s' if num_items != 1 else ''}"
        require(num_items <= encoder.max_items, f"{plural}; at most {encoder.max_items} are allowed in a prompt")
        message = f"{plural} for {num_places} places in the prompt: does its template take {encoder.noun}s?"
        require(num_items == num_places, message)
    encoders = {kind.encoder.ids.placeholder: kind.encoder for kind in inputs}
    remaining_items = {kind.encoder.ids.placeholder: iter(kind.items) for kind in inputs}
    out = SoftPrompt()
    spans: list[SoftSpan] = []
    previous = -1
    for token in ids:
        if token in encoders:
            place = encoders[token].ids
            out.append(place.begin)
            span = replace(encoders[token].encode(next(remaining_items[token])), start=len(out))
            spans.append(span)
            out += [place.soft] * (span.end - span.start)
            out.append(place.end)
        elif previous in encoders and token == encoders[previous].ids.end:
            pass  # written by the template
        else:
            out.append(token)
        previous = token
    out.spans = tuple(spans)
    return out


class SpanCache:
    """The spans of the items encoded last, by their content. Each is encoded once, one at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spans: OrderedDict[bytes, SoftSpan] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()

    def get(self, key: bytes, encode: Callable[[], SoftSpan]) -> SoftSpan:
        """A known item does not wait for the encoder."""
        span = self._find(key)
        if span is not None:
            return span
        with self._encoding:  # one item at a time: its bits depend on no other
            span = self._find(key)
            if span is None:
                span = encode()
            with self._lock:
                self._spans[key] = span
                if len(self._spans) > self._size:
                    self._spans.popitem(last=False)
        return span

    def _find(self, key: bytes) -> SoftSpan | None:
        with self._lock:
            if key in self._spans:
                self._spans.move_to_end(key)
            return self._spans.get(key)
