"""`outrider demo`: the default model answers a few prompts, plain and speculative, side by side."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ..types import SamplingParams
from . import common
from .common import err, out
from .generate import run_plain

PROMPTS = (
    "What is the capital of France?",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Write a haiku about the sea.",
)


def demo(
    model: common.Model = "smollm2",
    max_tokens: common.MaxTokens = 128,
    drafter: common.Drafter = "auto",
    draft_tokens: common.DraftTokens = "auto",
    threads: common.Threads = None,
    peer: Annotated[bool, typer.Option(help="Time llama.cpp on the same file too, where llama-cpp-python is installed.")] = True,
) -> None:
    """See it work: the same answers, faster. Downloads the default model (98 MB) the first time."""
    llm = common.load_llm(model, drafter=drafter, draft_tokens=draft_tokens, threads=threads)
    params = SamplingParams(max_tokens=max_tokens)
    llm.generate(common.encode_prompt(llm, "Hello", raw=False), SamplingParams(max_tokens=8))  # warm up
    table = Table(title=f"{model}: plain decoding against speculation, greedy, {max_tokens} tokens at most")
    for name in ("prompt", "plain tok/s", "speculative tok/s", "speed-up", "tokens a cycle", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    totals = [0, 0.0, 0.0]
    for prompt in PROMPTS:
        ids = common.encode_prompt(llm, prompt, raw=False)
        plain = run_plain(llm, ids, params)
        llm.engine.store.prefix.clear()
        fast = llm.generate(ids, params)[0]
        out.print(f"[bold]>>> {prompt}[/bold]\n{fast.text}\n")
        p, f = plain.stats, fast.stats
        if p.decode_tps and f.decode_tps:
            totals = [totals[0] + p.new_tokens, totals[1] + p.new_tokens / p.decode_tps, totals[2] + p.new_tokens / f.decode_tps]
        table.add_row(
            prompt if len(prompt) < 44 else prompt[:43] + "…",
            f"{p.decode_tps:.1f}",
            f"{f.decode_tps:.1f}",
            f"{f.decode_tps / p.decode_tps:.2f}x" if p.decode_tps else "-",
            f"{f.tokens_per_cycle:.2f}",
            "yes" if plain.token_ids == fast.token_ids else "[bold red]NO[/bold red]",
        )
    if totals[2]:
        table.add_section()
        table.add_row("all", f"{totals[0] / totals[1]:.1f}", f"{totals[0] / totals[2]:.1f}", f"{totals[1] / totals[2]:.2f}x", "", "")
    out.print(table)
    if peer:
        _peer_line(llm, model, params)


def _peer_line(llm: object, model: str, params: SamplingParams) -> None:
    from ..bench.peers import llama_cpp_tps

    tps = llama_cpp_tps(model, PROMPTS[2], params.max_tokens)
    if tps is not None:
        err.print(f"[dim]llama.cpp, plain decoding, the same file and threads: {tps:.1f} tok/s[/dim]")
