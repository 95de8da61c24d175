"""Sound on a GPU or a CPU (--device cpu), random weights: is the encoder right, do answers keep their bits, and what do
30 seconds cost.

    python benchmarks/gpu_sound.py                                              E2B and the 12B's encoder on a GPU
    python benchmarks/gpu_sound.py --device cpu --quantize int4 --parts cost    E2B on a CPU's cores (OMP_NUM_THREADS)

Parts: `encoder` compares soft tokens with float32 on the CPU, `exact` compares answers alone, in a batch and with
drafts, `cost` times a new clip of 30 s: features, encoder, prompt, and the first token as a client waits for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import numpy as np
import torch

from gpu_images import folder
from outrider import LLM, SamplingParams
from outrider.models.audio import AudioModel
from outrider.models.audio_config import SAMPLE_RATE, AudioConfig
from outrider.models.audio_features import log_mel
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.weights.audio import _dummy

BEGAN = time.perf_counter()
SECONDS = 30.0
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 5e-2}  # relative error; cuDNN convolves float32 in TF32
DRAFTS: list[dict[str, object]] = [{"draft_tokens": k} for k in (1, 4, 8, 16)]
TREES: list[dict[str, object]] = [{"draft_tokens": 4, "tree": 8}, {"draft_tokens": 8, "tree": 16}]
failures: list[str] = []


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {line}", flush=True)


def check(name: str, passed: bool, note: str) -> None:
    if not passed:
        failures.append(name)
    say(f"{'ok  ' if passed else 'FAIL'} {name}: {note}")


def clip(seconds: float, seed: int) -> np.ndarray:
    """Tones and noise at 16 kHz."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(0.2 * np.sin(2 * np.pi * hertz * times) for hertz in rng.uniform(80, 4000, 3))
    return (tones + 0.1 * rng.standard_normal(len(times))).astype(np.float32)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


def audio_config(name: str) -> AudioConfig:
    config = AudioConfig.from_hf(BUILTIN_CONFIGS[name])
    assert config is not None
    return config


def encoder(name: str, device: torch.device) -> None:
    """Soft tokens of 4 s against float32 on the CPU, and the same bits a second time."""
    config = audio_config(name)
    weights = _dummy(config.tensors(), "cpu", torch.float32, 0)
    samples = clip(4.0, 1)
    expected = AudioModel(config, weights, threads=torch.get_num_threads()).encode(samples)
    for dtype, limit in LIMITS.items():
        model = AudioModel(config, {key: weight.to(device, dtype) for key, weight in weights.items()})
        tokens = model.encode(samples)
        error = float((tokens.cpu().float() - expected).norm() / expected.norm())
        same = torch.equal(tokens, model.encode(samples))
        note = f"{tokens.shape[0]} tokens, relative error {error:.1e}, {'same' if same else 'OTHER'} bits again"
        check(f"encoder of {name} in {str(dtype)[6:]}", error <= limit and same, note)


def prompts(llm: LLM) -> list[object]:
    """Two clips of other lengths, a text, a clip beside an image, and the first clip in another text."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(10, 250, 40).tolist() for _ in range(3)]
    place = llm.sound().config.audio_id
    image_place = llm.images().config.placeholder_id
    first, second, third = ((clip(seconds, i), SAMPLE_RATE) for i, seconds in enumerate((3.1, 7.3, 1.0)))
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    return [
        {"text": [2, *texts[0], place, *texts[1], place, 7, 8, 9], "audio": [first, second]},
        [2, *texts[2], *texts[2][:20]],
        {"text": [2, image_place, *texts[0], place, *texts[0][:10]], "images": [image], "audio": [third]},
        {"text": [2, *texts[1], place, 7, 8], "audio": [first]},
    ]


def exact(name: str, llm: LLM, num_tokens: int) -> None:
    """Each prompt alone and without drafts, then all of them in a batch with drafts of every width and trees."""
    requests = prompts(llm)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=3, ignore_eos=True)
        llm.engine.store.prefix.clear()
        alone = [llm.generate(prompt, params, drafter=False)[0].token_ids for prompt in requests]
        for options in [{"drafter": False}, *DRAFTS, *TREES]:
            llm.engine.store.prefix.clear()
            answers = llm.generate(requests, params, **options)  # type: ignore[arg-type]
            same = [answer.token_ids for answer in answers] == alone
            drafted = sum(answer.stats.drafted for answer in answers)
            accepted = sum(answer.stats.accepted for answer in answers)
            check(f"{name} T {temperature} {json.dumps(options)}", same, f"{drafted} drafted, {accepted} accepted")


def cost(name: str, llm: LLM, repeats: int) -> None:
    """A new clip each time: neither its soft tokens nor its prefix are known."""
    sound = llm.sound()
    samples = clip(SECONDS, 5)
    say(f"{name} features of 30 s: {milliseconds(lambda: log_mel(samples), repeats):.0f} ms")
    sound.model.encode(samples)  # the first call prepares kernels
    encode = milliseconds(lambda: sound.model.encode(samples), repeats)
    tera = sound.config.flops(sound.config.num_tokens(len(samples))) / 1e12
    kind = str(sound.model.dtype)[6:]
    say(f"{name} features and encoder of 30 s: {encode:.1f} ms for {tera:.2f} TFLOP in {kind}")
    one_token = SamplingParams(max_tokens=1, ignore_eos=True)
    place = sound.config.audio_id
    first_tokens = []
    for seed in range(repeats + 1):
        prompt = {"text": [2, 10, 11, place, *range(12, 40)], "audio": [(clip(SECONDS, 100 + seed), SAMPLE_RATE)]}
        began = time.perf_counter()
        answer = llm.generate(prompt, one_token, drafter=False)[0]
        first_tokens.append(time.perf_counter() - began)
    median = sorted(first_tokens[1:])[repeats // 2]
    say(f"{name} a clip of 30 s to the first token: {median * 1e3:.0f} ms, {answer.stats.prompt_tokens} prompt tokens")


def load(name: str, layers: int | None, options: argparse.Namespace) -> LLM:
    drafter = "ngram" if layers is not None else f"{name}-assistant"
    threads = torch.get_num_threads() if options.device == "cpu" else None
    llm = LLM.load(
        folder(name, layers), load_format="dummy", drafter=drafter, max_context=options.max_context, max_batch=8,
        device=options.device, image_tokens=70, quantize=options.quantize, threads=threads,
    )  # fmt: skip
    say(f"{name}: loaded, decoding by {llm.engine.executors[0].name}, {torch.get_num_threads()} threads")
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="google/gemma-4-E2B-it", help="MODEL or MODEL:LAYERS")
    parser.add_argument("--parts", default="encoder,exact,cost")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantize", help="int4, int8 or fp8 weights of the text model")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer that is compared")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    parts = options.parts.split(",")
    name, _, layers = options.model.partition(":")
    if "encoder" in parts:
        for encoder_name in ("google/gemma-4-E2B-it", "google/gemma-4-12B-it"):
            encoder(encoder_name, torch.device(options.device))
    if "exact" in parts or "cost" in parts:
        llm = load(name, int(layers) if layers else None, options)
        if "cost" in parts:
            cost(name, llm, options.repeats)
        if "exact" in parts:
            exact(name, llm, options.tokens)
        llm.close()
    say("FAILED: " + "; ".join(failures) if failures else "all checks passed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
