"""The types that the packages exchange. Torch-free at run time.

Shapes: B sequences, R rows (a row is one token of one sequence in one forward pass), K drafted tokens, V vocabulary
entries, H hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from numpy import ndarray
    from tokenizers import Tokenizer
    from torch import Tensor

GroupName = Literal["full", "sliding"]
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
MAX_DRAFT = 16
DEFAULT_TEMPERATURE = 0.7  # of conversations, if neither the request nor the checkpoint sets one
GREEDY_EPS = 1e-5  # below this temperature the choice is greedy


class OutriderError(Exception):
    """Bad input. The message is one line: what, where, how to fix it. The CLI exits with 2, the server answers 4xx."""


def require(ok: bool, what: str) -> None:
    if not ok:
        raise OutriderError(what)


@contextmanager
def bad_input(kinds: type[Exception] | tuple[type[Exception], ...], say: Callable[[Any], str]) -> Iterator[None]:
    """Re-raises these exceptions as `OutriderError(say(error))`."""
    try:
        yield
    except kinds as error:
        raise OutriderError(say(error)) from None


def is_a(value: object, kind: type) -> bool:
    """True for numbers of this kind, excluding bools."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class AttnSpec:
    """A layer's attention parameters, as attention ops read them."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_layer: int  # the layer whose K/V is read (its own index when it owns K/V)
    writes: bool  # False: query-only (shared K/V, or a drafter's layer)
    window: int | None = None  # sliding: query i sees keys j with 0 <= i - j < window
    scale: float = 1.0
    k_eq_v: bool = False  # no v projection: v is the (raw) k projection
    norm_v: bool = False  # scale-free RMSNorm on v
    eps: float = 1e-6

    @property
    def group(self) -> GroupName:
        return "full" if self.window is None else "sliding"

    @property
    def qkv_rows(self) -> int:
        """Output rows of the fused projection: q, then k, then v."""
        return (self.heads + self.kv_parts * self.kv_heads) * self.head_dim

    @property
    def kv_parts(self) -> int:
        """Parts of the fused projection besides q: k and v, only k where that is v, none where it does not write."""
        return (1 if self.k_eq_v else 2) if self.writes else 0


@dataclass(frozen=True)
class TextFiles:
    """A checkpoint's text settings, from which `engine.text.Tokenizer` is made.

    `build` returns a `tokenizers.Tokenizer` (late: a large vocabulary takes a second to read); None: the checkpoint has
    no tokenizer.
    """

    where: str
    build: Callable[[], Tokenizer] | None
    chat_template: str | None = None
    specials: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as templates see them
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False  # plain text is encoded with bos in front
    # recommended by the checkpoint: temperature, top_p, top_k, min_p
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SoftSpan:
    """Soft tokens in a prompt, for example of an image: they take the positions `start` to `end` - 1."""

    start: int
    soft_tokens: Tensor  # [n, H] rows of the model's input as they are
    digest: bytes  # of what the encoder read, such as pixels
    bidirectional: bool  # its rows see each other on sliding layers, so that a pass must hold all of them
    pad_id: int = 0  # per-layer embeddings are read at this id

    @property
    def end(self) -> int:
        return self.start + int(self.soft_tokens.shape[0])

    @property
    def keys(self) -> range:
        """Ids for the prefix cache's keys in place of tokens; negative, so that they equal no token."""
        first = -int.from_bytes(self.digest, "little") - (1 << 32)
        return range(first, first + self.end - self.start)


@dataclass
class KVPages:
    """The cache as kernels see it: position p of table row b is in page `tables[group][b, p // page_size]` at slot `p
    % page_size`. Page 0 is a scratch page: rows that pad a batch write there."""

    page_size: int
    keys: Sequence[Tensor | None]  # per target layer that owns K/V: [pages, kv_heads, page_size, head_dim]
    values: Sequence[Tensor | None]
    tables: Mapping[GroupName, Tensor]  # int32 [B, max_pages]

    def view(self, positions: Tensor, row_seq: Tensor, row_start: Tensor, max_rows: int, max_context: int) -> KVView:
        """The view of a pass over these rows of the B sequences."""
        return KVView(
            self.page_size,
            self.keys,
            self.values,
            tables=self.tables,
            positions=positions,
            row_seq=row_seq,
            row_start=row_start,
            max_rows=max_rows,
            max_context=max_context,
        )


@dataclass
class KVView(KVPages):
    """The cache as one forward pass may access it. Row r of sequence `row_seq[r]` sits at `positions[r]` and sees the
    sequence's keys up to there, within the window. Sequence b has the rows `row_start[b] .. row_start[b+1]`."""

    positions: Tensor  # int64 [R]
    row_seq: Tensor  # int64 [R]
    row_start: Tensor  # int32 [B + 1]
    max_rows: int  # maximum rows of one sequence (on the host: kernels choose tiles with it)
    max_context: int  # an upper bound of positions + 1 and of kv_slots + 1 (on the host)
    # Rows of a DraftTree: a sequence's first row is its newest token, at position `base`. Row r is written to
    # `kv_slots[r]` = base + its index among the sequence's rows; for position base + d it reads slot
    # base + `ancestors[r, d]` (ops.trees.TreeRows). None: rows form a chain, each written at its position.
    kv_slots: Tensor | None = None  # int64 [R]
    ancestors: Tensor | None = None  # int32 [R, deepest + 1]


@dataclass(frozen=True, eq=False)
class BlockAttn:
    """Attention of a block drafter's layer: to the stored positions before the block, and within it."""

    spec: AttnSpec  # `kv_layer` and `window` are the store's: where it keeps K/V, and how far back
    window: int | None  # the layer's own: a row sees keys less than this many positions away
    causal: bool  # a row sees no later row of its block
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class BlockRows:
    """K/V of the rows of a block, which is never stored: row j is at position `end` + j."""

    keys: Tensor  # [B, kv_heads, rows, D]
    values: Tensor
    end: Tensor  # int64 [B] number of positions before the block


@dataclass(frozen=True)
class OutputRows:
    """Rows of a pass whose output is needed, if not all are; the others stop after the last layer that writes K/V. The
    output rows have the same bits as in a full pass."""

    rows: Tensor  # int64 [W] indices into the pass's R rows, ascending; an index may occur twice
    kv: KVView  # the same cache, as a view of the W rows


@dataclass(frozen=True)
class DraftRound:
    """State that the steps of an MTP drafter's round share: the view and the position are constant."""

    kv: KVView  # one row per sequence, at the last position that the target has computed
    angles: Sequence[tuple[Tensor, Tensor]] = ()  # one (cos, sin) pair per rope variant
    taps: Tensor | None = None  # [B, taps·Hb] at unit scale


@dataclass(frozen=True)
class DraftTree:
    """A sequence's draft, which may branch: row 0 is the newest token, drafted token j (from 1) follows row parents[j
    - 1] < j. The main chain, of the likeliest tokens, comes first."""

    tokens: Sequence[int]  # empty if only the tree's shape was read back from the device
    parents: Sequence[int]

    @property
    def ancestors(self) -> list[list[int]]:
        """For every row, the path of rows from row 0 to itself."""
        paths = [[0]]
        for row, parent in enumerate(self.parents, 1):
            paths.append([*paths[parent], row])
        return paths

    @property
    def chain(self) -> int:
        """Number of tokens of the main chain."""
        return next((j for j, parent in enumerate(self.parents) if parent != j), len(self.parents))

    @property
    def deepest(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


@dataclass(frozen=True)
class Draft:
    """Draft tokens [B, K], the first `lengths[b]` valid. Each follows the one before it, or its parent in a tree."""

    tokens: Tensor  # int64 [B, K]
    lengths: Tensor  # int64 [B]
    confidence: Tensor | None = None  # [B, K] the drafter's own probability of each token
    trees: Sequence[DraftTree] | None = None  # [B]


# stop [B], drop [B], trust [16], float64: confidence thresholds that end a draft
DraftEnd: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


class DraftNoise(NamedTuple):
    """Sampling of draft tokens, [B] each: the same as the target's, z / temperature + noise(seed, position, token)."""

    temperature: Tensor  # float32
    sampled: Tensor  # bool; otherwise greedy
    seed: Tensor  # int64
    position: Tensor  # int64: of the draft token, or of a round's first one


class DraftPlan(NamedTuple):
    """Draft up to k tokens, or a tree of at most `nodes` tokens, k deep. With path = Π trust[confidence]
    (`Controller.trust`), a token or branch that brings it below `drop` is left out, one below `stop` is the last; 0:
    off. Of a tree's tokens the n likeliest are verified that maximise the sum of their probabilities minus
    prices[n]."""

    drafter: str | None
    k: int
    stop: float = 0.0
    drop: float = 0.0
    nodes: int = 0
    prices: tuple[float, ...] | None = None  # [17] cost of verifying n rows, in tokens; None: all `nodes` are verified

    @property
    def max_drafted(self) -> int:
        """Maximum number of tokens to verify."""
        return max(self.k, self.nodes)


NO_DRAFT = DraftPlan(None, 0)


@dataclass(frozen=True)
class Verdict:
    """The target's decision about a draft. Committed lengths change only by a verdict."""

    accepted: Tensor  # int64 [B] number of accepted draft tokens
    tokens: Tensor  # int64 [B, K + 1] the emitted tokens: accepted drafts, then the target's own next token
    counts: Tensor  # int64 [B] = accepted + 1
    # int64 [B, K + 1] of a tree: the sequence's row that chose each emitted token; None: 0, 1, 2, ...
    rows: Tensor | None = None


class Matcher(Protocol):
    """One request's state in its grammar (engine.grammar)."""

    @property
    def failed(self) -> str | None: ...
    def bits(self, drafts: Sequence[int]) -> ndarray: ...
    def advance(self, tokens: Sequence[int]) -> None: ...


class Grammar(Protocol):
    def matcher(self) -> Matcher: ...


WHOLE = ("top_k", "min_tokens", "max_tokens", "seed", "n")
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """How the target chooses tokens. Greedy at temperature 0. Checked by `validate()`."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    min_tokens: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()  # a single text becomes a tuple of one, None an empty one
    include_stop: bool = False  # the stop string stays in the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: int | None = None  # None: off; 0: the chosen token only; n: also the n most likely
    grammar: Grammar | None = None  # masks logits position by position
    keep_special: bool = False  # text keeps control tokens other than EOS: a server parses tool calls from them

    def __post_init__(self) -> None:
        stop: object = self.stop
        if stop is None or isinstance(stop, str):  # otherwise each letter would be a stop string
            object.__setattr__(self, "stop", () if stop is None else (stop,))

    @property
    def penalised(self) -> bool:
        """Whether penalties change the logits of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def altered(self) -> bool:
        """Whether history or a mask changes the logits before a token is chosen."""
        return bool(self.penalised or self.logit_bias or self.bad_words or self.min_tokens or self.grammar is not None)

    @property
    def processed(self) -> bool:
        """Whether the logits are changed before a token is chosen, or are part of the output."""
        return self.altered or self.logprobs is not None

    @property
    def temperature_only(self) -> bool:
        """Whether only temperature and seed decide a token: no filter, history or mask."""
        filtered = self.temperature >= GREEDY_EPS and (self.top_k or self.top_p < 1.0 or self.min_p > 0.0)
        return not filtered and not self.altered

    def validate(self, vocab_size: int | None = None) -> SamplingParams:
        for kind, what, names in ((Integral, "a whole number", WHOLE), (Real, "a number", REAL)):
            for name in names:
                require(is_a(getattr(self, name), kind), f"{name} must be {what}, got {getattr(self, name)!r}")
        top = self.logprobs
        require(top is None or is_a(top, Integral), f"logprobs must be a whole number or None, got {top!r}")
        for name, ok, range_ in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "in [0, 100]"),
            ("top_k", self.top_k >= 0, ">= 0 (0 turns it off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "in (0, 10]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "in [0, max_tokens]"),
            ("n", 1 <= self.n <= 128, "in [1, 128]"),
            ("logprobs", top is None or 0 <= top <= 20, "in [0, 20]"),
        ):
            require(ok, f"{name} must be {range_}, got {getattr(self, name)}")
        texts = isinstance(self.stop, Collection) and all(isinstance(s, str) for s in self.stop)
        require(texts, "stop must be a string or a list of strings")
        require(all(self.stop), "stop strings must not be empty")
        biases = self.logit_bias.values() if isinstance(self.logit_bias, Mapping) else (None,)
        require(all(is_a(b, Real) and b == b for b in biases), "logit_bias must map token ids to numbers")
        lists = isinstance(self.bad_words, Collection) and all(isinstance(w, Collection) for w in self.bad_words)
        require(lists, "bad_words must be lists of token ids")
        require(isinstance(self.stop_token_ids, Collection), "stop_token_ids must be a list of token ids")
        require(all(w for w in self.bad_words), "bad_words must not hold an empty sequence")
        if vocab_size is not None:
            ids = [*self.logit_bias, *self.stop_token_ids, *(t for w in self.bad_words for t in w)]
            for token in ids:
                require(is_a(token, Integral), f"a token id is a whole number, got {token!r}")
                require(0 <= token < vocab_size, f"token id {token} is outside the vocabulary (0..{vocab_size - 1})")
        return self


@dataclass
class Counts:
    """Counters of one request, or of all requests together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    new_tokens: int = 0
    cycles: int = 0  # decode cycles: one per sequence and step
    drafted: int = 0
    accepted: int = 0
    cycles_by_drafted: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))  # of a tree: by its depth
    cycles_by_accepted: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))  # of cycles that drafted
    trees: int = 0  # cycles whose draft branched
    branched: int = 0  # accepted tokens that are not on the tree's main chain

    @property
    def drafted_by_position(self) -> list[int]:
        return _at_least(self.cycles_by_drafted)

    @property
    def accepted_by_position(self) -> list[int]:
        return _at_least(self.cycles_by_accepted)


def _at_least(counts: list[int]) -> list[int]:
    """From the number of cycles of each length: how many are longer than 0, 1, 2, ..."""
    return list(accumulate(reversed(counts[1:])))[::-1]


@dataclass
class RequestStats(Counts):
    """The engine's counters and times of one request, reported with its answer."""

    first_emitted: int = 0  # tokens of the first cycle: they belong to the time to first token
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last
    drafter_off: str | None = None  # why the drafter was switched off for this request, if it was

    @property
    def tokens_per_cycle(self) -> float:
        return (self.accepted + self.cycles) / self.cycles if self.cycles else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first cycle."""
        later = self.new_tokens - self.first_emitted
        return later / self.decode_s if self.decode_s > 0 and later > 0 else 0.0
