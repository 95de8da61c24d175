"""Prints tokens in colours by their origin: accepted, corrected, bonus or plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from ..engine.engine import Event
    from ..engine.text import Tokenizer

KINDS = {  # style and meaning
    "accepted": ("green", "drafted and right"),
    "corrected": ("bold red", "corrected by the target"),
    "bonus": ("cyan", "bonus"),
    "plain": ("", "not drafted"),
}


class Painter:
    """Turns events into rich text; token by token if colours are on."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], colours: bool):
        from ..engine.text import Detokenizer

        self.detok = Detokenizer(tokenizer, prompt) if tokenizer is not None and colours else None

    def paint(self, event: Event) -> Text:
        if self.detok is None:
            return Text(event.text)
        text = Text()
        for token, kind in zip(event.tokens, event.kinds):
            text.append(self.detok.push([token]), KINDS[kind][0])
        return text

    @staticmethod
    def legend() -> Text:
        text = Text()
        for style, what in KINDS.values():
            text.append("■ ", style)
            text.append(f"{what}  ", "dim")
        return text
