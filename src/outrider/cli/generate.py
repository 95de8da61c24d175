"""`outrider generate`: one prompt, or a file of them. `outrider demo`: a few prompts, plain and speculative."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..config import LoadSettings
from ..prompts import Prompt, read_prompts
from ..types import GREEDY_EPS, OutriderError, SamplingParams, require
from . import common
from .common import err, out
from .wrapping import answer_writer

if TYPE_CHECKING:
    from ..bench.turns import Comparison
    from ..llm import LLM, Completion


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    model: common.Model
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads standard input.")] = None
    prompts: Annotated[
        Path | None, "A .jsonl file with the field prompt or turns; prints one JSON object per line."
    ] = None
    image: common.ImageFiles = None
    audio_files: common.AudioFiles = None
    raw: Annotated[bool, "No chat template: continue the text as it is."] = False
    max_tokens: common.MaxTokens = 256
    temperature: Annotated[float, "0: greedy; 1: the model's own probabilities."] = 0.0
    top_p: Annotated[
        float, "Nucleus sampling: sample from the likeliest tokens with this total probability, in (0, 1]; 1: off."
    ] = 1.0
    top_k: Annotated[int, "Sample from the K likeliest tokens; 0: off."] = 0
    min_p: Annotated[float, "Drop tokens with less than this share of the top probability; 0: off."] = 0.0
    repetition_penalty: Annotated[float, "Above 1, tokens that already occurred become less likely; 1: off."] = 1.0
    presence_penalty: Annotated[
        float, "As in OpenAI's API, -2..2: subtracted from tokens that occurred in the answer."
    ] = 0.0
    frequency_penalty: Annotated[float, "As in OpenAI's API, -2..2: subtracted once per occurrence."] = 0.0
    stop: Annotated[list[str] | None, "Stop at this text (may be repeated)."] = None
    logprobs: Annotated[int | None, "Report the chosen token's and the N likeliest tokens' logprobs (--json)."] = None
    n: Annotated[int, "Number of answers; answer i uses seed + i."] = 1
    seed: common.Seed = 0
    compare: Annotated[
        bool,
        "Also decode plainly, in turn and three times each; print the speed-up and whether the texts are identical.",
    ] = False
    as_json: common.AsJson = False
    adapter: common.Adapters = None


@common.loading(*common.RUNNING, *common.IMAGES, *common.SOUND)
@common.taking(GenerateOptions)
def generate(asked: GenerateOptions, load: LoadSettings) -> None:
    """Answer one prompt, or each prompt of a file. Drafting is on by default and never changes the answer.

    Example: outrider generate smollm2 "Why is the sky blue?" --compare
    """
    sampled = {f.name: getattr(asked, f.name) for f in fields(SamplingParams) if f.name in vars(asked)}
    params = common.sampling(**{**sampled, "stop": tuple(asked.stop or ())})
    prompt = asked.prompt
    require(prompt is None or asked.prompts is None, "give either a prompt or --prompts FILE.jsonl, not both")
    if prompt is None and asked.prompts is None:
        piped = sys.stdin is not None and not sys.stdin.isatty()
        hint = "standard input is read only if the prompt is '-'" if piped else "'-' reads standard input"
        raise OutriderError(f"no prompt: write it after the model, or give --prompts FILE.jsonl; {hint}")
    require(not asked.image or asked.prompts is None, "--image is for a single prompt: leave it out with --prompts")
    single = not asked.audio_files or asked.prompts is None
    require(single, "--audio is for a single prompt: leave it out with --prompts")
    rows = asked.as_json or asked.prompts is not None
    require(rows or asked.logprobs is None, "--logprobs are part of the JSON object: add --json")
    require(asked.n == 1 or asked.prompts is None, "--n is for a single prompt: leave it out with --prompts")
    if asked.n > 1 and params.temperature < GREEDY_EPS:
        common.note(f"at temperature 0 all {asked.n} answers are the same: --temperature 1 draws them")
    if prompt == "-":
        prompt = common.standard_input()
    require(prompt is None or prompt.strip() != "", "the prompt is empty")
    listed = read_prompts(asked.prompts) if asked.prompts is not None else []
    load = common.with_adapters(load, asked.adapter)
    require(len(load.adapters) <= 1, "generate uses one adapter: leave out the others (serve and chat take several)")
    llm = common.load_llm(asked.model, load, asked.as_json)
    llm.adapter = next(iter(load.adapters), None)
    if asked.prompts is not None:
        for number, one in enumerate(listed, 1):
            extra = {k: v for k, v in one.row.items() if k not in ("prompt", "text", "turns")}
            try:
                print(
                    json.dumps({**extra, **_one_row(llm, one, params=params, raw=asked.raw, compare=asked.compare)}),
                    flush=True,
                )
            except OutriderError as error:
                raise OutriderError(f"{asked.prompts}, prompt {number}: {error}") from None
        return
    assert prompt is not None
    ids = llm.encode_chat(prompt, asked.raw, images=asked.image or (), audio=asked.audio_files or ())
    if asked.as_json:
        answers = [
            _answer(llm, ids, replace(params, n=1, seed=asked.seed + i), compare=asked.compare) for i in range(asked.n)
        ]
        print(json.dumps(answers[0] if asked.n == 1 else answers, ensure_ascii=False))
        return
    for i in range(asked.n):
        _print_one(llm, ids, params=replace(params, n=1, seed=asked.seed + i), compare=asked.compare)


def _print_one(llm: LLM, ids: list[int], params: SamplingParams, compare: bool) -> None:
    from ..engine.machine_load import OtherLoad
    from ..llm import Completion

    others = OtherLoad()
    tokens: list[int] = []
    text = ""
    write = answer_writer()
    for event in llm.stream(ids, params):
        write(event.text)
        text += event.text
        tokens += event.tokens
        if event.stats is not None:
            out.print()
            common.note(common.stats_line(event.stats, event.finish_reason or ""))
            first = Completion(text, tokens, finish_reason=event.finish_reason or "", stats=event.stats)
    if compare:
        result = _compared(llm, ids, params=params, first=first)
        plain = result.plain
        common.note(f"plain: {common.stats_line(plain.stats, plain.finish_reason)}")
        speeds = f"{result.drafting.stats.decode_tps:.1f} against {plain.stats.decode_tps:.1f} tok/s"
        runs = f"{speeds}, the fastest of {result.rounds} runs each" if result.rounds > 1 else speeds
        common.note_of(others)
        identical = "yes" if result.identical else "NO"
        err.print(f"{common.times(result.speedup)} ({runs}) · identical: {identical}", style="bold")


def _compared(llm: LLM, ids: list[int], params: SamplingParams, first: Completion, rounds: int = 3) -> Comparison:
    from ..bench.turns import compare, decoder

    return compare(decoder(llm, ids, params), first, rounds=rounds)


def _answer(llm: LLM, ids: list[int], params: SamplingParams, compare: bool, rounds: int = 3) -> dict[str, object]:
    """A row of figures. `rounds`: runs of each side if two are compared."""
    answer = llm.generate(ids, params)[0]
    if not compare:
        return common.completion_json(answer)
    result = _compared(llm, ids, params=params, first=answer, rounds=rounds)
    return {
        **common.completion_json(result.drafting),
        "plain": common.completion_json(result.plain),
        "speedup": round(result.speedup, 4) or None,
        "runs": result.rounds,
        "identical": result.identical,
    }


def _one_row(llm: LLM, prompt: Prompt, params: SamplingParams, raw: bool, compare: bool) -> dict[str, object]:
    """Answers turns one after the other; each sees those before it."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        answers.append(_answer(llm, llm.encode_chat(messages, raw), params, compare=compare, rounds=1))
        messages.append({"role": "assistant", "content": str(answers[-1]["text"])})
    return answers[0] if "turns" not in prompt.row else {**answers[-1], "turns": answers}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model: common.Model = "smollm2"
    max_tokens: common.MaxTokens = 128


@common.loading("drafter", "draft_tokens", "threads")
@common.taking(DemoOptions)
def demo(asked: DemoOptions, load: LoadSettings) -> None:
    """See plain decoding and drafting side by side: the same answers, faster. Downloads the default model (98 MB) the
    first time."""
    params = common.sampling(max_tokens=asked.max_tokens)
    llm = common.load_llm(asked.model, load)
    from ..bench.turns import compare, decoder
    from ..engine.machine_load import OtherLoad

    for drafts in (True, False):  # warm up
        llm.generate(llm.encode_chat("Hello"), SamplingParams(max_tokens=8), drafter=drafts)
    others = OtherLoad()
    rows: list[tuple[str | Text, ...]] = []
    tokens = 0
    plain_s = 0.0
    fast_s = 0.0
    for number, prompt in enumerate(common.PROMPTS[:4]):
        ids = llm.encode_chat(prompt)
        result = compare(decoder(llm, ids, params), drafting_first=number % 2 == 0)
        out.print(f">>> {prompt}", style="bold")
        out.print(f"{result.drafting.text}\n")
        plain = result.plain.stats
        fast = result.drafting.stats
        if plain.decode_tps and fast.decode_tps:
            tokens += plain.new_tokens
            plain_s += plain.new_tokens / plain.decode_tps
            fast_s += plain.new_tokens / fast.decode_tps
        short = prompt if len(prompt) < 16 else prompt[:15] + "…"
        gain = f"{result.speedup:.2f}x" if result.speedup else "-"
        same = "yes" if result.identical else Text("NO", "bold red")
        speeds = (f"{plain.decode_tps:.1f}", f"{fast.decode_tps:.1f}", gain, f"{fast.tokens_per_cycle:.2f}")
        rows.append((short, *speeds, same))
    if fast_s:
        rows.append(("all", f"{tokens / plain_s:.1f}", f"{tokens / fast_s:.1f}", f"{plain_s / fast_s:.2f}x"))
    heads = ("prompt", "plain", "speculative", "speed-up", "tokens/cycle", "identical")
    runs = f"the fastest of {result.rounds} runs" if result.rounds > 1 else "one run each"
    title = f"{asked.model}, tokens per second, greedy, at most {asked.max_tokens} tokens, {runs}"
    out.print(common.table(heads, rows, ("prompt",), title=title))
    common.note_of(others)
