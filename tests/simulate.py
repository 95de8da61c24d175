"""Replays recorded drafts: the cost of a fixed K, of an oracle and of our controller.

A trace says, for every output position of one answer, how many tokens of a 16-token draft made there would have been
right. Since verification is coupled the text does not depend on the drafts, so one recording answers for every choice
exactly; time comes from a `CostTable`.

Trace file, JSONL: {"id", "category", "drafter", "runs": [accepted run at each output position], "ngram": [the same for
the n-gram drafter, -1 where it has no match], "match": [length of that match], "confidence": [[the drafter's
probability of each token of that draft]], "prompt_tokens"}; all after "runs" may be absent.

Two oracles, both unreachable: `static` knows each prompt's best drafter and fixed K beforehand (this is what the
project's 95 % goal is held against); `clairvoyant` knows every run and chooses each cycle's K by dynamic programming (a
bound).
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable, SequenceDraft
from outrider.spec.plan import ControllerState, CyclePlan, DraftContext, StepTiming
from outrider.types import MAX_DRAFT, NO_DRAFT, DraftPlan, OutriderError


class NamedController(Controller):
    """A controller that knows its sequences by name: `DraftContext.state` is an id."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.states: dict[str, ControllerState] = {}

    def _state(self, id: Any) -> ControllerState:
        if isinstance(id, ControllerState):
            return id
        return self.states.setdefault(id, self.new_state())

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        return super().propose([view._replace(state=self._state(view.state)) for view in seqs])

    def reuse(self, states: Sequence[Any], match_len: int = 0) -> list[DraftPlan] | None:
        return super().reuse([self._state(state) for state in states], match_len)

    def observe(self, state: Any, *arguments: Any, **named: Any) -> None:
        super().observe(self._state(state), *arguments, **named)

    def finish(self, id: str) -> None:
        self.apply_observations()
        self.states.pop(id, None)


@dataclass(frozen=True)
class Trace:
    id: str
    category: str
    drafter: str
    runs: tuple[int, ...]
    ngram: tuple[int, ...] = ()
    match: tuple[int, ...] = ()
    confidence: tuple[tuple[float, ...], ...] = ()  # of the drafter's own, at each output position
    prompt_tokens: int = 64

    def __post_init__(self) -> None:
        for name, values in (("ngram", self.ngram), ("match", self.match), ("confidence", self.confidence)):
            if values and len(values) != len(self.runs):
                raise OutriderError(
                    f"trace {self.id!r}: {name!r} has {len(values)} entries, 'runs' has {len(self.runs)}"
                )
        if not self.runs:
            raise OutriderError(f"trace {self.id!r}: 'runs' is empty")

    def run(self, drafter: str, position: int) -> int:
        """Tokens of a draft made at this position that the target would accept (-1: this drafter has nothing to
        offer)."""
        if drafter == "ngram":
            return self.ngram[position] if self.ngram else -1
        return self.runs[position]


def view(trace: Trace, position: int) -> DraftContext:
    offers = {trace.drafter: MAX_DRAFT} if trace.drafter != "ngram" else {}
    if trace.ngram and trace.ngram[position] >= 0:
        offers["ngram"] = MAX_DRAFT
    match = trace.match[position] if trace.match else 0
    state: Any = trace.id  # as a NamedController knows it
    return DraftContext(state, offers, match, len(trace.runs) - position, trace.prompt_tokens + position)


@dataclass
class Replay:
    """Seconds and tokens of each trace."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second over all traces."""
        return sum(self.tokens.values()) / sum(self.seconds.values())


def replay(
    traces: Sequence[Trace], policy: Any, cost: CostTable, batch: int = 1, noise: float = 0.0, seed: int = 0
) -> Replay:
    """Run the traces in order, `batch` at a time (a finished one is replaced by the next). `noise`: relative spread of
    the step times that the controller observes; the totals use the true ones."""
    out = Replay()
    rng = random.Random(seed)
    waiting = list(reversed(traces))
    running: dict[str, tuple[Trace, int]] = {}
    while waiting or running:
        while waiting and len(running) < batch:
            trace = waiting.pop()
            if trace.id in out.tokens:
                raise OutriderError(f"two traces are called {trace.id!r}")
            running[trace.id] = (trace, 0)
            out.seconds[trace.id], out.tokens[trace.id] = 0.0, len(trace.runs)
        views = [view(trace, position) for trace, position in running.values()]
        earlier = policy.reuse(list(running), views[0].match_len)
        cycle = policy.propose(views) if earlier is None else CyclePlan(earlier, reused=True)
        policy.commit(cycle)
        choices = cycle.plans
        if cycle.reused:
            choices = [_held(c, v) for c, v in zip(choices, views, strict=True)]
        context = sum(v.context for v in views) // len(views)
        sure = [
            t.confidence[at] if t.confidence and c.drafter == t.drafter else None
            for (t, at), c in zip(running.values(), choices)
        ]
        ended = [_ended(c, f, policy) for c, f in zip(choices, sure, strict=True)]
        parts = [SequenceDraft(choice.drafter, verified=choice.k, drafted=steps) for choice, steps in ended]
        seconds = cost.mixed(parts, context)
        out.cycles += 1
        for here, (choice, steps), confidence in zip(views, ended, sure, strict=True):
            id: Any = here.state
            trace, position = running[id]
            k = choice.k
            accepted = (
                min(k, max(0, trace.run(choice.drafter, position)), here.remaining - 1) if choice.drafter and k else 0
            )
            policy.observe(id, choice.drafter, k, accepted, None if confidence is None else confidence[:steps])
            out.drafted = out.drafted + k
            out.accepted = out.accepted + accepted
            out.seconds[id] += seconds / len(views)
            position += accepted + 1
            if position >= len(trace.runs):
                del running[id]
                policy.finish(id)
            else:
                running[id] = (trace, position)
        observed = seconds * max(0.5, rng.gauss(1.0, noise)) if noise else seconds
        costly = [part.drafter for part in parts if part.drafter and part.drafted and not cost.free(part.drafter)]
        mean_k = sum(part.verified for part in parts) / len(views)
        drafter = costly[0] if costly else None
        policy.observe_step(StepTiming(batch=len(views), k=mean_k, context=context, seconds=observed, drafter=drafter))
    return out


def _held(choice: DraftPlan, view: DraftContext) -> DraftPlan:
    """A choice of some cycles ago, as far as it is still possible."""
    k = min(choice.k, view.remaining - 1, view.drafter_available.get(choice.drafter or "", 0))
    return choice._replace(k=k) if k > 0 else NO_DRAFT


def _ended(choice: DraftPlan, confidence: Sequence[float] | None, policy: Any) -> tuple[DraftPlan, int]:
    """An engine's use of `stop` and `drop` (see `DraftPlan`): the tokens left to verify, and the steps drafted for
    them."""
    if confidence is None or choice.drafter is None or choice.stop == 0.0:
        return choice, choice.k
    trust = policy.trust(choice.drafter)
    path = 1.0
    for j in range(min(choice.k, len(confidence))):
        path *= trust[min(len(trust) - 1, int(confidence[j] * len(trust)))]
        if path < choice.drop:
            return choice._replace(k=j), j + 1
        if path < choice.stop:
            return choice._replace(k=j + 1), j + 1
    return choice, choice.k


# ---- oracles (batch 1) ---------------------------------------------------------------------------------------------
def fixed_seconds(trace: Trace, drafter: str | None, k: int, cost: CostTable) -> float:
    """Seconds with always k tokens of one drafter, where it has any; k = 0 is plain decoding."""
    seconds = 0.0
    position = 0
    n = len(trace.runs)
    while position < n:
        run = trace.run(drafter, position) if drafter is not None else 0
        drafted = min(k, n - position - 1) if run >= 0 else 0
        seconds += cost.curve(drafter, 1, trace.prompt_tokens + position)[drafted]
        position += min(drafted, max(run, 0)) + 1
    return seconds


def timed(traces: Sequence[Trace], seconds: Callable[[Trace, CostTable], float], cost: CostTable) -> Replay:
    return Replay({t.id: seconds(t, cost) for t in traces}, {t.id: len(t.runs) for t in traces})


def plain(trace: Trace, cost: CostTable) -> float:
    return fixed_seconds(trace, None, 0, cost)


def static_oracle(trace: Trace, cost: CostTable) -> float:
    """Each trace with its best drafter and fixed K (possibly 0), known beforehand."""
    names = [trace.drafter] + (["ngram"] if trace.ngram and trace.drafter != "ngram" else [])
    return min(fixed_seconds(trace, name, k, cost) for name in names for k in range(MAX_DRAFT + 1))


def clairvoyant(trace: Trace, cost: CostTable) -> float:
    """The least time possible: drafts have exactly the length that will be accepted."""
    n = len(trace.runs)
    remaining = [0.0] * (n + 1)  # seconds from a position to the end
    for p in range(n - 1, -1, -1):
        at = view(trace, p)
        best = cost.verify(1, 0, at.context) + remaining[p + 1]
        for name in at.drafter_available:
            curve = cost.curve(name, 1, at.context)
            for k in range(1, min(max(0, trace.run(name, p)), at.remaining - 1) + 1):
                best = min(best, curve[k] + remaining[p + k + 1])
        remaining[p] = best
    return remaining[0]


@dataclass(frozen=True)
class Comparison:
    """The controller against plain decoding and the oracles, over the same traces."""

    speedup: float  # tokens per second over plain decoding's
    of_static: float  # share of the static oracle's tokens per second
    of_clairvoyant: float
    best_fixed: tuple[str, int]  # the one drafter and K that is best over all traces
    of_best_fixed: float
    worst: tuple[str, float]  # the prompt with the least speed-up, and that


def compare(
    traces: Sequence[Trace], cost: CostTable, controller: Controller, noise: float = 0.0, seed: int = 0
) -> Comparison:
    ours = replay(traces, controller, cost, noise=noise, seed=seed)
    undrafted = timed(traces, plain, cost)
    names = sorted({t.drafter for t in traces} | ({"ngram"} if any(t.ngram for t in traces) else set()))
    fixed = {
        (name, k): sum(fixed_seconds(t, name, k, cost) for t in traces)
        for name in names
        for k in range(1, MAX_DRAFT + 1)
    }
    best = min(fixed, key=lambda at: fixed[at])
    worst = min(ours.seconds, key=lambda id: undrafted.seconds[id] / ours.seconds[id])
    return Comparison(
        speedup=ours.rate / undrafted.rate,
        of_static=ours.rate / timed(traces, static_oracle, cost).rate,
        of_clairvoyant=ours.rate / timed(traces, clairvoyant, cost).rate,
        best_fixed=best,
        of_best_fixed=fixed[best] / sum(ours.seconds.values()),
        worst=(worst, undrafted.seconds[worst] / ours.seconds[worst]),
    )


# ---- traces --------------------------------------------------------------------------------------------------------
def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for trace in traces:
            file.write(json.dumps({k: v for k, v in asdict(trace).items() if v != ()}) + "\n")


def read_traces(path: Path) -> Iterator[Trace]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read traces from {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            raw = json.loads(line)
            id, category, drafter = (str(raw[name]) for name in ("id", "category", "drafter"))
            parts = (raw["runs"], raw.get("ngram", ()), raw.get("match", ()))
            runs, ngram, match = (tuple(map(int, each)) for each in parts)
            sure = tuple(tuple(map(float, row)) for row in raw.get("confidence", ()))
            yield Trace(id, category, drafter, runs, ngram, match, sure, int(raw.get("prompt_tokens", 64)))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise OutriderError(f"{path}:{number}: not a trace ({error})") from error
