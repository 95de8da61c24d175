"""Waits of a model's first requests: seconds to the first token, and what the host did in each slow step.

    PYTHONPATH=src:.:benchmarks python3 benchmarks/gpu_first.py 12B [--quantize int4] [--serve] [--seconds 100] [--dry]

Random weights are made on the card, so loading is not what a folder of 23 GB takes; drafts have the acceptance of
Google's table (72 % at K = 4), so the controller drafts as with real weights. Requests follow one another: the same
prompt three times, another one of its length, a long one, a drawn answer, eight at once. One JSON line for each phase
and request, at once: `ttft_s`, `seconds`, and `events`, what took more than a millisecond besides running kernels:
captures, kernels compiled or loaded, calibration. --serve: prepares as a server does before its first request.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import triton  # noqa: E402, F401
from tests.gpu.place import tiny  # noqa: E402

import outrider.llm  # noqa: E402
from gpu_rig import PUBLISHED, SIZES, Synthetic  # noqa: E402
from outrider.config import EngineConfig  # noqa: E402
from outrider.engine import calibrate, capture, decode, decode_graphs, graphs, prefill_graphs  # noqa: E402
from outrider.engine import engine as engine_module  # noqa: E402
from outrider.engine.engine import Engine  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.models.builtin_configs import BUILTIN_CONFIGS  # noqa: E402
from outrider.ops.cuda import runtime  # noqa: E402
from outrider.types import Draft, SamplingParams, Verdict  # noqa: E402

EVENTS: list[dict[str, Any]] = []  # of the phase under way
LOCK = threading.Lock()
MIN_MS = 1.0
SLOW_STEP_MS = 60.0


def timed(owner: Any, name: str, kind: str, describe: Callable[..., str]) -> None:
    """Replace a function by one that notes its time in `EVENTS`."""
    inner = getattr(owner, name, None)
    if inner is None:
        print(json.dumps({"warning": f"{owner} has no {name}"}), flush=True)
        return

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            ms = (time.perf_counter() - began) * 1e3
            if ms >= MIN_MS:
                event = {"kind": kind, "what": describe(*args), "ms": round(ms, 1)}
                event["at_s"] = round(began - BEGAN, 3)
                if threading.current_thread() is not threading.main_thread():
                    event["thread"] = threading.current_thread().name
                with LOCK:
                    EVENTS.append(event)

    setattr(owner, name, wrapper)


def short_key(key: object) -> str:
    """Only what differs from the usual key."""
    text = str(key).replace("DecodeKey", "Key")
    for plain in (", part='cycle'", ", nodes=0", ", adapted=False", ", drafter=None"):
        text = text.replace(plain, "")
    start = text.find(", asks=")
    end = text.find(")", start)
    return text if start < 0 else text[:start] + text[end + 1 :]


def instrument() -> None:
    def key_of(cache: object, key: object, *rest: object) -> str:
        return short_key(key)

    timed(capture.GraphCache, "capture", "capture", key_of)
    timed(outrider.llm, "calibrate", "calibrate", lambda *args: "cost table")
    timed(graphs.GraphExecutor, "prepare", "prepare", lambda *args: "captures")
    timed(
        prefill_graphs.PrefillGraphs, "run", "prompt pass", lambda self, chunks: str(sum(c.num_tokens for c in chunks))
    )
    timed(runtime, "image", "nvrtc compile", lambda source, *rest: str(rest[-1])[:80])
    from triton.runtime.jit import JITFunction

    timed(JITFunction, "_do_compile", "triton compile or load", lambda fn, *rest: fn.__name__)
    from triton.compiler.compiler import CompiledKernel

    timed(CompiledKernel, "_init_handles", "triton module", lambda kernel: str(getattr(kernel, "name", "")))
    inner = Engine.step

    def step(self: Engine) -> Any:
        began = time.perf_counter()
        events = inner(self)
        ms = (time.perf_counter() - began) * 1e3
        if ms >= SLOW_STEP_MS:
            with LOCK:
                EVENTS.append({"kind": "slow step", "ms": round(ms, 1), "at_s": round(began - BEGAN, 3)})
        return events

    Engine.step = step  # type: ignore[method-assign]


class WithinLimits(Synthetic):
    """Accepts no more than a sequence drafted: a graph may have a larger K."""

    def __call__(self, verdict: Verdict, draft: Draft, length: torch.Tensor) -> Verdict:
        assumed = super().__call__(verdict, draft, length)
        accepted = torch.minimum(assumed.accepted, draft.lengths)
        return Verdict(accepted, verdict.tokens, accepted + 1)


def assume_acceptance() -> None:
    """The published acceptance in every captured chain; trees keep their own verdicts (nothing is accepted)."""
    share = PUBLISHED[4] ** 0.5  # of the next position, given those before

    class Assumed(decode.DecodeStep):
        def __post_init__(self) -> None:
            super().__post_init__()
            if self.key.k and not self.key.nodes and self.key.part == "cycle":
                self.override = WithinLimits([share] * self.key.k, self.key.batch, self.out.tokens.device)

    decode_graphs.DecodeStep = Assumed  # type: ignore[misc]


def advise_sampling() -> None:
    """Gemma 4's own sampling, which a folder's generation_config.json advises; without a folder there is none."""

    class Advised(graphs.GraphExecutor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            advised = SamplingParams(temperature=1.0, top_p=0.95, top_k=64)
            super().__init__(*args, **{**kwargs, "advised": advised})

    engine_module.GraphExecutor = Advised  # type: ignore[misc]


def tell(phase: str, **figures: Any) -> None:
    with LOCK:
        events = list(EVENTS)
        EVENTS.clear()
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event["kind"], []).append(event["ms"])
    sums = {kind: [len(ms), round(sum(ms), 1)] for kind, ms in totals.items()}
    shown = sorted(events, key=lambda event: -event["ms"])[:24]
    shown.sort(key=lambda event: event["at_s"])
    print(json.dumps({"phase": phase, **figures, "count_ms": sums, "events": shown}), flush=True)


def load(args: argparse.Namespace) -> LLM:
    if not args.dry:
        name = SIZES[args.size]
        llm = LLM.load(
            name, drafter=f"{name}-assistant", load_format="dummy", device="cuda", quantize=args.quantize, say=print
        )
        return llm
    root = Path(tempfile.mkdtemp())
    for part in (SIZES[args.size], SIZES[args.size] + "-assistant"):
        folder = root / part.rpartition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tiny(dict(BUILTIN_CONFIGS[part]))))
    name = str(root / SIZES[args.size].rpartition("/")[2])
    config = EngineConfig(graphs=True, max_batch=8, max_context=1024)
    extra = {"vision": False, "audio": False}
    return LLM.load(
        name, drafter=name + "-assistant", load_format="dummy", device="cpu", ops="reference", engine=config, say=print,
        **extra,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after this")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    imported = time.perf_counter() - BEGAN
    if args.dry:
        calibrate.CAPTURING_S = 0.5
    instrument()
    assume_acceptance()
    advise_sampling()
    print(json.dumps({"phase": "import", "seconds": round(imported, 2), "torch": torch.__version__}), flush=True)
    began = time.perf_counter()
    llm = load(args)
    tell("load", seconds=round(time.perf_counter() - began, 2))
    if args.serve:
        began = time.perf_counter()
        line = llm.engine.executors[0].prepare() if args.dry else llm.engine.serve()
        tell("serve", seconds=round(time.perf_counter() - began, 2), line=line)
    rng = random.Random(1)
    vocab = llm.config.vocab_size

    def prompt(count: int) -> list[int]:
        return [rng.randrange(5, vocab) for _ in range(count)]

    one = prompt(80)
    many = [prompt(80) for _ in range(8)]
    num_tokens = 8 if args.dry else 64
    greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    drawn = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.7, top_p=0.95, top_k=64, seed=3)
    requests: list[tuple[str, list[list[int]], SamplingParams]] = [
        ("first", [one], greedy),
        ("again", [one], greedy),
        ("third", [one], greedy),
        ("another prompt", [prompt(80)], greedy),
        ("long prompt", [prompt(200 if args.dry else 3000)], greedy),
        ("drawn", [one], drawn),
        ("drawn again", [one], drawn),
        ("eight", many, greedy),
        ("eight again", many, greedy),
        ("eight, a third time", many, greedy),
    ]
    for label, prompts, params in requests:
        if time.perf_counter() - BEGAN > args.seconds:
            print(json.dumps({"phase": label, "left_out": "no time left"}), flush=True)
            continue
        began = time.perf_counter()
        done = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        stats = [completion.stats for completion in done]
        figures: dict[str, Any] = {"ttft_s": round(max(s.ttft_s for s in stats), 3), "seconds": round(seconds, 3)}
        figures["cached_tokens"] = stats[0].cached_tokens
        figures["cycles"] = max(s.cycles for s in stats)
        figures["accepted"] = [sum(s.accepted for s in stats), sum(s.drafted for s in stats)]
        tell(label, **figures)
    engine = llm.engine
    executor = engine.executors[0]
    if isinstance(executor, graphs.GraphExecutor):
        steps = executor.decode_graphs
        keys = [short_key(key) for key in steps.cache.graphs]
        passes = [short_key(key) for key in executor.prefill_graphs.cache.graphs]
        print(json.dumps({"phase": "graphs", "steps": keys, "passes": passes, "broken": steps.broken}), flush=True)
        executor.close()
    llm.close()


if __name__ == "__main__":
    main()
