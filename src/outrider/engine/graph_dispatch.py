"""Which graph a step runs in, and which are captured before the first request.

`GraphDispatcher.key` is the graph of a step's own size and features. Before requests are served, at a first start, it
is captured when it is first needed. A server captures some (`warmup_keys`; `first_keys` for programs) and prefers
those: the cheapest that covers the step, with idle sequences, masked drafts, a longer context or more sampling features
and the same bits (`cheapest_covering`); else a capture with padding (`padded`), as all requests wait for a capture. A
step that has run `OFTEN_STEPS` times in an `oversized` graph gets its own.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ..spec.plan import DEEPEST, TIMED, VERIFY, CostPart
from ..spec.slot_sampling import NO_FEATURES, SamplingFeatures
from ..types import MAX_DRAFT, SamplingParams
from .decode import Choosing, DraftSource, Key, choosing_of
from .step import DecodeRows, Sequence

if TYPE_CHECKING:
    from ..ops.backend import Capabilities
    from .decode_graphs import DecodeGraphs

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# positions of the nearest context, and how many times as far the next one reaches
NEAR_CONTEXT = 2048
FAR_FACTOR = 4
FAR_BATCH = 16  # sequences for which a server captures the second context at start
ADVISED_BATCH = 32  # those for which it captures the way of choosing that the model advises
# steps; sequences that cost about as much as one
OFTEN_STEPS = 64
FEW_SEQS = 8
# the K of graphs with padding: the last tokens of an answer are drafted with ever smaller ones
PADDED_K = (4, 8, 16)
TREE_POSITIONS = 1 << 18  # of all sequences of a step with trees: attention keeps sums of every row for every split
MAX_TREE_SEQUENCES = 8  # of a step with trees
# tokens of the trees that are captured: with the newest token 8 or 16 rows, which is what tiles of products hold
CAPTURED_NODES = 7, TIMED
MIN_CONTEXT = 512  # the smallest bound of a graph's context; bounds double
WAYS: tuple[Choosing, ...] = get_args(Choosing)  # each includes the features of the earlier ones


@dataclass(frozen=True)
class GraphLimits:
    """Limits of a captured step."""

    batch: int  # sequences
    context: int  # positions
    rows: int


class BatchFeatures(NamedTuple):
    """The sampling features of a batch, which stay the same until the batch changes."""

    seqs: list[Sequence]
    choosing: Choosing
    asks: SamplingFeatures


class StandIn(NamedTuple):
    """The graph that steps of some key run in, and the number of such steps so far."""

    key: Key
    num_steps: int


class SingleDrafts(NamedTuple):
    """Drafts of a single sequence that the controller may choose, beyond a server's K."""

    widths: tuple[int, ...] = ()  # K of chains
    tree_depths: tuple[int, ...] = ()


class GraphDispatcher:
    def __init__(
        self,
        graphs: DecodeGraphs,
        capabilities: Capabilities,
        max_position: int,
        widths: abc.Sequence[int],
        advised: SamplingParams,
        single: SingleDrafts,
    ):
        """max_position: sequences end there. widths, advised, single: of `GraphExecutor`."""
        drafter = graphs.runner.drafter
        assert drafter is None or drafter.in_graph, f"{drafter.name} cannot run inside a graph"
        self.graphs = graphs
        self.capabilities = capabilities
        self.drafter = drafter
        self.num_eos = len(graphs.runner.eos)
        self.trees = drafter is not None and capabilities.trees and drafter.max_nodes(1) > 0
        self.serving = False  # requests are being served: capture only if no graph fits
        self.limits = GraphLimits(
            batch=min(capabilities.bucket(graphs.inputs.idle), capabilities.graph_batches[-1]),
            context=bound_of(max_position),
            rows=capabilities.graph_rows,
        )
        members = drafter.members if drafter is not None else ()
        max_tokens = [member.max_tokens for member in members] or [0]  # a block of 8 drafts 7
        self.max_k = max(max_tokens)  # of a drafter's chains
        self.widths = tuple(sorted({*capabilities.graph_widths, *max_tokens}))  # K of the graphs
        served_widths = [self.width_for(k) for k in widths]
        self.warmup_widths = tuple(k for k in served_widths if k == 0 or drafter is not None)
        self.names = tuple(member.name for member in members) if len(members) > 1 else (None,)  # as in `Key.drafter`
        self._advised = choosing_of([advised])
        self._single = single
        self._last_batch = BatchFeatures([], "greedy", NO_FEATURES)
        self._stand_ins: dict[Key, StandIn] = {}
        self._num_drops = 0  # of the graphs, when the stand-ins were last valid

    def width_for(self, k: int) -> int:
        """The smallest K of a graph that drafts this many tokens."""
        return next(width for width in self.widths if width >= k)

    # ---- keys
    def key(self, rows: DecodeRows) -> Key | None:
        """The key of these sequences' own graph; None: they need the eager executor."""
        if self.graphs.broken is not None or len(rows) > self.capabilities.graph_batches[-1]:
            return None
        if len(self.names) > 1 and len(_drafters(rows)) > 1:
            return None  # a graph runs one drafter
        features = self._batch_features([row.seq for row in rows])
        asks = features.asks
        k = self.width_for(max(row.plan.k for row in rows))
        source: DraftSource | None = None
        if k > 0:
            source = "drafted" if asks.grammar else _draft_source(rows)
        furthest = max(row.position + 1 + row.seq.num_inflight_tokens for row in rows)
        nodes = self.tree_nodes(rows, k, furthest) if source == "drafter" and asks == NO_FEATURES else 0
        # A server may run chains in a graph of more drafted tokens, which writes K/V of as many positions.
        written_ahead = max(MAX_DRAFT if self.serving and k else k, nodes)
        return Key(
            batch=self.capabilities.bucket(len(rows)),
            k=k,
            context=bound_of(furthest + written_ahead),
            choosing=features.choosing,
            source=source,
            asks=asks,
            nodes=nodes,
            adapted=any([row.seq.adapter is not None for row in rows]),
            drafter=self._drafter_name(rows) if source in ("drafter", "both") else None,
        )

    def draft_key(self, key: Key, rows: DecodeRows) -> Key | None:
        """The key of the graph that drafts before a step of this key, as the masks of its grammars depend on the
        drafts; None: nothing has to be drafted before."""
        if key.k == 0 or not key.asks.grammar:
            return None
        source = _draft_source(rows) if any(row.plan.k for row in rows) else "host"
        drafter = self._drafter_name(rows)
        return replace(key, source=source, part="draft", asks=NO_FEATURES, adapted=False, drafter=drafter)

    def probe_key(self, part: CostPart, batch: int, k: int, context: int) -> Key:
        """The key of the graph that times one part of a step: a verify pass, a draft, or a cycle with a tree k deep."""
        width = self.width_for(k)
        tree = part.kind == "tree"
        drafter = part.drafter if len(self.names) > 1 else None
        nodes = min(TIMED, self.drafter.member(drafter).max_nodes(width)) if tree and self.drafter is not None else 0
        step_part: Literal["cycle", "draft"] = "cycle" if part == VERIFY or tree else "draft"
        source: DraftSource | None = None
        if step_part == "draft" or tree:
            source = "drafter"
        elif width > 0:
            source = "host"
        return Key(
            batch=self.capabilities.bucket(min(batch, self.capabilities.graph_batches[-1])),
            k=width,
            context=bound_of(context + max(width, nodes) + 1),
            choosing="greedy",
            source=source,
            part=step_part,
            nodes=nodes,
            drafter=drafter,
        )

    def warmup_keys(self, served: bool) -> list[Key]:
        """The steps to capture before the first request of a server, or of a program (`served` is False)."""
        keys_of = warmup_keys if served else first_keys
        keys = keys_of(self.limits, self.warmup_widths, drafters=self.names, advised=self._advised)
        keys = sorted([*keys, *self._single_keys()], key=lambda key: -key.batch * (key.drafted + 1))
        adapters = self.graphs.runner.adapters
        slots = adapters.slots if adapters is not None else None
        if slots is not None and slots.weights:
            keys = [replace(key, adapted=adapted) for key in keys for adapted in (False, True)]
        return keys

    def _single_keys(self) -> list[Key]:
        """The chains and trees of `SingleDrafts`, which a first request would wait for."""
        if self.drafter is None:
            return []
        context = min(NEAR_CONTEXT, self.limits.context)
        general = max("sampled", self._advised, key=WAYS.index)
        keys = list[Key]()
        for name in self.names:
            drafter = self.drafter.member(name)
            for k in self._single.widths:
                if k <= drafter.max_tokens:
                    keys.append(Key(1, k, context, choosing=general, source="drafter", drafter=name))
            for depth in self._single.tree_depths if self.trees else ():
                nodes = min(TIMED, drafter.max_nodes(depth))
                for choosing in dict.fromkeys(("greedy", general)):
                    if depth < nodes and depth <= drafter.max_tokens:
                        tree = Key(1, depth, context, choosing=choosing, source="drafter", nodes=nodes, drafter=name)
                        keys.append(tree)
        return [key for key in keys if key.drafted < self.limits.rows]

    def tree_nodes(self, rows: DecodeRows, depth: int, furthest: int) -> int:
        """Tokens of each sequence's tree in this step; 0: chains, as no request uses trees, they would be too deep or
        too wide, or the step has penalties, masks, logprobs or drafts from the host."""
        # pages are reserved for this many rows of each; a sequence without a draft keeps its root
        max_nodes = min(row.plan.nodes for row in rows if row.plan.k)
        fits = depth < max_nodes and depth <= DEEPEST and len(rows) * furthest <= TREE_POSITIONS
        if self.drafter is None or not self.trees or not fits:
            return 0
        drafter = self.drafter.member(self._drafter_name(rows))
        nodes = min(max((n for n in CAPTURED_NODES if n <= max_nodes), default=0), drafter.max_nodes(depth))
        return nodes if nodes > depth and len(rows) <= MAX_TREE_SEQUENCES else 0

    def _batch_features(self, seqs: list[Sequence]) -> BatchFeatures:
        if self._last_batch.seqs != seqs:
            params = [seq.request.params for seq in seqs]
            self._last_batch = BatchFeatures(seqs, choosing_of(params), SamplingFeatures.of(params, self.num_eos))
        return self._last_batch

    def _drafter_name(self, rows: DecodeRows) -> str | None:
        return next(iter(_drafters(rows)), None) if len(self.names) > 1 else None

    # ---- dispatch
    def dispatch(self, wanted: Key) -> Key:
        """The graph that a step of this key runs in: its own or, while requests are served, one that covers it."""
        if not self.serving:
            return wanted
        if self._num_drops != self.graphs.num_drops:  # a stand-in may be gone
            self._num_drops = self.graphs.num_drops
            self._stand_ins.clear()
        earlier = self._stand_ins.get(wanted)
        if earlier is None:
            key = self._covering(wanted)
            num_steps = 0
        else:
            key = earlier.key
            num_steps = earlier.num_steps
            if num_steps == OFTEN_STEPS and oversized(key, wanted):
                key = self._captured(replace(wanted, context=self._padded(wanted).context)) or key
        self._stand_ins[wanted] = StandIn(key, num_steps + 1)
        return key

    def _covering(self, wanted: Key) -> Key:
        """A captured graph that covers this key; else one with padding, captured now; else its own."""
        return stand_in(self.graphs.cache.graphs, wanted) or self._captured(self._padded(wanted)) or wanted

    def _padded(self, wanted: Key) -> Key:
        return padded(wanted, self.limits, MAX_DRAFT if wanted.source == "host" else self.max_k)

    def _captured(self, key: Key) -> Key | None:
        """This graph, captured now; None if that fails: it is optional."""
        return key if self.graphs.capture(key, optional=True) is not None else None


def _drafters(rows: DecodeRows) -> set[str | None]:
    return {row.plan.drafter for row in rows if row.plan.k and row.host_draft is None}


def _draft_source(rows: DecodeRows) -> DraftSource:
    sources: set[DraftSource] = {"drafter" if row.host_draft is None else "host" for row in rows if row.plan.k}
    return "both" if len(sources) == 2 else sources.pop()


def bound_of(positions: int) -> int:
    """The context bound of a graph for this many positions."""
    return max(MIN_CONTEXT, 1 << (positions - 1).bit_length())


def covers(there: Key, wanted: Key) -> bool:
    same = replace(there, batch=0, k=0, context=0, choosing=wanted.choosing) == replace(wanted, batch=0, k=0, context=0)
    deep = there.k == wanted.k or (there.k > wanted.k > 0 and not wanted.nodes)
    wide = there.batch >= wanted.batch and there.context >= wanted.context
    return same and deep and wide and WAYS.index(there.choosing) >= WAYS.index(wanted.choosing)


def cheapest_covering(there: Iterable[Key], wanted: Key) -> Key | None:
    fit = [key for key in there if covers(key, wanted)]
    return min(fit, key=lambda key: (key.batch * (key.k + 1), WAYS.index(key.choosing), key.context), default=None)


def oversized(stand_in: Key, wanted: Key) -> bool:
    """True if a step of this key is notably slower in the graph that stands in for its own."""
    return stand_in.k > wanted.k or stand_in.nodes != wanted.nodes or stand_in.batch > max(wanted.batch, FEW_SEQS)


def padded(key: Key, limits: GraphLimits, max_k: int = 0) -> Key:
    """The key to capture for a step that no graph covers. max_k: the maximum K of a chain; 0: K stays. Trees get a
    longer context only, as far as attention's partial sums of their rows allow."""
    context = NEAR_CONTEXT
    while context < key.context:
        context *= FAR_FACTOR
    context = max(key.context, min(context, limits.context))
    if key.nodes:
        return replace(key, context=context) if key.batch * context <= TREE_POSITIONS else key
    batch = next((size for size in BATCHES if size >= key.batch), key.batch)
    if batch > limits.batch or batch * (key.drafted + 1) > limits.rows:
        batch = key.batch
    k = next((k for k in PADDED_K if k >= key.k), key.k) if key.k > 0 else 0
    if k > max_k or batch * (k + 1) > limits.rows:
        k = key.k
    return replace(key, batch=batch, k=k, context=context)


def stand_in(there: Iterable[Key], wanted: Key) -> Key | None:
    """The graph that a step runs in, of those there are; chains stand in for a tree."""
    keys = list(there)
    return cheapest_covering(keys, wanted) or cheapest_covering(keys, replace(wanted, nodes=0))


def warmup_keys(
    limits: GraphLimits,
    widths: abc.Sequence[int],
    *,
    drafters: abc.Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """A server's steps, those of most rows first, whose memory the others reuse. widths: the K; drafters: of `Key`;
    advised: how requests choose that follow the model's own advice."""
    near = min(NEAR_CONTEXT, limits.context)
    far = min(NEAR_CONTEXT * FAR_FACTOR, limits.context)
    batches = [*(size for size in BATCHES if size < limits.batch), limits.batch]
    shapes = [(batch, near) for batch in batches]
    if limits.context > NEAR_CONTEXT:
        shapes += [(batch, far) for batch in batches if batch <= FAR_BATCH]
    ways: tuple[Choosing, ...] = ("sampled", "greedy")
    keys: list[Key] = []
    for k in dict.fromkeys(widths):
        for batch, context in shapes:
            if batch * (k + 1) > limits.rows:
                continue
            for way in ways:
                keys.append(Key(batch, k, context, choosing=way, source="drafter" if k > 0 else None))
    if advised not in ways:
        nearest = [key for key in keys if key.choosing == ways[0] and key.context == near]
        keys += [replace(key, choosing=advised) for key in nearest if key.batch <= ADVISED_BATCH]
    keys = [replace(key, drafter=name) for key in keys for name in (drafters if key.k else (None,))]
    return sorted(keys, key=lambda key: -key.batch * (key.k + 1))


def first_keys(
    limits: GraphLimits,
    widths: abc.Sequence[int],
    *,
    drafters: abc.Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """Those of `warmup_keys` that the first requests of a program need: one and few sequences, the nearest context."""
    near = min(NEAR_CONTEXT, limits.context)
    keys = warmup_keys(limits, widths, drafters=drafters, advised=advised)
    return [key for key in keys if key.batch in (1, min(FEW_SEQS, limits.batch)) and key.context == near]
