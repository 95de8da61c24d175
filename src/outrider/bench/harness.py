"""Runs contestants over prompts, interleaved, and writes every finished cell to disk at once.

A cell is one contestant answering one group of prompts (a batch of one category) at one temperature, once. For every
group and repeat all contestants answer before the next group starts, in rotating order, so a change of machine speed
affects them alike. Cells are appended to `cells.jsonl`; an interrupted run reads them back and runs only the missing
ones. `run.json` holds the settings: a folder belongs to one run.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..prompts import Prompt, mend_end
from ..types import OutriderError, RequestStats, SamplingParams, require

if TYPE_CHECKING:
    from ..llm import LLM

PLAIN = "plain"


@dataclass
class TimedAnswer:
    """One answer. `decode_s` is the time for `decode_tokens` of its tokens (the first step, or first token, is left
    out)."""

    token_ids: list[int]
    ttft_s: float
    decode_s: float
    decode_tokens: int
    stats: RequestStats = field(default_factory=RequestStats)  # of ours


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
        """All answers, and the seconds of the whole batch without its prompts' processing."""
        ...


@dataclass(frozen=True)
class DraftMode:
    """How one contestant drafts."""

    name: str
    drafter: str
    k: int | None  # None: auto; 0: plain decoding
    tree: int | None = None  # None: as loaded


@dataclass(frozen=True)
class Ours:
    """A loaded LLM with one drafting mode."""

    mode: DraftMode
    llm: LLM

    @property
    def name(self) -> str:
        return self.mode.name

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
        llm, mode = self.llm, self.mode
        requests = []
        for prompt in prompts:
            params = SamplingParams(temperature=temperature, max_tokens=prompt.max_tokens, seed=seed)
            requests += llm.requests(llm.encode_chat(prompt.text), params, mode.k, mode.k != 0, mode.tree)
        done = {r.id: TimedAnswer([], 0.0, 0.0, 0) for r in requests}
        open_ids = set(done)
        prefill = llm.engine.metrics.prefill_seconds
        began = time.perf_counter()
        for request in requests:
            llm.engine.submit(request)
        while open_ids:
            for event in llm.engine.step():
                answer = done[event.id]
                answer.token_ids += event.tokens
                if event.finish_reason == "error":
                    raise OutriderError(f"{prompts[list(done).index(event.id)].id}: {event.error}")
                if event.stats is not None:  # it has ended
                    open_ids.discard(event.id)
                    answer.ttft_s, answer.decode_s, answer.stats = event.stats.ttft_s, event.stats.decode_s, event.stats
                    answer.decode_tokens = max(0, event.stats.new_tokens - max(1, event.stats.first_emitted))
        whole = time.perf_counter() - began - (llm.engine.metrics.prefill_seconds - prefill)
        return list(done.values()), whole


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a run, stored with its results; a resumed run must have the same."""

    model: str
    suite: str
    contestants: tuple[str, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    repeats: int
    prompts: int
    machine: str
    version: str
    seed: int = 0
    max_tokens: int | None = None
    loaded: Mapping[str, object] = field(default_factory=dict)  # load options that change texts or times


@dataclass(frozen=True)
class Cell:
    contestant: str
    temperature: float
    batch: int
    category: str
    group: str  # the ids of its prompts, joined
    repeat: int
    seconds: float  # of the decoding
    tokens: int  # decoded in them
    ttft_s: float  # median over the group
    digest: str  # of all token ids: equal digests, equal answers
    # sums over the answers
    cycles: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @staticmethod
    def of(
        contestant: str,
        temperature: float,
        group: Sequence[Prompt],
        repeat: int,
        answers: Sequence[TimedAnswer],
        whole: float,
    ) -> Cell:
        """`whole`: seconds of the batch."""
        alone, found = len(answers) == 1, [a.stats for a in answers]
        return Cell(
            contestant,
            temperature,
            len(group),
            group[0].category,
            group_name(group),
            repeat,
            seconds=answers[0].decode_s if alone else whole,
            tokens=answers[0].decode_tokens if alone else sum(len(a.token_ids) for a in answers),
            ttft_s=sorted(a.ttft_s for a in answers)[len(answers) // 2],
            digest=hashlib.sha256(json.dumps([a.token_ids for a in answers]).encode()).hexdigest()[:16],
            cycles=sum(s.cycles for s in found),
            drafted=sum(s.drafted for s in found),
            accepted=sum(s.accepted for s in found),
            drafted_by_position=[sum(each) for each in zip(*(s.drafted_by_position for s in found), strict=True)],
            accepted_by_position=[sum(each) for each in zip(*(s.accepted_by_position for s in found), strict=True)],
        )

    @property
    def key(self) -> tuple[str, float, int, str, int]:
        return (self.contestant, self.temperature, self.batch, self.group, self.repeat)


class Store:
    """The folder of one run."""

    def __init__(self, folder: Path, settings: BenchSettings, resume: bool) -> None:
        self.path = folder / "cells.jsonl"
        wanted = json.loads(json.dumps(asdict(settings)))
        # one that failed before its first cell is none
        if (folder / "run.json").exists() and self.path.exists() and self.path.stat().st_size:
            require(resume, f"{folder} holds a run already: --resume finishes it, another --out starts a new one")
            found, now = (_flat(s) for s in (json.loads((folder / "run.json").read_text(encoding="utf-8")), wanted))
            different = [k for k in now if found.get(k) != now[k]]
            if different:
                what = different[0]
                raise OutriderError(f"{folder} was run with another {what}: {found.get(what)!r}, now {now[what]!r}")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        mend_end(self.path)
        self.done = {cell.key for cell in read_cells(folder)}

    def add(self, cell: Cell) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cell), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done.add(cell.key)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != "loaded"} | settings.get("loaded", {})


def read_cells(folder: Path) -> Iterator[Cell]:
    path = folder / "cells.jsonl"
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Cell(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise OutriderError(f"{path}:{number}: not a result ({error})") from None


def groups(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Prompts of one category, `batch` at a time; a short last group is padded from the category's beginning."""
    by: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by.setdefault(prompt.category, []).append(prompt)
    out = []
    for members in by.values():
        for start in range(0, len(members), batch):
            group = members[start : start + batch]
            out.append((group + members * batch)[:batch] if len(group) < batch else group)
    return out


def group_name(group: Sequence[Prompt]) -> str:
    return "|".join(p.id for p in group)


def run(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], settings: BenchSettings, store: Store
) -> Iterator[Cell | None]:
    """Runs all missing cells: yields each as it is done, None for one that was there already."""
    warm: set[str] = set()
    for temperature, batch in product(settings.temperatures, settings.batches):
        for (index, group), repeat in product(enumerate(groups(prompts, batch)), range(settings.repeats)):
            turn = (index + repeat) % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                if (contestant.name, temperature, batch, group_name(group), repeat) in store.done:
                    yield None
                    continue
                if contestant.name not in warm:
                    warm.add(contestant.name)
                    short = Prompt("warm-up", "warm-up", group[0].text[:200], 16)
                    contestant.answer([short], temperature, settings.seed)
                timed = contestant.answer(group, temperature, settings.seed)
                store.add(cell := Cell.of(contestant.name, temperature, group, repeat, *timed))
                yield cell


def total(settings: BenchSettings, prompts: Sequence[Prompt]) -> int:
    per_batch = sum(len(groups(prompts, b)) for b in settings.batches)
    return per_batch * settings.repeats * len(settings.contestants) * len(settings.temperatures)
