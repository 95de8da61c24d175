"""Generates the target's answers to prompts with the engine, in large batches; each is written as soon as it ends.

OUT/answers.jsonl has one line per answer: {"prompt": line of the prompt, "draw": the number of this answer to it,
"temperature", "seed", "tokens", "done"}. An answer that the time limit or Ctrl-C cuts short has "done": false and
continues later from there: the engine's noise depends on (seed, position) alone, so the text is the same.
"""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from ..config import EngineConfig, LoadSettings
from ..engine.engine import Engine
from ..engine.step import Request
from ..llm import LLM
from ..models.inspect import kv_bytes
from ..prompts import mend_end
from ..types import OutriderError, SamplingParams, bad_input, require
from .clock import Halt
from .config import CPU_SLOTS, GPU_SLOTS, TrainConfig
from .data import Sequences
from .forecast import free_bytes
from .target import Described

ADAPTER = "trained-for"  # name of the target's adapter in the answering engine
HELD_EVERY = 5  # every fifth answer is a held-out one, until the held-out prompts are used up
Report = Callable[[int, int, int, float], None]  # finished answers, all answers, tokens of this run, seconds


@dataclass(frozen=True)
class Task:
    """One answer to generate."""

    prompt: int
    draw: int
    temperature: float
    seed: int

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt, self.draw


@dataclass(frozen=True)
class RecordedAnswer(Task):
    tokens: list[int]
    done: bool


def plan_tasks(count: int, heldout: np.ndarray, config: TrainConfig, weights: np.ndarray | float = 1.0) -> list[Task]:
    """Lists the requested answers to prompts 0..count-1, in an order of which every prefix is a fair sample.

    heldout: these prompts get a greedy answer and, if answers are sampled at all, a sampled one. weights [count]:
    answers per prompt, relative to 1.
    """
    seed = config.answer_seed or 0
    rng = np.random.default_rng((seed, 1))
    order = rng.permutation(count)
    cold = rng.random(count) < config.greedy_share
    luck = rng.random(count)
    times = np.floor(config.answers_per_prompt * weights + luck).astype(np.int64)
    aside = set(heldout.tolist())
    hot = config.temperature if config.greedy_share < 1.0 else 0.0
    open_tasks = list[Task]()
    held_tasks = deque[Task]()
    merged = list[Task]()
    for i in map(int, order):
        if i in aside:
            heats = [0.0, hot] if hot > 0 else [0.0]
        else:
            heats = [0.0 if draw == 0 and cold[i] else hot for draw in range(times[i])]
        tasks = [Task(i, draw, temperature=heat, seed=seed + i + 1_000_003 * draw) for draw, heat in enumerate(heats)]
        (held_tasks if i in aside else open_tasks).extend(tasks)
    for n, task in enumerate(open_tasks):
        merged.append(task)
        if held_tasks and n % (HELD_EVERY - 1) == HELD_EVERY - 2:
            merged.append(held_tasks.popleft())
    return [*merged, *held_tasks]


# ---- the file -------------------------------------------------------------------------------------------------------
def read_answers(path: Path) -> dict[tuple[int, int], RecordedAnswer]:
    """Reads the file. The last line of each answer counts; an incomplete last line, cut off by a crash, is ignored."""
    answers: dict[tuple[int, int], RecordedAnswer] = {}
    *lines, _torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        try:
            answer = RecordedAnswer(**json.loads(line))
        except (ValueError, TypeError) as error:
            advice = "delete the line, or choose another --out"
            raise OutriderError(f"{path}:{number}: not an answer ({error}): {advice}") from None
        answers[answer.key] = answer
    return answers


def as_sequences(prompts: Sequences, answers: Sequence[RecordedAnswer], vocab: int) -> Sequences:
    """Prompts with their answers, in the order of the prompts, however they finished."""
    listed = sorted((a for a in answers if a.tokens), key=lambda a: (a.prompt, a.draw))
    require(bool(listed), "no prompt was answered in the time there was: allow more (--minutes, answer_minutes)")
    rows = [np.concatenate([prompts[a.prompt], np.array(a.tokens)]) for a in listed]
    return Sequences.of(
        rows,
        prompts=[len(prompts[a.prompt]) for a in listed],
        index=[int(prompts.index[a.prompt]) for a in listed],
        greedy=[a.temperature == 0 for a in listed],
        vocab=vocab,
        seeds=[a.seed for a in listed],
    )


# ---- the engine -----------------------------------------------------------------------------------------------------
@contextmanager
def answering_engine(
    known: Described, device: str, dtype: torch.dtype, *, slots: int | None, longest: int, drafter: str = "none"
) -> Iterator[Engine]:
    """Yields an engine for answering: prompts and answers of `longest` tokens, no prefix cache, no text. On a GPU the
    weights are dense, as in training: with hundreds of rows 4 bits gain nothing, and kernels for every format would
    have to be compiled. Afterwards frees its memory and gives torch its threads back (the CPU kernels leave it one)."""
    cuda = device.startswith("cuda")
    page = EngineConfig().page_size
    threads = torch.get_num_threads()
    context = longest + 1 + page  # the engine reserves a page
    # K/V positions: a third of the free memory
    room = free_bytes(device) // 3 // max(1, kv_bytes(known.config, 1, dtype.itemsize if cuda else 4))
    batch = max(1, min(slots or (GPU_SLOTS if cuda else CPU_SLOTS), room // context))
    engine_config = EngineConfig(
        max_batch=batch, max_context=context, prefix_cache=False, kv_tokens=(batch + 1) * (context + page)
    )
    settings = LoadSettings(
        drafter=drafter,
        draft_tokens=0 if drafter == "none" else None,
        device=device,
        dtype=str(dtype).removeprefix("torch.") if cuda else None,
        ops="triton:dense" if cuda else "auto",
        engine=engine_config,
        adapters={} if known.adapter is None else {ADAPTER: known.adapter},
    )
    try:
        engine = LLM.load(known.name, settings, say=lambda _: None).engine
        engine.tokenizer = None  # only token ids are needed
        yield engine
        del engine
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def answer_tasks(
    engine: Engine,
    prompts: Sequences,
    tasks: Sequence[Task],
    max_new: int,
    had: Mapping[tuple[int, int], RecordedAnswer] = {},
    *,
    report: Report = lambda *_: None,
    halt: Halt = lambda: False,
) -> Iterator[RecordedAnswer]:
    """Yields the answers missing from `had` as they end; once `halt` returns True, also the unfinished ones."""
    waiting = deque(t for t in tasks if t.key not in had or not had[t.key].done)
    began = time.perf_counter()
    reported_at = 0.0
    num_tokens = 0
    total = len(tasks)
    finished = total - len(waiting)
    running: dict[str, tuple[Task, list[int]]] = {}
    pool = engine.runner.adapters
    adapter = ADAPTER if pool is not None and ADAPTER in pool.paths else None
    report(finished, total, 0, 0.0)
    while (waiting or running) and not halt():
        while waiting and len(running) < 2 * engine.max_batch:  # a few wait in the engine, so that no slot stays empty
            task = waiting.popleft()
            before = had[task.key].tokens if task.key in had else []
            params = SamplingParams(temperature=task.temperature, max_tokens=max_new - len(before), seed=task.seed)
            request = Request(
                f"{task.prompt}.{task.draw}", [*prompts[task.prompt].tolist(), *before], params, adapter=adapter
            )
            running[request.id] = task, list(before)
            engine.submit(request)
        for event in engine.step():
            task, tokens = running[event.id]
            tokens += event.tokens
            num_tokens += len(event.tokens)
            if event.finish_reason is not None:
                if event.error:
                    raise OutriderError(event.error)
                finished += 1
                yield RecordedAnswer(**asdict(task), tokens=tokens, done=True)
                del running[event.id]
        if time.perf_counter() - reported_at >= 0.5:
            reported_at = time.perf_counter()
            report(finished, total, num_tokens, reported_at - began)
    for id_ in running:
        engine.abort(id_)
    while engine.busy:
        engine.step()
    for task, tokens in running.values():
        if tokens:
            yield RecordedAnswer(**asdict(task), tokens=tokens, done=False)
    report(finished, total, num_tokens, time.perf_counter() - began)


def append_answers(path: Path, answers: Iterator[RecordedAnswer]) -> None:
    """Appends each answer to the file as soon as it ends."""
    mend_end(path)
    advice = "free some space and run the command again"
    full = bad_input(OSError, lambda error: f"{path}: cannot be written ({error.strerror}); {advice}")
    with full, open(path, "a", buffering=1, encoding="utf-8") as file:  # line by line
        for answer in answers:
            file.write(json.dumps(asdict(answer), separators=(",", ":")) + "\n")


def heldout_prompts(prompts: Sequences, heldout: int, lines: int | None = None) -> np.ndarray:
    """Indices of the prompts held out for evaluation.

    lines: number of lines of the training file; every later prompt, and every copy of one, is held out. None: `heldout`
    prompts, at most a fifth, chosen by their smallest digests wherever they stand in the file, so a longer file with
    the same prompts never holds out one that a run on the shorter file has learnt from.
    """
    hashes = (blake2b(prompts[i].tobytes(), digest_size=8).digest() for i in range(len(prompts)))
    digests = np.frombuffer(b"".join(hashes), ">u8")
    if lines is not None:
        return np.nonzero(np.isin(digests, digests[prompts.index >= lines]))[0]
    room = min(heldout, len(prompts) // HELD_EVERY)
    heldout_digests = []
    for digest, times in zip(*np.unique(digests, return_counts=True), strict=True):
        if times <= room:  # all copies of a prompt are held out, or none
            heldout_digests.append(digest)
            room -= times
    return np.nonzero(np.isin(digests, heldout_digests))[0]
