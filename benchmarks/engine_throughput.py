"""Engine throughput end to end on dummy weights: scheduler, host and executor included. The measure behind
docs/gpu-measured.md, "Many sequences".

    PYTHONPATH=src python benchmarks/engine_throughput.py CONFIGS SIZE K ACCEPT_LEN BATCHES TOKENS [CONTEXT]

CONFIGS is `google` for the configurations that the package knows, or a folder with gemma-4-SIZE-it/config.json and
gemma-4-SIZE-it-assistant/config.json. SIZE may end in :int4, :int8 or :fp8 for quantised weights.
Prompts are CONTEXT random ids each. Decoding is timed with all prompts computed: the engine's own steps, host included,
the median of three stretches of TOKENS / 4 steps with their range. Dummy weights accept nothing, so with K > 0 a step
is a cycle, and tokens per second follow from ACCEPT_LEN (3.88 for K = 4). prompt_and_16_s: all prompts and 16 tokens,
the median of three runs with their range, from 65,536 tokens on one run; captures: of graphs, during these runs, which
delay them. Of a number of sequences that BATCHES names again, decoding is timed again.
"""

import json
import random
import sys
import time

import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.step import Request

if len(sys.argv) < 7:
    sys.exit(__doc__)
root = sys.argv[1]
k = int(sys.argv[3])
accept_len = float(sys.argv[4])
size, _, quantize = sys.argv[2].partition(":")
batches = [int(b) for b in sys.argv[5].split(",")]
n = int(sys.argv[6])
context = int(sys.argv[7]) if len(sys.argv) > 7 else 1024
most = max(batches)
device = "cuda" if torch.cuda.is_available() else "cpu"  # a dry run of the script
llm = LLM.load(
    f"{root}/gemma-4-{size}-it",
    drafter=f"{root}/gemma-4-{size}-it-assistant" if k else "none",
    draft_tokens=k,
    device=device,
    ops="auto" if device == "cuda" else "reference",
    load_format="dummy",
    quantize=quantize or None,
    engine=EngineConfig(
        max_batch=most, max_context=context + n + 128, kv_tokens=most * (context + n + 160), prefix_cache=False
    ),
    say=print,
)
rng = random.Random(1)
timed = set[int]()
for b in batches:
    prompts = [[rng.randrange(5, min(200000, llm.config.vocab_size)) for _ in range(context)] for _ in range(b)]

    def answer(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - began

    short = list[float]()
    executor = llm.engine.executors[0]
    captures = 0
    if b not in timed:
        answer(8)  # captures and compiles
        earlier = executor.num_captures
        short = sorted(answer(16) for _ in range(3 if context < 65536 else 1))
        captures = executor.num_captures - earlier
    timed.add(b)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=n + 64, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{b}.{i}", prompt, params, k))
    while any(seq.first_token_at is None for seq in [*engine.scheduler.running, *engine.scheduler.waiting]):
        engine.step()
    stretches = []
    for _ in range(4):  # the first warms up
        began = time.perf_counter()
        for _ in range(n // 4):
            engine.step()
        stretches.append((time.perf_counter() - began) / (n // 4) * 1e3)
    for i in range(b):
        engine.abort(f"{b}.{i}")
    while engine.busy:
        engine.step()
    low, cycle, high = sorted(stretches[1:])
    figures = {"size": sys.argv[2], "k": k, "batch": b, "context": context, "ms_per_cycle": round(cycle, 3)}
    figures["range_ms"] = [round(low, 3), round(high, 3)]
    if short:
        figures["prompt_and_16_s"] = round(short[len(short) // 2], 3)
        figures["prompt_range_s"] = [round(short[0], 3), round(short[-1], 3)]
        figures["captures"] = captures
    figures["tok_s"] = round((accept_len if k else 1.0) * b / cycle * 1e3, 1)
    print(json.dumps(figures), flush=True)
