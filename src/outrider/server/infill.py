"""Fill-in-the-middle: `suffix` of /v1/completions and of Ollama's /api/generate, for models with tokens for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.text import Tokenizer

# Tokens before the prefix, before the suffix and before what the model writes, by family.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
# Where such a text ends besides the model's own end tokens: padding, and the beginning of another file.
ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|endoftext|>",
    "▁<EOT>",
)


@dataclass(frozen=True)
class Infill:
    marks: tuple[int, int, int]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """None: the model has no such tokens."""
        known = tokenizer.backend.token_to_id
        for names in MARKS:
            first, second, third = (known(name) for name in names)
            if first is not None and second is not None and third is not None:
                ends = [i for name in ENDS if (i := known(name)) is not None]
                return cls((first, second, third), (first, second, third, *ends))
        return None

    def prompt(self, encode: Callable[[str], list[int]], before: str, after: str, bos: list[int]) -> list[int]:
        first, second, third = self.marks
        return [*bos, first, *encode(before), second, *encode(after), third]
