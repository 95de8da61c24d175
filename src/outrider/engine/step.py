"""The plain data of one step, and the `Executor` protocol. Torch-free.

The scheduler builds a `StepBatch`; an `Executor` plans, launches and reads it. `eager` is the definition, `host` runs a
cycle in one call of a C library, `graphs` replays a CUDA graph; `pick` chooses one per step.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..spec.plan import ControllerState, CostPart, CyclePlan
from ..types import NO_DRAFT, DraftPlan, GroupName, RequestStats, SamplingParams, SoftSpan

if TYPE_CHECKING:
    import torch

    from ..cache.prefix import PrefixChain
    from ..cache.store import SeqCache
    from ..ops.decode_io import DecodeOutputs
    from ..ops.lowrank import Adapter
    from ..spec.ngram import NgramIndex
    from .output_processor import OutputProcessor

Progressed = Callable[[str, int, int], None]  # told (what, done, total) of a long preparation


@dataclass
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    draft_tokens: int | None = None  # None: the engine's setting
    drafter: bool | str = True  # False: plain decoding; a name: only that drafter
    hint: tuple[int, ...] = ()  # predicted output: a source of draft tokens only
    tree: int | None = None  # maximum tokens per draft tree; 0: chains; None: the engine's setting
    namespace: bytes = b""  # prefixes are shared within a namespace only
    client: str = ""  # whose request it is: clients share a step's time
    adapter: str | None = None  # the name of a loaded adapter; None: the base model
    spans: tuple[SoftSpan, ...] = ()  # in the order of their positions in the prompt


class Progress(NamedTuple):
    """Progress of a request: computed (or cached) prompt tokens, and output tokens."""

    request: Request
    prompt_done: int
    new_tokens: int

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to be prefilled; the last one is part of the first decode step."""
        return 0 if self.new_tokens else max(0, len(self.request.prompt) - 1 - self.prompt_done)


@dataclass
class RemoteCopy:
    """The data of a sequence that the other ranks of tensor parallelism already have."""

    cache: SeqCache | None = None  # whose pages they have
    num_pages: dict[GroupName, int] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(eq=False)
class Sequence:
    """A submitted request. `tokens` are prompt and output; K/V of `computed` of them is committed."""

    request: Request
    arrived: float
    tokens: list[int]
    computed: int = 0
    cache: SeqCache | None = None  # its slot and pages, while it runs
    adapter: Adapter | None = None  # its LoRA adapter; held until it ends
    # a draft may start: where it starts from hidden states (`drafts_from_hidden`), the one at tokens[-2] is there
    has_features: bool = False
    draft_tokens: int | None = 0  # the requested K; None: the controller chooses
    offered: Mapping[str, int] = field(default_factory=dict)  # the maximum K of each network drafter it may use
    tree_nodes: int = 0  # the maximum tokens of its draft trees; 0: chains
    # its drafts start from the target's hidden state, so the last row of its prompt runs through all layers
    drafts_from_hidden: bool = False
    stats: RequestStats = field(default_factory=RequestStats)
    first_token_at: float | None = None
    prefix: PrefixChain | None = None  # the keys of its pages in the prefix cache; None: it shares nothing
    restoring: Iterator[None] | None = None  # reads its prefix back from disk, a part per step, before it is admitted
    failed_drafters: set[str] = field(default_factory=set)  # switched off for this request
    paused: bool = False  # its output is not being read
    num_inflight_tokens: int = 0  # maximum tokens that a step in flight may add (the host reads one step behind)
    id: str = field(init=False)
    answer: OutputProcessor = field(init=False)  # the engine's own data: the text so far and where it ends,
    ngram: NgramIndex | None = field(init=False, default=None)  # and what of it can be copied
    controller_state: ControllerState = field(init=False)
    draft_track: object = None  # what the drafter keeps for it (`Drafter.new_track`)
    remote: RemoteCopy | None = None  # what the other ranks of tensor parallelism have of it; None: nothing
    altered: bool = field(init=False)  # history or masks change its logits before a token is chosen
    prompt_len: int = field(init=False)
    max_total_tokens: int = field(init=False)  # tokens of prompt and answer by max_tokens

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.prompt_len = len(self.request.prompt)
        self.altered = self.request.params.altered
        self.max_total_tokens = self.prompt_len + self.request.params.max_tokens

    @property
    def cache_keys(self) -> abc.Sequence[int]:
        """The keys of its tokens in the prefix cache: the tokens, and at the positions of a span its content."""
        if not self.request.spans:
            return self.tokens
        keys = list(self.tokens)
        for span in self.request.spans:
            keys[span.start : span.end] = span.keys
        return keys

    def span_at(self, position: int) -> SoftSpan | None:
        return next((span for span in self.request.spans if span.start <= position < span.end), None)

    def unbroken(self, position: int) -> bool:
        """No prompt chunk may end before this position: it lies inside an image whose rows see each other."""
        return any(span.bidirectional and span.start < position < span.end for span in self.request.spans)

    def chunk_end(self, start: int, end: int) -> int:
        """The end of a prompt chunk from `start` that would end at `end`. A chunk holds text or rows of one image; an
        image whose rows see each other is never split. It depends on the prompt only."""
        for span in self.request.spans:
            if start < span.start:
                return min(end, span.start)
            if start < span.end:
                return span.end if span.bidirectional else min(end, span.end)
        return end

    @property
    def active_cache(self) -> SeqCache:
        """The cache entry of a running sequence."""
        assert self.cache is not None, f"{self.request.id} does not run"
        return self.cache

    @property
    def prefix_root(self) -> bytes:
        """K/V is shared within a namespace only, and among sequences whose adapter has the same content."""
        namespace = self.request.namespace
        return namespace if self.adapter is None else namespace + b" adapter " + self.adapter.digest

    @property
    def remaining(self) -> int:
        """How many more tokens max_tokens allows."""
        return self.max_total_tokens - len(self.tokens)


class PromptChunk(NamedTuple):
    """Rows of one sequence's prompt in a step: `num_tokens` from position `start` on."""

    seq: Sequence
    slot: int
    start: int
    num_tokens: int
    # A draft starts from the last row's output. Other rows compute no more than their K/V (types.OutputRows).
    wanted: bool = True


class DecodeRow(NamedTuple):
    """A decoding sequence in a step: its newest token, and what to draft after it."""

    seq: Sequence
    slot: int
    position: int  # of the newest token; one later for every token that a step in flight may add
    plan: DraftPlan = NO_DRAFT
    # Drafted tokens that the host knows: plan.k, and as many more as a step in flight may add. None: a drafter's.
    host_draft: abc.Sequence[int] | None = None

    @property
    def needs_draft(self) -> bool:
        """True if a network has to draft for it in this step."""
        return self.plan.k > 0 and self.host_draft is None


PromptChunks = abc.Sequence[PromptChunk]
DecodeRows = abc.Sequence[DecodeRow]
# acceptance by a drafter's confidence, of the drafters whose drafts may end themselves
Trust = Mapping[str, abc.Sequence[float]]


@dataclass(slots=True)
class StepBatch:
    prompts: list[PromptChunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    trust: Trust = field(default_factory=dict)

    @property
    def adapted(self) -> bool:
        """Some sequence decodes with an adapter."""
        return any([item.seq.adapter is not None for item in self.decode])


@dataclass(frozen=True, slots=True)
class PrefillDebt:
    """Prompts beyond the budgets of earlier steps, to be repaid by later ones."""

    overdrawn: int = 0  # rows of images that may not be split
    charged: Mapping[str, float] = field(default_factory=dict)  # steps that a client's next prompt rows wait

    def repaid(self, rows: int) -> PrefillDebt:
        """The debt after a step with room for so many prompt rows."""
        charged = {client: steps - 1.0 for client, steps in self.charged.items() if steps > 1.0}
        return PrefillDebt(max(0, self.overdrawn - rows), charged)

    def waits(self, client: str) -> bool:
        return self.charged.get(client, 0.0) >= 1.0


@dataclass(slots=True)
class StepPlan:
    """The scheduler's decision about the next step. Nothing is booked until `Scheduler.commit_plan`."""

    batch: StepBatch
    cycle: CyclePlan | None  # what the controller proposed for the decoding sequences
    debt: PrefillDebt  # after this step
    background_skips: int = 0  # steps in a row without the clients in the background, this one included


@dataclass(frozen=True, slots=True)
class Plan:
    """A step as one executor will run it; executors add their own data in subclasses."""

    batch: StepBatch


@dataclass(slots=True)
class PendingStep:
    """A step that was launched and not yet read."""

    executor: Executor
    batch: StepBatch
    began: float  # when its decode rows were started: prompt chunks come before
    rows: int = 0  # prompt rows of this step, with the padding of captured passes
    # drafted tokens per sequence and positions, as the cost table counts them; None: those of its rows and outputs
    width: float | None = None
    context: int | None = None
    tree: bool = False  # its drafts are trees of a fixed size, `width` deep
    # of a step that is read after the next was launched: the most tokens that each sequence may gain by it,
    inflight_tokens: abc.Sequence[int] = ()
    holders: abc.Sequence[SeqCache] = ()  # and who held each slot, which may be reused before
    outputs: DecodeOutputs | None = None  # of its decode rows; None: it has none
    arrival: torch.cuda.Event | None = None  # signals that the outputs are on the host; None: they are
    num_captures: int = 0  # the executor's, when it was launched


class StepFeatures(NamedTuple):
    """Features of a step's decode rows that an executor may not support."""

    altered: bool = False  # history or masks change the logits of some sequence
    drafts: bool = False  # some sequence has a draft, the host's or a network's
    drafters: abc.Set[str] = frozenset()  # networks that draft
    tree_drafters: abc.Set[str] = frozenset()  # those that draft trees
    filtered_trees: bool = False  # trees of sequences with filters
    adapters: abc.Set[Adapter] = frozenset()

    @staticmethod
    def of(rows: DecodeRows) -> StepFeatures:
        # one loop: between two passes over the weights every function call runs on cold caches
        altered = False
        drafts = False
        filtered_trees = False
        drafters: set[str] = set()
        tree_drafters: set[str] = set()
        adapters: set[Adapter] = set()
        for row in rows:
            seq = row.seq
            plan = row.plan
            altered = altered or seq.altered
            if plan.k > 0:
                drafts = True
                if plan.drafter is not None and row.host_draft is None:
                    drafters.add(plan.drafter)
                if plan.nodes > 0 and plan.drafter is not None:
                    tree_drafters.add(plan.drafter)
                    filtered_trees = filtered_trees or not seq.request.params.temperature_only
            if seq.adapter is not None:
                adapters.add(seq.adapter)
        if not (altered or drafts or adapters):
            return PLAIN_STEP
        return StepFeatures(
            altered=altered,
            drafts=drafts,
            drafters=drafters,
            tree_drafters=tree_drafters,
            filtered_trees=filtered_trees,
            adapters=adapters,
        )


PLAIN_STEP = StepFeatures()


class Executor(Protocol):
    name: str
    async_results: bool = False  # its steps are read after the next one was launched; otherwise at once
    trees: bool = False  # trees cost no more here than their rows, so the controller may choose them
    probes_whole_cycles: bool = False  # the draft is timed within its cycle, as it runs

    @property
    def num_captures(self) -> int:
        """So far. A step during which it captured did not take its usual time."""
        return 0

    def supports(self, features: StepFeatures) -> bool:
        """Steps with these features may run here."""
        return True

    def plan(self, batch: StepBatch) -> Plan | None:
        """How this step would run here, with everything prepared for it; None: it cannot."""

    def launch(self, plan: Plan) -> PendingStep:
        """Start a step that this executor planned."""

    def read(self, pending: PendingStep) -> DecodeOutputs | None:
        """The outputs of its decode rows, in order. Waits for this step, not for later ones."""
        return pending.outputs

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """Run one part of a step on scratch sequences to completion, for timing."""

    def prepare(self, served: bool = True, progress: Progressed = lambda what, done, total: None) -> str:
        """Create now (captured graphs) what the first requests would wait for: of a server, or of a program, which has
        fewer at once. Returns a line about it."""
        return ""

    def can_probe(self, part: CostPart) -> bool:
        """Does this executor run that part of real steps? Then its `probe` is the one to time."""
        return True

    def close(self) -> None:
        """Free what must not outlive the engine's process group."""
        return None


def pick(executors: abc.Sequence[Executor], batch: StepBatch) -> tuple[Executor, Plan]:
    """The first of the executors, fastest first, that can run this step, and its plan. The last one runs everything."""
    features = StepFeatures.of(batch.decode)
    for executor in executors:
        plan = executor.plan(batch) if executor.supports(features) else None
        if plan is not None:
            return executor, plan
    raise AssertionError("the last executor runs everything")
