"""`outrider demo`: the default model answers a few prompts, plain and speculative, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..config import LoadSettings
from ..types import SamplingParams
from . import common
from .common import out
from .generate import run_plain


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model: common.Model = "smollm2"
    max_tokens: common.MaxTokens = 128


@common.loading("drafter", "draft_tokens", "threads")
@common.taking(DemoOptions)
def demo(asked: DemoOptions, load: LoadSettings) -> None:
    """See it work: the same answers, faster. Downloads the default model (98 MB) the first time."""
    params = common.sampling(max_tokens=asked.max_tokens)
    llm = common.load_llm(asked.model, load)
    llm.generate(llm.encode_chat("Hello"), SamplingParams(max_tokens=8))  # warm up
    table = Table(title=f"{asked.model}, tokens per second, greedy, at most {asked.max_tokens} tokens")
    columns = ["prompt", "plain", "speculative", "speed-up", "tokens/cycle", "identical"]
    for name in columns:
        table.add_column(name, justify="left" if name == "prompt" else "right", no_wrap=True)
    tokens, plain_s, fast_s = 0, 0.0, 0.0
    for prompt in common.PROMPTS[:4]:
        ids = llm.encode_chat(prompt)
        plain = run_plain(llm, ids, params)
        llm.engine.store.prefix.clear()
        fast = llm.generate(ids, params)[0]
        out.print(f">>> {prompt}", style="bold")
        out.print(f"{fast.text}\n")
        p, f = plain.stats, fast.stats
        if p.decode_tps and f.decode_tps:
            tokens = tokens + p.new_tokens
            plain_s = plain_s + p.new_tokens / p.decode_tps
            fast_s = fast_s + p.new_tokens / f.decode_tps
        table.add_row(
            prompt if len(prompt) < 16 else prompt[:15] + "…",
            f"{p.decode_tps:.1f}",
            f"{f.decode_tps:.1f}",
            f"{f.decode_tps / p.decode_tps:.2f}x" if p.decode_tps else "-",
            f"{f.tokens_per_cycle:.2f}",
            "yes" if plain.token_ids == fast.token_ids else Text("NO", "bold red"),
        )
    if fast_s:
        table.add_section()
        table.add_row("all", f"{tokens / plain_s:.1f}", f"{tokens / fast_s:.1f}", f"{plain_s / fast_s:.2f}x")
    out.print(table)
