"""Measures what a new drafter brings on this machine: held-out prompts, plainly and with drafts, in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig, LoadSettings
from ..engine.machine_load import OtherLoad
from ..llm import LLM
from ..types import SamplingParams
from .answers import ADAPTER
from .clock import Halt
from .data import Sequences
from .target import Described

MIN_PAIRS = 2  # prompts that are measured even if they take longer
WARM_TOKENS = 8
USEFUL = 1.1  # minimum speed-up of a useful drafter
WORTHLESS = 1.02  # a lower speed-up is within the variation of timings


@dataclass(frozen=True)
class Gain:
    """Decoding speeds over the same prompts."""

    prompts: int
    tokens: int  # tokens of each side
    plain_seconds: float
    drafting_seconds: float
    load_note: str | None = None  # load of other programs, if any

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.drafting_seconds

    @property
    def verdict(self) -> str:
        """Advice: use the drafter, train on, or do not use it."""
        if self.speedup >= USEFUL:
            return "use it"
        if self.speedup > WORTHLESS:
            return "hardly faster: more prompts and more minutes are needed"
        plain = "as fast" if self.speedup >= 1 / WORTHLESS else "faster"
        return f"do not use it: plain decoding is {plain} here; more prompts and more minutes are needed"

    def line(self) -> str:
        """The measured speeds; the verdict comes with the results."""
        plain = self.tokens / self.plain_seconds
        drafting = self.tokens / self.drafting_seconds
        over = f"{self.prompts} held-out prompts, {self.tokens} tokens: {plain:.1f} tokens per second plain"
        line = f"measured here on {over}, {drafting:.1f} drafting"
        return line if self.load_note is None else f"{line} ({self.load_note})"

    def to_json(self) -> dict[str, float | str | bool]:
        return {
            "speedup": round(self.speedup, 3),
            "plain_tps": round(self.tokens / self.plain_seconds, 2),
            "drafting_tps": round(self.tokens / self.drafting_seconds, 2),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "verdict": self.verdict,
            "useful": self.speedup > WORTHLESS,
        }


def measure_gain(
    known: Described, drafter: Path, prompts: Sequences, *, device: str, max_new: int, seconds: float, halt: Halt
) -> Gain | None:
    """Times greedy answers to held-out prompts; None if none is long enough. The controller chooses K, as in `outrider
    serve`."""
    longest = int(prompts.lengths.max()) + max_new
    page = EngineConfig().page_size
    settings = LoadSettings(
        drafter=str(drafter),
        device=device,
        engine=EngineConfig(max_batch=1, max_context=longest + 1 + page, prefix_cache=False),
        adapters={} if known.adapter is None else {ADAPTER: known.adapter},
        vision=False,
        audio=False,
    )
    llm = LLM.load(known.name, settings, say=lambda _: None)
    if known.adapter is not None:
        llm.adapter = ADAPTER
    others = OtherLoad()
    pairs = list(timed_pairs(llm, prompts, max_new=max_new, seconds=seconds, halt=halt))
    load_note = others.line()
    del llm
    gc.collect()
    plain_seconds = sum(pair.plain_seconds for pair in pairs)
    drafting_seconds = sum(pair.drafting_seconds for pair in pairs)
    if not plain_seconds or not drafting_seconds:
        return None
    return Gain(
        prompts=len(pairs),
        tokens=sum(pair.tokens for pair in pairs),
        plain_seconds=plain_seconds,
        drafting_seconds=drafting_seconds,
        load_note=load_note,
    )


def timed_pairs(llm: LLM, prompts: Sequences, *, max_new: int, seconds: float, halt: Halt) -> Iterator[Gain]:
    """Times each prompt plainly and with drafts. The side that begins alternates, so a growing load affects both
    alike."""
    warm = prompts[0].tolist()
    for drafts in (False, True):
        llm.generate(warm, SamplingParams(max_tokens=WARM_TOKENS), drafter=drafts)
    ends = time.perf_counter() + seconds
    for number in range(len(prompts)):
        if halt() or (number >= MIN_PAIRS and time.perf_counter() >= ends):
            return
        ids = prompts[number].tolist()
        spent: dict[bool, float] = {}
        tokens = 0
        for drafts in (False, True) if number % 2 == 0 else (True, False):
            stats = llm.generate(ids, SamplingParams(max_tokens=max_new), drafter=drafts)[0].stats
            tokens = stats.new_tokens
            # seconds per token after the first cycle, for as many tokens on both sides
            later = stats.new_tokens - stats.first_emitted
            spent[drafts] = stats.decode_s / later * tokens if later > 0 else 0.0
        if all(spent.values()):
            yield Gain(prompts=1, tokens=tokens, plain_seconds=spent[False], drafting_seconds=spent[True])
