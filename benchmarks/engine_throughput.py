"""Engine throughput end to end on dummy weights: scheduler, host and executor included. The measure behind
docs/gpu-measured.md, "Many sequences".

    PYTHONPATH=src python benchmarks/engine_throughput.py CONFIGS SIZE K ACCEPT_LEN BATCHES TOKENS [CONTEXT]

CONFIGS is `google` for the configurations that the package knows, or a folder with gemma-4-SIZE-it/config.json and
gemma-4-SIZE-it-assistant/config.json.
Prompts are CONTEXT random ids each; what is timed is (16 + TOKENS tokens) - (16 tokens), best of two. Dummy weights
accept nothing, so with K > 0 the wall time of a cycle is measured and tokens a second follow from ACCEPT_LEN (3.88 for
K = 4).
"""

import json
import random
import sys
import time

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig

if len(sys.argv) < 7:
    sys.exit(__doc__)
root, size, k, accept_len = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
batches, n = [int(b) for b in sys.argv[5].split(",")], int(sys.argv[6])
context = int(sys.argv[7]) if len(sys.argv) > 7 else 1024
most = max(batches)
llm = LLM.load(
    f"{root}/gemma-4-{size}-it",
    drafter=f"{root}/gemma-4-{size}-it-assistant" if k else "none",
    draft_tokens=k,
    device="cuda",
    load_format="dummy",
    engine=EngineConfig(
        max_batch=most, max_context=context + n + 128, kv_tokens=most * (context + n + 160), prefix_cache=False
    ),
    say=print,
)
rng = random.Random(1)
for b in batches:
    prompts = [[rng.randrange(5, 200000) for _ in range(context)] for _ in range(b)]

    def run(m: int) -> tuple[float, float]:
        began = time.perf_counter()
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True))
        return time.perf_counter() - began, sum(c.stats.cycles for c in done) / b

    run(8)
    short, long = min(run(16) for _ in range(2)), min(run(16 + n) for _ in range(2))
    cycle = (long[0] - short[0]) / (long[1] - short[1])
    tokens = (accept_len if k else 1.0) * b / cycle
    print(
        json.dumps(
            dict(
                size=size,
                k=k,
                batch=b,
                context=context,
                ms_per_cycle=round(cycle * 1e3, 3),
                tok_s=round(tokens, 1),
                prompt_and_16_s=round(short[0], 3),
            )
        ),
        flush=True,
    )
