"""The settings of a training run, from the command line and the TOML of a recipe. Torch-free."""

# ruff: noqa: SIM905  # tables of names are easier to read as words
from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ..types import is_a, require

Say = Callable[[str], None]
# sequences that each device answers well at a time
CPU_SLOTS = 8
GPU_SLOTS = 256


@dataclass(frozen=True)
class Bound:
    """Allowed values of a field, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def number(words: str, holds: Callable[[float], bool]) -> Bound:
    return Bound(words, lambda n: (is_a(n, int) or is_a(n, float)) and holds(n))


def one_of(*choices: str) -> Bound:
    return Bound(", ".join(filter(None, choices)), lambda value: value in choices)


COUNT = number("a whole number of at least 1", lambda n: n >= 1 and n % 1 == 0)
SIZE = number("a whole number of at least 0", lambda n: n >= 0 and n % 1 == 0)
SHARE = number("in [0, 1]", lambda n: 0.0 <= n <= 1.0)
POSITIVE = number("above 0", lambda n: 0.0 < n < float("inf"))
HEAT = number("in [0, 100]", lambda n: 0.0 <= n <= 100.0)
KIND = one_of("mtp", "dflash", "eagle3")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run. A field with a text in its annotation is an option of the command; the text is its help."""

    target: Annotated[str, "The model to draft for: smollm2, a folder, a .gguf file, or a Hugging Face id."]
    data: Annotated[Path, "Prompts as JSON lines ({'prompt': ...}), gzipped or not."]
    out: Annotated[Path, "Folder of the run; the same command continues it."]
    # the data
    eval_data: Annotated[Path | None, "Prompts to evaluate on, a file like --data. Default: held-out ones."] = None
    limit: Annotated[int | None, COUNT, "Use only the first prompts."] = None
    heldout: Annotated[int, SIZE] = 256  # prompts kept for evaluation, a fifth of all at most
    max_prompt: Annotated[int, SIZE] = 0  # longer prompts are left out; 0: 512 tokens, on a CPU 256
    max_new: Annotated[int, SIZE, "Maximum tokens per answer; 0: 192, on a CPU 96."] = 0
    temperature: Annotated[float, HEAT] = 0.8  # of sampled answers
    greedy_share: Annotated[float, SHARE] = 0.5  # of the answers
    answers_per_prompt: Annotated[float, POSITIVE] = 1.0  # on average; those after the first are sampled
    answer_seed: int | None = None  # None: seed
    slots: Annotated[int | None, COUNT] = None  # prompts answered at a time; None: 8, on a GPU 256
    categories: dict[str, float] = field(default_factory=dict)  # answers per prompt of a category, where others get 1
    carry: tuple[Path, ...] = ()  # data of earlier phases to learn from too
    carry_share: Annotated[float, SHARE] = 1.0  # share of their sampled answers that is used
    # the drafter
    kind: Annotated[str, KIND, "mtp: reads the target's K/V. dflash, eagle3: kinds other engines load too."] = "mtp"
    init: Annotated[str | None, "Start from this drafter (for a fine-tuned or quantised target)."] = None
    adapter: Annotated[str | None, "A LoRA adapter (folder, .gguf file, id): draft for the target with it."] = None
    # plain: reads any layers, head of the target; gemma: Gemma 4's layout
    style: Annotated[str, one_of("auto", "plain", "gemma")] = "auto"
    layers: Annotated[int, SIZE] = 0  # 0: 6; dflash: 4; eagle3 always has one
    kv_layers: tuple[int, ...] = ()  # plain style: the target layers to read; empty: spread over the upper half
    taps: tuple[int, ...] = ()  # target layers whose hidden state is fed in; empty: none; dflash, eagle3: 5, 3 of them
    hidden_size: Annotated[int | None, COUNT] = None  # None: the target's (plain), 256 (gemma)
    intermediate_size: Annotated[int | None, COUNT] = None
    clusters: Annotated[int | None, SIZE] = None  # clusters of the head; None: by the vocabulary; 0: no clusters
    recluster: bool = False  # with init: cluster the vocabulary again, by which tokens are likely together
    cluster_recall: Annotated[float, SHARE] = 0.99  # cluster_top is the cheapest that finds the full head's token
    cluster_top: Annotated[int | None, COUNT] = None  # number of clusters scored per step, instead of by recall
    # the loss
    unroll: Annotated[int, SIZE] = 0  # draft tokens per anchor; 0: 5, on a CPU 3; dflash: 7, a block of 8
    # share of a batch's positions that are drafted from; 0: all; dflash, eagle3: a quarter
    anchor_share: Annotated[float, SHARE] = 0.0
    loss: str = "soft=1,tv=0.5"  # weights of the terms soft, tv, hard
    greedy_loss: str = ""  # the same for greedy answers; empty: as for the others
    step_decay: Annotated[float, SHARE] = 0.8  # weight of draft step j: step_decay^(j-1)
    # how far a step's weight follows the chance that the steps before it are accepted
    survival_weight: Annotated[float, SHARE] = 0.0
    # share of a draft step's rows that the next step's loss looks at, drawn by weight
    loss_row_share: Annotated[float, SHARE] = 1.0
    cluster_grad_share: Annotated[float, SHARE] = 0.0  # share of the clustered head's gradient that reaches the drafter
    qat_start: Annotated[float, SHARE] = 1.0  # share of the run after which the layers are trained in 4 bits; 1: never
    # the optimizer
    steps: Annotated[int, COUNT, "Optimizer steps."] = 2000
    minutes: Annotated[
        float | None, POSITIVE, "Wall-clock time of loading, answering, training and evaluation, instead of --steps."
    ] = None
    answer_minutes: Annotated[float | None, POSITIVE] = None  # maximum minutes for answering
    optimizer: Annotated[str, one_of("adamw", "muon")] = "adamw"
    lr: Annotated[float, POSITIVE, "Learning rate."] = 2e-3
    warmup_steps: Annotated[int, SIZE] = 0  # 0: 50, on a CPU 10
    lr_hold: Annotated[float, SHARE] = 0.3  # share of the run at the full rate; then it falls linearly
    lr_final: Annotated[float, SHARE] = 0.02  # to this share of it
    batch_anchors: Annotated[int | None, COUNT] = None  # anchors per batch; None: by memory and speed
    seed: int = 0
    log_every: Annotated[int, COUNT] = 20
    eval_every: Annotated[int, SIZE] = 500  # steps; 0: only at the end
    save_minutes: Annotated[float, POSITIVE] = 1.0
    # where
    device: str = "cpu"
    dtype: Annotated[str, one_of("", "float32", "bfloat16")] = ""  # empty: bfloat16 if the device multiplies it
    command: str = ""

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def resolved(self) -> TrainConfig:
        """Fills in the defaults that depend on the device and the kind of drafter."""
        usual = OF_DEVICE["cuda" if self.cuda else "cpu"] | OF_KIND[self.kind]
        chosen: dict[str, Any] = {name: getattr(self, name) or value for name, value in usual.items()}
        seed = self.seed if self.answer_seed is None else self.answer_seed
        return replace(self, answer_seed=seed, **chosen)

    def validated(self) -> TrainConfig:
        """Returns itself, or raises an OutriderError that names the first field out of range."""
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items():
            value = getattr(self, name)
            notes = getattr(hint, "__metadata__", ())
            option = any(isinstance(note, str) for note in notes)
            label = "--" + name.replace("_", "-") if option else f"{name} (a key of the recipe)"
            for bound in (note for note in notes if isinstance(note, Bound) and value is not None):
                require(bound.holds(value), f"{label} must be {bound.words}, got {value!r}")
        return self

    def with_values(self, values: dict[str, Any], where: str, keep: Collection[str] = ()) -> TrainConfig:
        """Returns a copy with the keys of a recipe; fields named in `keep` do not change."""
        known = {f.name for f in fields(self)} - COMMAND_ONLY
        for name in values:
            meant = "".join(f" (did you mean {near}?)" for near in get_close_matches(name, known, 1))
            require(name in known, f"{where}: unknown key {name!r}{meant}")
        changed = {key: value for key, value in values.items() if key not in keep}
        settings: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in changed.items()}
        return replace(self, **settings).validated()

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must keep, or report a change of, as JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in FREE}


@dataclass(frozen=True)
class EvalConfig:
    """The settings of an evaluation. A field with a text is an option of `eval-drafter`, as in TrainConfig."""

    prompts: Annotated[Path, "JSON lines with 'prompt', 'text' or 'turns', and optionally 'category'."]
    limit: Annotated[int | None, "Use only N prompts, spread over the file."] = None
    max_tokens: Annotated[int, "Maximum tokens to generate."] = 128
    temperature: Annotated[float, "0: greedy; else with the engine's coupled noise."] = 0.0
    raw: Annotated[bool, "No chat template."] = False
    full_head: Annotated[bool, "Score the whole vocabulary even if the drafter has a clustered head."] = False
    device: str = "cpu"
    dtype: str = "float32"


# Defaults by device, and by kind of drafter, which take precedence.
OF_DEVICE: dict[str, dict[str, float]] = {
    "cuda": {"max_prompt": 512, "max_new": 192, "unroll": 5, "warmup_steps": 50},
    "cpu": {"max_prompt": 256, "max_new": 96, "unroll": 3, "warmup_steps": 10},
}
OF_KIND: dict[str, dict[str, float]] = {
    "mtp": {"layers": 6, "anchor_share": 1.0},
    "dflash": {"layers": 4, "unroll": 7, "anchor_share": 0.25},
    "eagle3": {"layers": 1, "anchor_share": 0.25},
}
COMMAND_ONLY = set("target adapter data out eval_data carry command device".split())
# Settings that may change freely in a resumed run. A change of CHANGEABLE is reported; all others are refused.
FREE = COMMAND_ONLY | set("minutes answer_minutes slots dtype save_minutes log_every".split())
CHANGEABLE = set(
    "steps lr warmup_steps lr_hold lr_final unroll step_decay survival_weight loss_row_share anchor_share loss "
    "greedy_loss cluster_grad_share eval_every cluster_recall cluster_top".split()
)
