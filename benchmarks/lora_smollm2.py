"""A LoRA adapter for `smollm2`, trained here with peft, and what drafts bring on it.

    python benchmarks/lora_smollm2.py train OUT [--prompts 96] [--steps 24]
    python benchmarks/lora_smollm2.py measure OUT [--questions 24] [--drafter auto]

The adapter (rank 16 on all linear modules) learns a format: the answer is a JSON list of sentences. Its texts are the
base model's own greedy answers to questions of Spec-Bench, cut into sentences. `measure` answers other questions of
it (every twentieth) with K = 4, the base and the adapter in turn, greedily and at T = 1, and prints tokens per
cycle, which do not depend on the machine's load, and how many answers have the format.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.models.names import tensor_plan
from outrider.ops.reference import ReferenceOps, as_tensor
from outrider.weights import hub
from outrider.weights.load import load_target

DATA = Path(__file__).parent / "data"


def questions_of(measured: bool, count: int) -> list[str]:
    lines = (DATA / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["turns"][0] for i, line in enumerate(lines) if (i % 20 == 0) == measured]
    rows = [row[:600] for row in rows if measured or len(row) < 300]
    return rows[:: max(1, len(rows) // count)][:count]


def dense_model() -> Any:
    """The GGUF file's weights in transformers' own model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = hub.resolve("smollm2")
    config, weights, _ = load_target(files, "cpu", torch.float32, ReferenceOps())
    state = {}
    for name, plan in tensor_plan(config).items():
        rows = [shape[0] for shape in plan.source_shapes] if plan.source_shapes else [plan.shape[0]]
        state |= dict(zip(plan.sources, as_tensor(weights[name]).split(rows), strict=True))
    keys = {f for f in LlamaConfig().to_dict() if f in files.config}
    model = LlamaForCausalLM(LlamaConfig(**{k: files.config[k] for k in keys}))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def formatted(text: str) -> str:
    sentences = [s.strip() for s in re.split(r"(?<=[.!?:])\s+|\n+", text) if s.strip()]
    return json.dumps(sentences[:6])


def train(out: Path, prompts: int, steps: int) -> None:
    from peft import LoraConfig, get_peft_model

    llm = LLM.load("smollm2")
    prompts_ids = [llm.chat_prompt([{"role": "user", "content": q}]) for q in questions_of(False, prompts)]
    pairs = []
    for ids, answer in zip(prompts_ids, llm.generate(prompts_ids, SamplingParams(max_tokens=80)), strict=True):
        pairs.append((ids, [*llm.tokenizer.encode(formatted(answer.text)), *llm.tokenizer.eos_ids[:1]]))
    del llm
    print(f"{len(pairs)} answers of {sum(len(a) for _, a in pairs) / len(pairs):.0f} tokens", flush=True)
    torch.manual_seed(0)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(dense_model(), LoraConfig(r=16, lora_alpha=32, target_modules=linear))
    learn = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    rng = random.Random(0)
    began = time.perf_counter()
    for step in range(steps):
        total = 0.0
        for ids, answer in rng.sample(pairs, 4):
            row = torch.tensor([ids + answer])
            labels = row.clone()
            labels[:, : len(ids)] = -100
            loss = model(input_ids=row, labels=labels).loss / 4
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in learn.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 5, (steps - step) / (steps / 2))
        learn.step()
        learn.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {total:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
            model.save_pretrained(out)
    model.save_pretrained(out)


def measure(out: Path, questions: int, drafter: str) -> None:
    llm = LLM.load("smollm2", adapters={"json": str(out)}, drafter=drafter)
    print(llm.drafter_note)
    prompts_ids = [llm.chat_prompt([{"role": "user", "content": q}]) for q in questions_of(True, questions)]
    for temperature in (0.0, 1.0):
        for adapter in (None, "json"):
            params = SamplingParams(max_tokens=128, temperature=temperature, seed=1)
            done = llm.generate(prompts_ids, params, draft_tokens=4, tree=0, adapter=adapter)
            cycles, accepted = (sum(getattr(c.stats, name) for c in done) for name in ("cycles", "accepted"))
            lists = sum(c.text.lstrip().startswith('["') for c in done)
            per = (accepted + cycles) / cycles
            print(f"T={temperature:g} {adapter or 'base':5s} {per:.3f} tokens per cycle, {lists}/{len(done)} lists")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "measure"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--drafter", default="auto")
    args = parser.parse_args()
    if args.what == "train":
        train(args.out, args.prompts, args.steps)
    else:
        measure(args.out, args.questions, args.drafter)
