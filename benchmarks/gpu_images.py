"""Images on a GPU or a CPU (--device cpu), random weights: is the tower right, do answers keep their bits, and how
long does an image take.

    python benchmarks/gpu_images.py --parity google/gemma-4-E2B-it gemma-3 --tower google/gemma-4-31B-it \\
        --engine google/gemma-4-E2B-it google/gemma-4-31B-it:12

Prints soft tokens of every kind against torch on the CPU, whether plain and drafted, single and batched answers with
images agree, milliseconds of the tower by budget with their share of the matrix rate, and of the prompt.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import numpy as np
import torch

from outrider import LLM, SamplingParams
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.image_processing import target_size
from outrider.models.vision import VisionModel
from outrider.models.vision_config import IMAGE_TOKENS, VisionConfig
from outrider.ops import choose
from outrider.weights.vision import _dummy

BEGAN = time.perf_counter()
RATE = 989e12  # an H200's dense bfloat16 rate
SIGLIP = {"model_type": "gemma3", "text_config": {"hidden_size": 2560}, "vision_config": {}}


def vision_config(name: str) -> VisionConfig:
    config = VisionConfig.from_hf(SIGLIP if name == "gemma-3" else BUILTIN_CONFIGS[name])
    assert config is not None
    return config


def pixels(config: VisionConfig, budget: int, seed: int = 0) -> torch.Tensor:
    size = (config.square, config.square) if config.square else target_size(1080, 1440, budget, config.side)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def parity(name: str, device: torch.device) -> None:
    config = vision_config(name)
    budget = 70
    weights = _dummy(config.tensors(), "cpu", torch.float32, 0)
    for key, weight in weights.items():
        if key.endswith(("q_norm.weight", "k_norm.weight")):  # random scores near one, or rounding decides
            weight *= 0.3
    image = pixels(config, budget)
    want = VisionModel(config, dict(weights), threads=16).encode(image)
    line = f"{name}: {want.shape[0]} soft tokens,"
    for dtype in (torch.float32, torch.bfloat16):
        moved = {key: w.to(device, dtype) for key, w in weights.items()}
        model = VisionModel(config, moved, choose(device, "auto", None) if device.type == "cuda" else None)
        got = model.encode(image)
        again = torch.equal(got, model.encode(image))
        error = float((got.cpu().float() - want).norm() / want.norm())
        line += f" {str(dtype)[6:]} {error:.1e} off, {'same bits again' if again else 'OTHER BITS AGAIN'};"
    print(line, flush=True)


def milliseconds(run: object, device: torch.device, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()  # type: ignore[operator]
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def tower(name: str, device: torch.device, repeats: int) -> None:
    config = vision_config(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ops = choose(device, "auto", None) if device.type == "cuda" else None
    model = VisionModel(config, _dummy(config.tensors(), device, dtype, 0), ops)
    for budget in (256,) if config.square else IMAGE_TOKENS:
        image = pixels(config, budget)
        tokens = model.encode(image).shape[0]
        ms = milliseconds(lambda: model.encode(image), device, repeats)
        flops = config.flops(tokens)
        share = flops / ms * 1e3 / RATE
        print(f"{name} tower: {tokens} tokens {ms:.2f} ms, {flops / 1e12:.2f} TFLOP, {share:.1%}", flush=True)


def folder(name: str, layers: int | None) -> str:
    """A model's configuration, cut to so many layers."""
    if layers is None:  # a name, or a folder with a config.json
        return name
    config = json.loads(json.dumps(BUILTIN_CONFIGS[name]))
    text = config["text_config"]
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    if text["num_kv_shared_layers"]:
        text["num_kv_shared_layers"] = layers // 2
    where = Path(tempfile.mkdtemp())
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


def engine(name: str, layers: int | None, device: torch.device, ks: list[int], quantize: str | None) -> None:
    """Plain = drafted, alone = in a batch; milliseconds of a prompt by budget."""
    drafter = "ngram" if layers or name not in BUILTIN_CONFIGS else f"{name}-assistant"
    llm = LLM.load(
        folder(name, layers), load_format="dummy", drafter=drafter, max_context=4096, max_batch=8, device=str(device),
        image_tokens=IMAGE_TOKENS[-1], quantize=quantize,
    )  # fmt: skip
    encoder = llm.images()
    rng = np.random.default_rng(1)
    encoder.tokens = 280
    took = time.perf_counter() - BEGAN
    executor = llm.engine.executors[0].name
    print(f"{name}: loaded, {took:.0f} s; decoding by {executor}", flush=True)
    place = encoder.config.placeholder_id

    def photo(i):
        return np.random.default_rng(i).integers(0, 256, (600, 800 + 60 * i, 3), dtype=np.uint8)

    texts = [rng.integers(10, 250, 40).tolist() for _ in range(3)]
    prompts = [
        {"text": [2, *texts[0], place, *texts[1], place, 7, 8, 9], "images": [photo(0), photo(1)]},
        [2, *texts[2], *texts[2][:20]],
        {"text": [2, place, *texts[0], *texts[0][:10]], "images": [photo(2)]},
    ]
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
        alone = [llm.generate(p, params, drafter=False)[0].token_ids for p in prompts]
        for k in ks:
            answers = llm.generate(prompts, params, draft_tokens=k)
            llm.engine.store.prefix.clear()
            same = "same bits" if [a.token_ids for a in answers] == alone else "OTHER BITS"
            drafted = sum(a.stats.drafted for a in answers)
            print(f"{name} T {temperature} K {k}: {same}, {drafted} drafted", flush=True)
    for budget in IMAGE_TOKENS:
        encoder.tokens = budget
        prompt = llm._encode({"text": [2, place, *texts[0]], "images": [photo(0)]})
        best = 1e9
        for _ in range(4):
            llm.engine.store.prefix.clear()
            began = time.perf_counter()
            llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), drafter=False)
            best = min(best, (time.perf_counter() - began) * 1e3)
        print(f"{name} prompt of {len(prompt)} tokens with an image: {best:.1f} ms", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began = time.perf_counter()
    encoder.tokens = 280
    encoder.encode(photo(99))
    print(f"{name}: {time.perf_counter() - began:.2f} s to encode a new image; {peak:.1f} GiB at most", flush=True)
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parity", nargs="*", default=[])
    parser.add_argument("--tower", nargs="*", default=[])
    parser.add_argument("--engine", nargs="*", default=[], help="MODEL or MODEL:LAYERS")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ks", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--quantize", help="engines: int4, int8 or fp8 weights")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    for name in options.parity:
        parity(name, device)
    for name in options.tower:
        tower(name, device, options.repeats)
    for name in options.engine:
        model, _, layers = name.partition(":")
        engine(model, int(layers) if layers else None, device, options.ks, options.quantize)


if __name__ == "__main__":
    main()
