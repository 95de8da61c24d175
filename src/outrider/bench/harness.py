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
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..prompts import Prompt, mend_end
from ..types import OutriderError, RequestStats, SamplingParams, require

if TYPE_CHECKING:
    from ..llm import LLM

PLAIN = "plain"
# of a run, stored with its results: contestants, temperatures, batches, repeats, seed, and what else a resumed run must
# have in common with it
Settings = Mapping[str, Any]
CellKey = tuple[str, float, int, str, int]  # contestant, temperature, batch, group, repeat
Answer = tuple[list[int], RequestStats]  # token ids; times and, for our engine, draft counts


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[Answer], float]:
        """All answers, and the seconds of the whole batch without prefill."""
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

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[Answer], float]:
        llm = self.llm
        mode = self.mode
        requests = []
        for prompt in prompts:
            params = SamplingParams(temperature=temperature, max_tokens=prompt.max_tokens, seed=seed)
            requests += llm.requests(
                llm.encode_chat(prompt.text), params, draft_tokens=mode.k, drafter=mode.k != 0, tree=mode.tree
            )
        tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        ended: dict[str, RequestStats] = {}
        prefill = llm.engine.metrics.prefill_seconds
        began = time.perf_counter()
        for request in requests:
            llm.engine.submit(request)
        while len(ended) < len(requests):
            for event in llm.engine.step():
                tokens[event.id] += event.tokens
                if event.finish_reason == "error":
                    raise OutriderError(f"{prompts[list(tokens).index(event.id)].id}: {event.error}")
                if event.stats is not None:
                    ended[event.id] = event.stats
        whole = time.perf_counter() - began - (llm.engine.metrics.prefill_seconds - prefill)
        return [(ids, ended[id]) for id, ids in tokens.items()], whole


@dataclass(frozen=True)
class Cell:
    contestant: str
    temperature: float
    batch: int
    group: str  # the ids of its prompts, joined
    repeat: int
    category: str
    seconds: float  # decoding time
    tokens: int  # tokens decoded in that time
    ttft_s: float  # median over the group
    digest: str  # of all token ids: equal digests, equal answers
    # sums over the answers
    cycles: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @staticmethod
    def of(key: CellKey, category: str, answers: Sequence[Answer], whole: float) -> Cell:
        """`whole`: seconds of the batch. A single answer's first cycle belongs to its time to first token."""
        ids = [ids for ids, _ in answers]
        every_stats = [stats for _, stats in answers]
        seconds = whole
        tokens = sum(map(len, ids))
        if len(every_stats) == 1:
            seconds = every_stats[0].decode_s
            tokens = max(0, every_stats[0].new_tokens - every_stats[0].first_emitted)
        return Cell(
            *key,
            category=category,
            seconds=seconds,
            tokens=tokens,
            ttft_s=sorted(s.ttft_s for s in every_stats)[len(every_stats) // 2],
            digest=hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
            cycles=sum(s.cycles for s in every_stats),
            drafted=sum(s.drafted for s in every_stats),
            accepted=sum(s.accepted for s in every_stats),
            drafted_by_position=[sum(each) for each in zip(*(s.drafted_by_position for s in every_stats), strict=True)],
            accepted_by_position=[
                sum(each) for each in zip(*(s.accepted_by_position for s in every_stats), strict=True)
            ],
        )

    @property
    def key(self) -> CellKey:
        return (self.contestant, self.temperature, self.batch, self.group, self.repeat)


class Store:
    """The result folder of one run."""

    def __init__(self, folder: Path, settings: Settings, resume: bool) -> None:
        self.path = folder / "cells.jsonl"
        wanted = json.loads(json.dumps(settings))
        # a run that failed before its first cell does not count
        if (folder / "run.json").exists() and self.path.exists() and self.path.stat().st_size:
            require(resume, f"{folder} holds a run already: --resume finishes it, another --out starts a new one")
            stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            for name, now in wanted.items():
                same = stored.get(name) == now
                require(same, f"{folder} was run with another {name}: {stored.get(name)!r}, now {now!r}")
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
    starts = [(members, at) for members in by.values() for at in range(0, len(members), batch)]
    return [(members[at:] + members * batch)[:batch] for members, at in starts]


def run(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], settings: Settings, store: Store
) -> Iterator[Cell | None]:
    """Runs all missing cells; yields each when it is done, None for one that already was."""
    warm: set[str] = set()
    for temperature, batch in product(settings["temperatures"], settings["batches"]):
        for (index, group), repeat in product(enumerate(groups(prompts, batch)), range(settings["repeats"])):
            turn = (index + repeat) % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                key = (contestant.name, temperature, batch, "|".join(p.id for p in group), repeat)
                if key in store.done:
                    yield None
                    continue
                if contestant.name not in warm:
                    warm.add(contestant.name)
                    short = Prompt("warm-up", "warm-up", text=group[0].text[:200], max_tokens=16)
                    contestant.answer([short], temperature, settings["seed"])
                timed = contestant.answer(group, temperature, settings["seed"])
                cell = Cell.of(key, group[0].category, *timed)
                store.add(cell)
                yield cell


def total(settings: Settings, prompts: Sequence[Prompt]) -> int:
    per_batch = sum(len(groups(prompts, b)) for b in settings["batches"])
    return per_batch * settings["repeats"] * len(settings["contestants"]) * len(settings["temperatures"])
