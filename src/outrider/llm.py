"""The library's entry point, a loaded model: `LLM.load(name)`, then `generate`, `stream` and `chat`.

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
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NoReturn, SupportsIndex, TypedDict, Unpack

from .assemble import Assembled, Say, assemble
from .config import LoadSettings, parse_draft_tokens, parse_tree
from .engine.audio import AudioEncoder
from .engine.calibrate import calibrate
from .engine.engine import Event
from .engine.images import ImageEncoder
from .engine.media import Media, take_media
from .engine.shared import SharedEngine
from .engine.soft_prompt import SoftInputs, SoftPrompt, expand
from .engine.step import Request
from .engine.text import Messages, Tokenizer
from .parallel import DEVICE_ENV, Leader, PeerLost, ProcessGroup, follow, follow_to_the_end, is_worker, join
from .types import DEFAULT_TEMPERATURE, Json, OutriderError, RequestStats, SamplingParams, bad_input, require
from .weights import hub
from .weights.load import check_shares

log = logging.getLogger("outrider")
Image = Any  # a path, the bytes of a file, a PIL image or a uint8 array [h, w, 3]
Clip = Any  # a path, the bytes of a sound file, a data URL or (samples, rate)
Prompt = str | Sequence[int] | Mapping[str, Any]  # {"text": ..., "images": [...], "audio": [...]}


class RequestOptions(TypedDict, total=False):
    """Arguments of `LLM.requests`. `draft_tokens`, `tree`: None keeps the loaded settings."""

    draft_tokens: int | str | None
    drafter: bool | str  # False: plain decoding; a name: only that drafter
    tree: int | str | None
    adapter: str | None  # its name


@dataclass
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[dict[int, float]] | None = None
    kinds: list[str] | None = None  # where each token came from: accepted | corrected | bonus | plain


class LLM:
    def __init__(self, assembled: Assembled, name: str, group: ProcessGroup | None = None, say: Say = log.info):
        engine = assembled.engine
        key = assembled.cost_key
        if group is not None:
            Leader(engine, group)
        engine.warm_up(say)
        if key is not None:
            digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
            engine.controller.replace_costs(calibrate(engine, key, hub.cache_path("costs", f"{digest}.json")))
        self.engine = engine
        self.name = name
        self.drafter_note = assembled.drafter_note
        self.group = group
        self.vision = assembled.vision
        self.audio = assembled.audio
        self._weight_bytes = assembled.weight_bytes
        self.tokenizer = engine.tokenizer
        self.config = engine.model.config
        self.model = engine.model
        self.drafter = engine.drafter
        self.adapters = engine.runner.adapters  # None: the model is divided over several processes
        self.adapter: str | None = None  # default of requests that name none
        self._ids = itertools.count()
        self._shared = SharedEngine(engine)

    @classmethod
    def load(
        cls, model: str, settings: LoadSettings = LoadSettings(), *, say: Say = log.info, **changes: object
    ) -> LLM:
        """`changes`: fields of the settings, as in LLM.load("smollm2", drafter="none"). With tensor parallelism
        (`tensor_parallel`, outrider.parallel) this call returns only in rank 0."""
        named = f"by its name only: LLM.load({model!r}, drafter=..., draft_tokens=...)"
        require(isinstance(settings, LoadSettings), f"LLM.load takes {settings!r} {named}")
        settings = settings.changed(changes)
        if settings.tensor_parallel == 1:
            return cls(assemble(model, settings, say), model, say=say)
        if is_worker():
            worker(settings.device)
        if "RANK" not in os.environ:  # ranks that already run get the error while they load
            check_shares(model, settings.tensor_parallel)
        group = join(settings.tensor_parallel, settings.device)
        try:
            group.send((model, settings))
            return cls(assemble(model, settings, say, group=group), model, group, say)
        except KeyboardInterrupt:
            group.abandon()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the target's weights and of all sequences' K/V (with tensor parallelism: of this process)."""
        return self._weight_bytes + self.engine.store.nbytes + (self.adapters.nbytes if self.adapters else 0)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the other processes: the other tensor-parallel ranks, and those that decode images and sound."""
        for encoder in (self.vision, self.audio):
            if not isinstance(encoder, str):
                encoder.close()
        if self.group is not None:
            self.group.close()

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling parameters as the server and `outrider chat` have them: `given`, then the model's
        generation_config.json, else a temperature of 0.7. Calls without `params` are greedy."""
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
        loaded = self.engine.controller.drafters
        if not isinstance(drafter, bool) and drafter not in loaded:
            listed = ", ".join(map(repr, loaded)) or "there is none"
            raise OutriderError(f"drafter must be True, False or one that is loaded ({listed}), got {drafter!r}")
        params.validate()
        ids = self._encode(prompt)
        group = next(self._ids)
        draft_tokens = parse_draft_tokens(draft_tokens)
        tree = parse_tree(tree)
        request = Request(
            "", ids, params, draft_tokens=draft_tokens, drafter=drafter, tree=tree, adapter=adapter or self.adapter
        )
        request.spans = getattr(ids, "spans", ())
        each = [replace(params, seed=int(params.seed) + i, n=1) for i in range(params.n)]
        return [replace(request, id=f"{group}.{i}", params=answer_params) for i, answer_params in enumerate(each)]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **how: Unpack[RequestOptions]
    ) -> list[Completion]:
        """All answers, n per prompt."""
        params = params or SamplingParams()
        requests = [request for prompt in each_prompt(prompts) for request in self.requests(prompt, params, **how)]
        return self._complete(requests)

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs these requests to their ends."""
        completions = {
            request.id: Completion("", [], "", stats=RequestStats(), logprobs=[], kinds=[]) for request in requests
        }
        with closing(self._shared.run(requests)) as events:
            for event in events:
                _take(completions[event.id], event)
        return [completions[request.id] for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **how: Unpack[RequestOptions]
    ) -> Generator[Event, None, None]:
        """Streams one answer (the first of `params.n`). Closing the iterator aborts the request and frees its pages."""
        (request, *_) = self.requests(prompt, params or SamplingParams(), **how)
        yield from self._shared.run([request])

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **how: Unpack[RequestOptions]
    ) -> Completion:
        """Generates one answer, the first of `params.n`."""
        requests = self.requests(self.chat_prompt(messages), params or SamplingParams(), **how)
        return self._complete(requests[:1])[0]

    def chat_prompt(self, messages: Iterable[Mapping[str, Json]], tools: Json = None) -> list[int]:
        listed = list(messages) if isinstance(messages, Iterable) else [messages]
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in listed):
            raise OutriderError("messages are a list such as [{'role': 'user', 'content': 'Hello'}]")
        texts, media = take_media(listed)
        inputs = self.soft_inputs(media) if media else []  # an error if the model takes none of that kind
        ids = self._tokenizer().chat(texts, tools)
        require(bool(ids), "the chat template makes no prompt of these messages")
        return expand(ids, inputs) if inputs else ids

    def encode_chat(
        self, prompt: str | Messages, raw: bool = False, images: Sequence[Image] = (), audio: Sequence[Clip] = ()
    ) -> list[int]:
        """Token ids of a message with these images and clips before it; by the chat template if there is one, unless
        `raw`."""
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if raw and (images or audio):
            return self._encode({"text": str(messages[-1]["content"]), "images": images, "audio": audio})
        if images or audio:
            parts: list[Any] = [{"type": "image", "image": image} for image in images]
            parts += [{"type": "audio", "audio": clip} for clip in audio]
            last = {**messages[-1], "content": [*parts, {"type": "text", "text": messages[-1]["content"]}]}
            return self.chat_prompt([*messages[:-1], last])
        if not raw and self.tokenizer is not None and self.tokenizer.has_chat_template:
            return self.chat_prompt(messages)
        text = str(messages[-1]["content"])
        require(bool(text), "the prompt is empty")
        return self._encode(text)

    def images(self) -> ImageEncoder:
        """The image encoder; an error if the model takes no images."""
        if isinstance(self.vision, str):
            raise OutriderError(self.vision)
        return self.vision

    def sound(self) -> AudioEncoder:
        """The audio encoder; an error if the model takes no sound."""
        if isinstance(self.audio, str):
            raise OutriderError(self.audio)
        return self.audio

    def soft_inputs(self, media: Media) -> list[SoftInputs]:
        """The images and clips with their encoders."""
        inputs = list[SoftInputs]()
        if media.images:
            inputs.append(SoftInputs(self.images(), media.images))
        if media.audio:
            inputs.append(SoftInputs(self.sound(), media.audio))
        return inputs

    def _with_media(self, prompt: Mapping[str, Any]) -> list[int]:
        """Images go where the text has `<|image|>` (Gemma 3: `<start_of_image>`), clips where it has `<|audio|>`; those
        of a kind without a place go before the text."""
        unknown = set(prompt) - {"text", "images", "audio"}
        lists = [prompt.get(name) for name in ("images", "audio")]
        listed = all(isinstance(items, list | tuple | None) for items in lists)
        if unknown or not isinstance(prompt.get("text"), str | list) or not listed:
            form = "{'text': ..., 'images': [...], 'audio': [...]}, and nothing else (conversations: LLM.chat)"
            raise OutriderError(f"a prompt with images or sound is {form}")
        text = prompt["text"]
        images, clips = (list(items or ()) for items in lists)
        inputs = self.soft_inputs(Media(images, clips))
        if not inputs:
            return self._encode(text)
        ids = self._encode(self._tokenizer().with_image_text(text) if isinstance(text, str) else text)
        start = 1 if self.config.bos_id is not None and ids[:1] == [self.config.bos_id] else 0
        before: list[int] = []
        for kind in inputs:
            if kind.encoder.ids.placeholder not in ids:
                before += [kind.encoder.ids.placeholder] * len(kind.items)
        ids[start:start] = before
        return expand(ids, inputs)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, SoftPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            return self._with_media(prompt)
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt, bos=True)
        kinds = "a prompt is a text or a list of token ids"
        with bad_input(TypeError, lambda _: f"{kinds}, got {str(prompt)[:60]!r} (conversations: LLM.chat)"):
            return [index(token) for token in prompt]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise OutriderError(f"{self.name} has no tokenizer: pass token ids")
        return self.tokenizer


def each_prompt(given: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Wraps a single prompt (a text, or integers in a list or an array) in a list."""
    if isinstance(given, str | Mapping | SoftPrompt):
        return [given]
    bytes_or_scalar = isinstance(given, bytes | bytearray | memoryview) or getattr(given, "shape", None) == ()
    if bytes_or_scalar or not isinstance(given, Iterable):
        raise OutriderError(f"prompts are texts or lists of token ids, got {type(given).__name__}")
    many: list[Any] = list(given)
    return [many] if many and isinstance(many[0], SupportsIndex) and not getattr(many[0], "shape", ()) else many


def _take(completion: Completion, event: Event) -> None:
    completion.text += event.text
    completion.token_ids += event.tokens
    assert completion.kinds is not None
    completion.kinds += event.kinds
    before = completion.logprobs
    logprobs = event.logprobs
    completion.logprobs = before + logprobs if before is not None and logprobs is not None else None
    if event.finish_reason is not None:
        completion.finish_reason = event.finish_reason
        assert event.stats is not None
        completion.stats = event.stats
        if event.error:
            raise OutriderError(event.error)


def worker(device: str | None = None) -> NoReturn:
    """Main function of ranks > 0: rank 0 broadcasts what to load, then every step. Ends when rank 0 does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals every process; rank 0 handles it
    if DEVICE_ENV in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow_to_the_end()
    group = None
    try:
        group = join(int(os.environ["WORLD_SIZE"]), os.environ.get(DEVICE_ENV, device))
        message = group.receive()
        assert isinstance(message, tuple)
        model, settings = message
        try:
            engine = assemble(model, settings, lambda line: None, group=group).engine
        except OutriderError:
            group.receive()  # rank 0 reports the error and that the run ends
        else:
            follow(engine, group)
        group.close()
        os._exit(0)  # threads of the collectives may abort an interpreter that is being taken down
    except OutriderError:
        pass  # rank 0 reports it
    except PeerLost:
        # rank 0 finds the lost process, reports it and ends this one; exiting first would make this rank look like the
        # cause
        time.sleep(60)
        log.exception("process %s failed", os.environ.get("RANK"))  # still alive, so no other process was lost
    except Exception:
        if group is None or not group.watch.ending:
            log.exception("process %s failed", os.environ.get("RANK"))
    os._exit(1)
