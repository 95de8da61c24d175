"""`outrider chat`: a conversation in the terminal; earlier turns come from the prefix cache."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import LoadSettings, parse_draft_tokens
from ..types import MAX_DRAFT, OutriderError, RequestStats, SamplingParams
from . import common
from .common import err, note, out
from .painter import Painter
from .terminal import Terminal

if TYPE_CHECKING:
    from ..llm import LLM

FENCE = '"""'
COMMAND = re.compile(r"/\w*( .*)?")  # on one line; `/* C`, `// C` and `/etc/hosts` are messages
HELP = "/stats  statistics of all turns · /seed N · /draft K|auto · /clear  forget the conversation · /quit"


@common.loading(*common.DRAFTING, *common.MACHINE, *common.ROOM)
def chat(
    model: common.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: common.MaxTokens = 512,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    seed: common.Seed = 0,
    show_draft: Annotated[bool, typer.Option(help="Colour the tokens: drafted and right, corrected, bonus.")] = False,
    *,
    load: LoadSettings,
) -> None:
    """Chat. Ctrl-C stops an answer and keeps what was said; Ctrl-D or /quit ends.

    What is pasted is one message, with all its lines. From a pipe every line is one, or what stands between three
    quotes.
    """
    params = common.sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    llm = common.load_llm(model, load)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise OutriderError(f"{model} has no chat template: use 'outrider generate --raw'")
    note(HELP)
    Conversation(llm, params, system, show_draft).run()


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, show_draft: bool):
        self.llm, self.params, self.system, self.show_draft = llm, params, system, show_draft
        self.terminal = Terminal.standard()
        self.draft_tokens: int | None = None
        self.turns: list[RequestStats] = []
        self.clear()

    def clear(self) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []

    def run(self) -> None:
        while True:
            try:
                line = self.read().strip()
            except (EOFError, KeyboardInterrupt):
                out.print()
                return
            if line == "/quit":
                return
            try:
                if COMMAND.fullmatch(line):
                    self.command(line)
                elif line:
                    self.answer(line)
            except OutriderError as error:
                err.print(str(error), style="red")

    def read(self) -> str:
        """The next message. From a pipe a line is a message; three quotes begin one that goes on until three quotes end
        it."""
        if self.terminal is not None:
            return self.terminal.read("\x1b[1m>>> \x1b[0m")
        line = out.input("[bold]>>> [/bold]")
        if not line.startswith(FENCE):
            return line
        lines = [line.removeprefix(FENCE)]
        while not (lines[-1].endswith(FENCE) and (len(lines) > 1 or len(lines[0]) >= len(FENCE))):
            try:
                lines.append(out.input(""))
            except EOFError:  # the pipe ended first: what was said is answered
                break
        return "\n".join(lines).removesuffix(FENCE)

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/stats":
            for i, stats in enumerate(self.turns, 1):
                reused = f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused"
                note(f"turn {i}: {common.stats_line(stats, reused)}")
        elif name == "/clear":
            self.clear()
        elif name == "/draft":
            try:
                self.draft_tokens = parse_draft_tokens(argument.strip() or "auto")
            except OutriderError:
                raise OutriderError(f"/draft takes 0..{MAX_DRAFT} or auto, got {argument!r}") from None
        elif name == "/seed":
            try:
                self.params = replace(self.params, seed=int(argument))
            except ValueError:
                raise OutriderError(f"/seed takes a whole number, got {argument!r}") from None
        else:
            note(HELP)

    def answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        text = ""
        try:
            ids = self.llm.chat_prompt(self.messages)
            painter = Painter(self.llm.tokenizer, ids, self.show_draft)
            if len(ids) >= (most := self.llm.engine.max_context) and len(self.messages) > 1 + bool(self.system):
                raise OutriderError(
                    f"the conversation has {len(ids)} tokens; the context holds {most}: /clear forgets what was said so far"
                )
            for event in self.llm.stream(ids, self.params, self.draft_tokens):
                text += event.text
                out.print(painter.paint(event), end="")
                if event.stats is not None:
                    self.turns.append(event.stats)
                    out.print()
                    note(common.stats_line(event.stats, event.finish_reason or ""))
        except KeyboardInterrupt:
            out.print()
            note("stopped")
        except OutriderError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": text})
