"""The composition root: `LLM.load(name)` puts model, tokenizer, drafter, controller and engine together.

llm = LLM.load("smollm2")
print(llm.generate("The capital of France is", SamplingParams(max_tokens=32))[0].text)
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch

from . import __version__
from . import ops as ops_module
from .cache.prefix_store import PrefixStore
from .config import LoadFormat, LoadSettings, parse_draft_tokens, parse_tree
from .engine.adapters import AdapterPool
from .engine.calibrate import calibrate
from .engine.engine import Engine, Event
from .engine.images import ImageEncoder, ImagePrompt, take_images
from .engine.memory import KVBudget
from .engine.shared import SharedEngine
from .engine.step import Request
from .engine.text import Messages, Tokenizer
from .models.block_config import KINDS, is_block
from .models.compat import fits, other_weights
from .models.decoder import TextModel
from .models.drafter import MTPNet
from .models.split import SOLO
from .models.vision import VisionModel
from .models.vision_config import NO_MMPROJ, NO_VISION
from .ops.backend import Backend
from .ops.cpu.ops import default_threads
from .ops.formats import DeviceWeight
from .ops.reference import ReferenceOps
from .parallel import STARTED_BY_US, Leader, PeerLost, ProcessGroup, follow, follow_to_the_end, is_worker, join
from .spec import acceptance_profile as cards
from .spec import draft_model
from .spec.block import BlockDrafter
from .spec.block_load import load_block
from .spec.controller import Controller
from .spec.cost import FORMAT, CostKey, CostTable, machine_name
from .spec.draft_model import DraftModel
from .spec.drafter import Drafter
from .spec.mtp import MTPDrafter
from .types import DEFAULT_TEMPERATURE, Json, OutriderError, RequestStats, SamplingParams
from .weights import check_shares, hub, load_drafter, load_target
from .weights.adapter import load_adapter
from .weights.files import Files, check_draft_model, fingerprint, text_files
from .weights.vision import has_vision, load_vision, vision_config

log = logging.getLogger("outrider")
Image = Any  # a path, the bytes of a file, a PIL image or a uint8 array [h, w, 3]
Prompt = str | Sequence[int] | Mapping[str, Any]  # {"text": ..., "images": [...]}
DRAFTERS = ("mtp", "ngram", "draft_model", "medusa", *KINDS)


@dataclass
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[dict[int, float]] | None = None
    kinds: list[str] | None = None  # where each token came from: accepted | corrected | bonus | plain


class LLM:
    def __init__(
        self,
        engine: Engine,
        name: str,
        drafter_note: str,
        weight_bytes: int = 0,
        team: ProcessGroup | None = None,
        vision: ImageEncoder | str = "this model takes no images",
    ):
        """vision: what reads images, or why none does."""
        self.vision = vision
        self.engine, self.name, self.drafter_note, self._weight_bytes, self.team = (
            engine,
            name,
            drafter_note,
            weight_bytes,
            team,
        )
        self.model, self.tokenizer, self.config = engine.model, engine.tokenizer, engine.model.config
        self.drafter = engine.drafter
        self.adapters = engine.runner.adapters  # None: the model is divided over several processes
        self.adapter: str | None = None  # used by requests that name none
        self._ids, self._shared = itertools.count(), SharedEngine(engine)

    @classmethod
    def load(
        cls,
        model: str,
        settings: LoadSettings = LoadSettings(),
        *,
        say: Callable[[str], None] = log.info,
        **changes: object,
    ) -> LLM:
        """`changes`: fields of the settings, as in LLM.load("smollm2", drafter="none"). Where the model is divided over
        several processes (`tensor_parallel`, outrider.parallel) the others never come back from here."""
        if not isinstance(settings, LoadSettings):
            raise OutriderError(
                f"LLM.load takes {settings!r} by its name only: LLM.load({model!r}, drafter=..., draft_tokens=...)"
            )
        settings = settings.changed(changes)
        if settings.tensor_parallel == 1:
            return cls._open(model, settings, say)
        if is_worker():
            worker(settings.device)
        if "RANK" not in os.environ:  # those who are there already are told what is wrong while they load
            check_shares(model, settings.tensor_parallel)
        team = join(settings.tensor_parallel, settings.device)
        try:
            team.send((model, settings))
            return cls._open(model, settings, say, team)
        except KeyboardInterrupt:
            team.abandon()
            raise

    @classmethod
    def _open(
        cls, model: str, settings: LoadSettings, say: Callable[[str], None], team: ProcessGroup | None = None
    ) -> LLM:
        engine, note, size, key, vision = assemble(model, settings, say, team)
        if team is not None:
            Leader(engine, team)
        if key is not None:
            digest = hashlib.blake2b(
                "|".join((key.machine, key.model, key.version)).encode(), digest_size=8
            ).hexdigest()
            engine.controller.cost = calibrate(engine, key, hub.cache_path("costs", f"{digest}.json"))
        return cls(engine, model, note, size, team, vision)

    @property
    def nbytes(self) -> int:
        """What the target's weights and the K/V of all sequences take (of a divided model: in this process)."""
        return self._weight_bytes + self.engine.store.bytes() + (self.adapters.nbytes if self.adapters else 0)

    def close(self) -> None:
        """End the other processes: those of a model that is divided over several, and the one that decodes images."""
        if isinstance(self.vision, ImageEncoder):
            self.vision.close()
        if self.team is not None:
            self.team.close()

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling as a server or `outrider chat` has it: `given`, then what the model's maker advises
        (generation_config.json), else a temperature of 0.7. `generate`, `stream` and `chat` without `params` are
        greedy."""
        advice = {} if self.tokenizer is None else self.tokenizer.files.sampling
        return SamplingParams(**{**(advice or {"temperature": DEFAULT_TEMPERATURE}), **given}).validate()

    # ---- running --------------------------------------------------------------------------------------------------
    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        draft_tokens: int | str | None = None,
        drafter: bool | str = True,
        tree: int | str | None = None,
        adapter: str | None = None,
    ) -> list[Request]:
        """One request for each of `params.n` answers; answer i has seed + i."""
        if not isinstance(params, SamplingParams):
            raise OutriderError(f"params must be SamplingParams, got {params!r}: SamplingParams(max_tokens=...)")
        if not isinstance(drafter, bool) and drafter not in DRAFTERS:
            raise OutriderError(f"drafter must be True, False or one of {', '.join(DRAFTERS)}, got {drafter!r}")
        params.validate()
        ids, group = self._encode(prompt), next(self._ids)
        draft_tokens, tree = parse_draft_tokens(draft_tokens), parse_tree(tree)
        answers = [replace(params, seed=params.seed + i, n=1) for i in range(params.n)]
        return [
            Request(
                f"{group}.{i}",
                ids,
                answer,
                draft_tokens,
                drafter,
                tree=tree,
                adapter=adapter or self.adapter,
                images=getattr(ids, "images", ()),
            )
            for i, answer in enumerate(answers)
        ]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        draft_tokens: int | str | None = None,
        drafter: bool | str = True,
        tree: int | str | None = None,
        adapter: str | None = None,
    ) -> list[Completion]:
        """All answers, in order (n of them for each prompt). `draft_tokens`, `tree`: None leaves them as they were
        loaded. `adapter`: the name of a loaded LoRA adapter."""
        requests = [
            r
            for p in each_prompt(prompts)
            for r in self.requests(p, params or SamplingParams(), draft_tokens, drafter, tree, adapter)
        ]
        done = {r.id: Completion("", [], "", RequestStats(), [], []) for r in requests}
        with closing(self._shared.run(requests)) as events:
            for event in events:
                _take(done[event.id], event)
        return [done[r.id] for r in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        draft_tokens: int | str | None = None,
        drafter: bool | str = True,
        adapter: str | None = None,
    ) -> Generator[Event, None, None]:
        """One answer as it comes (the first of `params.n`). Closing the iterator aborts the request and frees its
        pages."""
        (request, *_) = self.requests(prompt, params or SamplingParams(), draft_tokens, drafter, adapter=adapter)
        yield from self._shared.run([request])

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        draft_tokens: int | str | None = None,
        drafter: bool | str = True,
        adapter: str | None = None,
    ) -> Completion:
        return self.generate(self.chat_prompt(messages), params, draft_tokens, drafter, adapter=adapter)[0]

    def chat_prompt(self, messages: Iterable[Mapping[str, Json]], tools: Json = None) -> list[int]:
        listed = list(messages)
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in listed):
            raise OutriderError("messages are a list such as [{'role': 'user', 'content': 'Hello'}]")
        texts, images = take_images(listed)
        ids = self._tokenizer().chat(texts, tools)
        return self.images().expand(ids, images) if images else ids

    def encode_chat(self, prompt: str | Messages, raw: bool = False, images: Sequence[Image] = ()) -> list[int]:
        """Ids of what a user says, with these images before it: through the chat template where the model has one,
        unless `raw`."""
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if images and raw:
            return self._encode({"text": str(messages[-1]["content"]), "images": images})
        if images:
            self.images()  # an error where the model takes none
            parts: Any = [*({"type": "image", "image": image} for image in images)]
            last = {**messages[-1], "content": [*parts, {"type": "text", "text": messages[-1]["content"]}]}
            return self.chat_prompt([*messages[:-1], last])
        if not raw and self.tokenizer is not None and self.tokenizer.has_chat_template:
            return self.chat_prompt(messages)
        text = str(messages[-1]["content"])
        if not text:
            raise OutriderError("the prompt is empty")
        return self._encode(text)

    def images(self) -> ImageEncoder:
        """What reads images; an error where the model takes none."""
        if isinstance(self.vision, str):
            raise OutriderError(self.vision)
        return self.vision

    def _with_images(self, prompt: Mapping[str, Any]) -> list[int]:
        """{"text": ..., "images": [...]}: images stand where the text has `<|image|>` (Gemma 3: `<start_of_image>`), or
        before it."""
        unknown = set(prompt) - {"text", "images"}
        if unknown or not isinstance(prompt.get("text"), str | list):
            raise OutriderError(
                "a prompt with images is {'text': ..., 'images': [...]}, and nothing else (conversations: LLM.chat)"
            )
        text, images = prompt["text"], list(prompt.get("images") or ())
        if not images:
            return self._encode(text)
        vision = self.images()
        ids = self._encode(self._tokenizer().with_image_text(text) if isinstance(text, str) else text)
        if vision.config.placeholder_id not in ids:
            at = 1 if self.config.bos_id is not None and ids[:1] == [self.config.bos_id] else 0
            ids[at:at] = [vision.config.placeholder_id] * len(images)
        return vision.expand(ids, images)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, ImagePrompt):
            return prompt
        if isinstance(prompt, Mapping):
            return self._with_images(prompt)
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt, bos=True)
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise OutriderError(
                f"a prompt is a text or a list of token ids, got {str(prompt)[:60]!r} (conversations: LLM.chat)"
            ) from None

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise OutriderError(f"{self.name} has no tokenizer: pass token ids")
        return self.tokenizer


def each_prompt(given: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one: a text, or whole numbers in a list or an array."""
    if isinstance(given, str | Mapping | ImagePrompt):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise OutriderError(f"prompts are texts or lists of token ids, got {type(given).__name__}")
    many: list[Any] = list(given)
    return [many] if many and isinstance(many[0], SupportsIndex) and not getattr(many[0], "shape", ()) else many


def _take(completion: Completion, event: Event) -> None:
    completion.text += event.text
    completion.token_ids += event.tokens
    assert completion.kinds is not None
    completion.kinds += event.kinds
    completion.logprobs = (
        completion.logprobs + event.logprobs if event.logprobs is not None and completion.logprobs is not None else None
    )
    if event.finish_reason is not None:
        completion.finish_reason = event.finish_reason
        assert event.stats is not None
        completion.stats = event.stats
        if event.error:
            raise OutriderError(event.error)


def assemble(
    model: str, settings: LoadSettings, say: Callable[[str], None], team: ProcessGroup | None = None
) -> tuple[Engine, str, int, CostKey | None, ImageEncoder | str]:
    """The engine, the line that says who drafts, the bytes of the weights, what its costs are kept by (None: nobody
    will ask), and what reads images (or why none does). With a team: this process's part of it; what goes wrong in one
    process goes wrong in all."""
    agreed = False

    def agree(budget: KVBudget) -> KVBudget:
        nonlocal agreed
        if team is None:
            return budget
        agreed = True
        window = -1 if budget.window_tokens is None else budget.window_tokens
        context, tokens, window, rows = team.all_reduce_min(
            (budget.max_context, budget.tokens, window, budget.pass_rows)
        )
        return KVBudget(context, tokens, None if window < 0 else window, rows)

    try:
        return _assemble(model, settings, say, team, agree)
    except OutriderError as error:
        if team is not None and not agreed:
            team.all_reduce_min((), str(error))  # raises here and everywhere
        raise


def _assemble(
    model: str,
    settings: LoadSettings,
    say: Callable[[str], None],
    team: ProcessGroup | None,
    agree: Callable[[KVBudget], KVBudget],
) -> tuple[Engine, str, int, CostKey | None, ImageEncoder | str]:
    quantize, load_format, seed, threads = settings.quantize, settings.load_format, settings.seed, settings.threads
    spec, engine_config = settings.spec, settings.engine
    device = ops_module.place(settings.device) if team is None else team.device
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current device, wherever their tensors are
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if team is not None and device.type == "cpu":
        threads = threads or max(1, default_threads() // team.tp.world)  # the processes share the cores
    ops = ops_module.choose(device, settings.ops, threads)
    if ops.name == "cpu" or (team is not None and device.type == "cpu"):
        # the kernels have threads of their own; torch's would spin beside them and halve the speed
        torch.set_num_threads(1)
    tp, together = (None, SOLO) if team is None else (team.tp, team)
    if settings.drafter.startswith("draft:"):  # another vocabulary is refused before weights are fetched or read
        check_draft_model(hub.resolve(model, weights=False), hub.resolve(settings.drafter[6:], weights=False))
    files = hub.resolve(model, weights=load_format == "auto")
    # A tokenizer of a large vocabulary is made while the kernels lay weights out and need no interpreter.
    tokenizing = ThreadPoolExecutor(1).submit(lambda: Tokenizer(text_files(files))) if load_format != "dummy" else None
    config, weights, _ = load_target(
        files, device, dtype, ops, quantize=quantize, load_format=load_format, seed=seed, tp=tp
    )
    if quantize is not None and load_format == "auto":
        say(f"weights rounded to {quantize}: `outrider inspect {model} --quantize {quantize}` measures what that costs")
    target = TextModel(config, weights, ops, together)
    common = lambda: tokenizing.result().common_token_ids() if tokenizing is not None else ()  # noqa: E731
    paths = tuple(map(str, settings.adapters.values()))
    drafter, names, note = pick_drafter(files, settings.drafter, target, dtype, load_format, seed, common, paths)
    say(note)
    tokenizer = tokenizing.result() if tokenizing is not None else None
    size = sum(w.nbytes for w in weights.values())
    if team is not None:
        say(f"tensor parallel: {team.tp.world} processes, {size / 2**30:.2f} GiB of weights in the first")
    adapters = load_adapters(target, settings, say) if team is None else None
    learnt = (drafter.trained_for or "").partition("+")[2] if drafter is not None else ""
    if adapters is not None and learnt and learnt not in (adapters.get(name).digest.hex() for name in adapters.paths):
        say("the drafter was trained for another adapter, so expect fewer accepted drafts")
    vision = load_images(files, settings, ops, device, dtype)
    if isinstance(vision, ImageEncoder):
        size += vision.nbytes
        if tokenizer is not None:
            tokenizer.image_text = vision.config.image_text(tokenizer.backend.id_to_token)
    runner = ops.compile(target) if team is None else target  # whole models in one call know nothing of other processes
    profiles = {drafter.name: drafter.profile} if drafter is not None and drafter.profile is not None else {}
    prior, trust = {n: p.accepted for n, p in profiles.items()}, {n: p.trust for n, p in profiles.items()}
    counts = {n: p.counts for n, p in profiles.items() if p.weights}  # a family's figures are taken as they are
    # where steps are captured no draft ends by its confidence
    captured = ops.capabilities.graphs if engine_config.graphs is None else engine_config.graphs
    captured = captured and not (drafter is not None and drafter.kv_specs)
    controller = Controller(CostTable(), names, prior, trust=None if captured else trust, counts=counts)
    engine = Engine(
        runner,
        tokenizer,
        engine_config,
        spec,
        drafter,
        controller,
        ops.kv_dtype(dtype, engine_config.kv_dtype),
        agree=agree,
        image_rows=vision.tokens if isinstance(vision, ImageEncoder) else 0,
    )
    engine.runner.adapters = adapters
    if engine_config.prefix_store is not None:
        content = fingerprint(files) if load_format == "auto" else f"dummy {files.name} {seed}"
        kernels = f"{ops.name} {ops.version}"
        if ops.name != "cpu":  # its version is a hash of its sources
            kernels += (
                f" {__version__} {torch.__version__} "
                f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else ''}"
            )
        cut = "" if ops.capabilities.prompts_independent else f"chunk {engine.chunk}"
        identity = f"{content} {dtype} {kernels} {quantize} kv {engine.store.dtype} {engine_config.page_size} {cut}"
        folder, limit = Path(engine_config.prefix_store).expanduser(), int(engine_config.prefix_store_size * 2**30)
        engine.store.disk = PrefixStore(engine.store, folder, limit, identity)
    if device.type == "cuda":
        gib = engine.store.bytes() / 2**30
        say(
            f"K/V: {engine.kv_budget.tokens:,} tokens in {gib:.1f} GiB; up to {engine.max_batch} sequences, "
            f"{engine.max_context:,} tokens each"
        )
    if spec.draft_tokens is not None or not names:
        return engine, note, size, None, vision
    trained_for = drafter.trained_for if drafter is not None else None
    divided = "" if team is None else f" over {team.tp.world}"
    key = CostKey(
        machine_name(torch.cuda.get_device_name(device) if device.type == "cuda" else None, threads),
        f"{model} {dtype} {ops.name} {quantize} {note} {trained_for} batch {engine.max_batch} kv "
        f"{engine_config.kv_dtype}{divided}",
        f"{__version__} {FORMAT} {ops.version}",
    )
    return engine, note, size, key, vision


def load_images(
    files: Files, settings: LoadSettings, ops: Backend, device: torch.device, dtype: torch.dtype
) -> ImageEncoder | str:
    """What reads the images of this model; a text: why none are read."""
    config = vision_config(files)
    if config is None:
        return NO_MMPROJ if files.gguf is not None else NO_VISION
    if not settings.vision:
        return "images are off: the model was loaded without its vision weights (--no-vision)"
    if settings.tensor_parallel > 1:
        return "images are not read by a model that is divided over several processes (tensor parallel)"
    dummy = settings.seed if settings.load_format == "dummy" else None
    if dummy is None and not has_vision(files):
        return NO_VISION
    weights = load_vision(files, config, device, dtype, dummy)
    on_gpu, threads = device.type == "cuda", settings.threads or default_threads()
    model = VisionModel(config, weights, ops if on_gpu else ReferenceOps(), 1 if on_gpu else threads)
    return ImageEncoder(model, settings.image_tokens, settings.max_images, settings.max_image_pixels)


def load_adapters(target: TextModel, settings: LoadSettings, say: Callable[[str], None]) -> AdapterPool:
    """The settings' adapters, before K/V takes the rest of a GPU's memory."""
    weight = target.blocks[0].qkv
    short = not (isinstance(weight, torch.Tensor) and weight.dtype == torch.float32)
    to = (target.config, target.ops, target.dtype, target.device, short)
    pool = AdapterPool(target, lambda name, path: load_adapter(name, path, *to), settings.max_adapters)
    for name, path in settings.adapters.items():
        pool.add(name, str(path))
    if settings.adapters:
        size = f"{pool.nbytes / 2**20:.1f} MiB"
        say(f"adapters: {', '.join(settings.adapters)} ({size})")
    return pool


def worker(device: str | None = None) -> NoReturn:
    """A process that follows rank 0: it is told what to load, and then every step. Ends when rank 0 does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells everybody; rank 0 says what it means
    if STARTED_BY_US in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow_to_the_end()
    team = None
    try:
        team = join(int(os.environ["WORLD_SIZE"]), os.environ.get(STARTED_BY_US, device))
        told = team.receive()
        assert isinstance(told, tuple)
        model, settings = told
        try:
            engine, *_ = assemble(model, settings, lambda line: None, team)
        except OutriderError:
            team.receive()  # rank 0 says what went wrong, and that this is the end
        else:
            follow(engine, team)
        team.close()
        os._exit(0)  # threads of the collectives may abort an interpreter that is being taken down
    except OutriderError:
        pass  # rank 0 says it
    except PeerLost:
        time.sleep(60)  # rank 0 looks who is gone, says it and ends this process too: who ends first would be blamed
        log.exception("process %s failed", os.environ.get("RANK"))  # nobody ended us, so nobody else was gone
    except Exception:
        if team is None or not team.watch.ending:
            log.exception("process %s failed", os.environ.get("RANK"))
    os._exit(1)


def pick_drafter(
    model: Files,
    drafter: str,
    target: TextModel,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    always: Callable[[], Iterable[int]] = tuple,
    adapters: Sequence[str] = (),
) -> tuple[Drafter | None, tuple[str, ...], str]:
    """(the neural drafter or None, the names the controller may choose from, one line that says what and why). always:
    tokens that a draft model scores wherever they stand in the vocabulary."""
    if drafter == "none":
        return None, (), "drafter: none (plain decoding)"
    if drafter == "ngram":
        return None, ("ngram",), "drafter: ngram (suffix matches in prompt and answer)"
    where, note = hub.auto_drafter(model, adapters) if drafter == "auto" else (drafter, "as asked")
    if where is None:
        return None, ("ngram",), f"drafter: ngram ({note})"
    try:
        return _load_drafter(model, where, note, target, dtype, load_format, seed, always)
    except OutriderError as error:
        if drafter != "auto":
            kinds = (
                ""
                if "/" in drafter or Path(drafter).exists()
                else " (a drafter may also be auto, none, ngram or draft:MODEL)"
            )
            raise OutriderError(f"{error}{kinds}") from None
        return None, ("ngram",), f"drafter: ngram ({where} cannot be used: {error})"


def _load_drafter(
    model: Files,
    where: str,
    note: str,
    target: TextModel,
    dtype: torch.dtype,
    load_format: LoadFormat,
    seed: int,
    always: Callable[[], Iterable[int]],
) -> tuple[Drafter, tuple[str, ...], str]:
    ops, device = target.ops, target.device
    if where.startswith("draft:"):
        name, counts = where[6:], [0, 0]

        def cheaper(part: str, weight: DeviceWeight) -> DeviceWeight:
            """A draft model's weight, rounded where that makes guessing quicker: a guess need not be exact. The
            embedding stays as it is, since a step reads only one row of it."""
            made = weight if part == "embed" or len(weight.shape) < 2 else ops.coarse(weight)
            counts[made is weight] += 1
            return made

        vocab = check_draft_model(model, hub.resolve(name, weights=False))
        config, weights, _ = load_target(name, device, dtype, ops, load_format=load_format, seed=seed, keep=cheaper)
        listed = (
            draft_model.shortlist(vocab, always(), vocab < config.vocab_size) if ops.capabilities.shortlists else None
        )
        how = ["its weights rounded to 4 bits"] if counts[0] else []
        how += [f"{len(listed):,} of {config.vocab_size:,} tokens scored"] if listed is not None else []
        small = DraftModel(ops.compile(TextModel(config, weights, ops)), listed, target.config.vocab_size)
        return small, ("draft_model", "ngram"), f"drafter: draft model {name} ({'; '.join([note, *how])})"
    files = hub.resolve(where, kind="drafter", weights=load_format == "auto")
    if files.config.get("model_type") == "medusa":
        from .spec.medusa import Medusa

        return Medusa.load(files, target, device, dtype), ("medusa", "ngram"), f"drafter: medusa {where} ({note})"
    if is_block(files.config):
        made_block = BlockDrafter(load_block(files, target, dtype, load_format, seed))
        if load_format == "auto":
            made_block.profile = cards.read(Path(files.path), fingerprint(files)) or made_block.profile
        return made_block, (made_block.name, "ngram"), f"drafter: {made_block.name} {where} ({note})"
    tp, rounded = target.together.tp, ops.capabilities.draft_format
    own, parts = load_drafter(files, device, dtype, ops, quantize=rounded, load_format=load_format, seed=seed, tp=tp)
    reason = fits(own, target.config)
    if reason is not None:
        raise OutriderError(f"drafter {where} does not fit {target.config.model_type}: {reason}")
    drafter = MTPNet(own, parts, ops, target)
    made = MTPDrafter(ops.compile_drafter(drafter) if tp.world == 1 else drafter, target)
    if load_format == "auto":
        made.profile = cards.read(Path(files.path), fingerprint(files))
        unlike = other_weights(model.name, where, own.target_hash, fingerprint(model))
        note += f"; {unlike}" if unlike is not None else ""
    return made, ("mtp", "ngram"), f"drafter: mtp {where} ({note})"
