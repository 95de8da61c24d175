"""`outrider chat`: a conversation in the terminal; earlier turns come from the prefix cache.

Each turn is stored in the cache folder (`chat_last.json`, readable by its owner alone), so that --continue goes on."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import LoadSettings, parse_draft_tokens
from ..ops.cpu.build import cache_path
from ..types import DEFAULT_TEMPERATURE, MAX_DRAFT, OutriderError, RequestStats, SamplingParams, bad_input, require
from . import common, terminal
from .common import err, note, out
from .wrapping import answer_writer

if TYPE_CHECKING:
    from ..llm import LLM

COMMAND = re.compile(r"/\w*( .*)?")  # on one line; `/* C`, `// C` and `/etc/hosts` are messages
COMMANDS = {
    "/system": "TEXT  a system message",
    "/image": "FILE  for the next message",
    "/audio": "FILE  likewise",
    "/retry": "  answer the last message again",
    "/save": "FILE",
    "/load": "FILE  a conversation",
    "/stats": "  of all turns",
    "/drafter": "[auto|none|NAME]",
    "/draft": "K|auto",
    "/adapter": "[none|NAME]",
    "/seed": "N",
    "/clear": "  forget the conversation",
    "/quit": "",
}
HELP = " · ".join(f"{name} {about}".rstrip() for name, about in COMMANDS.items())


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    model: Annotated[
        str | None, typer.Argument(help=f"{common.NAMES} Default: smollm2.", autocompletion=common.model_names)
    ] = None
    resume: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the last conversation, and its model.")
    ] = False
    system: Annotated[str | None, "A system message."] = None
    image: common.ImageFiles = None
    audio_files: common.AudioFiles = None
    max_tokens: common.MaxTokens = 512
    temperature: Annotated[float | None, "0: greedy. Default: the model's own (generation_config.json), else 0.7."] = (
        None
    )
    top_p: Annotated[float | None, "Nucleus sampling, in (0, 1]; 1: off. Default: the model's own, else off."] = None
    top_k: Annotated[int | None, "Sample from the K likeliest tokens; 0: off. Default: the model's own, else off."] = (
        None
    )
    seed: common.Seed = 0
    adapter: common.Adapters = None


@common.loading(*common.RUNNING, *common.IMAGES, *common.SOUND)
@common.taking(ChatOptions)
def chat(asked: ChatOptions, load: LoadSettings) -> None:
    """Chat with a model in the terminal. --continue goes on with the last conversation.

    Ctrl-C stops an answer and keeps what was said, or clears a half-typed line; Ctrl-D, /quit or Ctrl-C twice ends.

    Arrow keys edit the line and bring earlier ones back; Tab completes commands (/help lists them). A paste is one
    message, and so is what stands between three quotes. From a pipe every line is a message.
    """
    named = ("temperature", "top_p", "top_k")
    chosen = {name: getattr(asked, name) for name in named if getattr(asked, name) is not None}
    # refused before the model is loaded
    common.sampling(
        **{"max_tokens": asked.max_tokens, "temperature": DEFAULT_TEMPERATURE, "seed": asked.seed, **chosen}
    )
    earlier = last_conversation() if asked.resume else None
    model = asked.model or (earlier.model if earlier is not None else None) or "smollm2"
    load = common.with_adapters(load, asked.adapter)
    llm = common.load_llm(model, load)
    llm.adapter = next(iter(load.adapters), None)
    params = llm.sampling(max_tokens=asked.max_tokens, seed=asked.seed, **chosen)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise OutriderError(f"{model} has no chat template: use 'outrider generate --raw'")
    note(HELP)
    talk = Conversation(llm, params, asked.system)
    if earlier is not None:
        talk.resume(earlier.messages)
    for path in asked.image or ():
        talk.attach("image", path)
    for path in asked.audio_files or ():
        talk.attach("audio", path)
    talk.run()


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None):
        self.llm = llm
        self.params = params
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.terminal = terminal.standard([*COMMANDS])
        self.draft_tokens: int | None = None
        self.drafter: bool | str = True
        self.turns: list[RequestStats] = []
        self.attached: list[dict[str, str]] = []  # images and clips of the next message

    def run(self) -> None:
        interrupted = False  # the last key on an empty line was Ctrl-C
        while True:
            try:
                line = terminal.read(self.terminal).strip()
            except EOFError:
                out.print()
                break
            except KeyboardInterrupt:
                out.print()
                if interrupted or self.terminal is None:
                    break
                interrupted = True
                note("Ctrl-C once more ends the conversation; so do Ctrl-D and /quit")
                continue
            interrupted = False
            if line == "/quit":
                break
            self.react(line)
        if any(message["role"] == "assistant" for message in self.messages):
            note("outrider chat --continue goes on with this conversation")

    def react(self, line: str) -> None:
        """Runs a command or answers a message. Errors are printed, and the conversation continues."""
        try:
            if COMMAND.fullmatch(line):
                self.command(line)
            elif line:
                self.answer(line)
        except OutriderError as error:
            err.print(str(error), style="red")
        except OSError as error:  # from /save and /load
            err.print(f"{error.filename or line.partition(' ')[2]}: {error.strerror or error}", style="red")
        except KeyboardInterrupt:  # while an attachment is read
            out.print()

    def resume(self, messages: list[dict[str, Any]]) -> None:
        """Continues after these messages; a system message given now replaces theirs."""
        system = [message for message in self.messages if message["role"] == "system"]
        if system:
            messages = [message for message in messages if message["role"] != "system"]
        self.messages = system + messages
        said = [message for message in self.messages if message["role"] == "user"]
        last = said[-1]["content"] if said else ""
        text = last if isinstance(last, str) else " ".join(part.get("text", "") for part in last).strip()
        turns = "1 turn" if len(said) == 1 else f"{len(said)} turns"
        note(f"{turns} so far; the last message: {text if len(text) <= 60 else text[:59] + '…'}")

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/stats":
            for i, stats in enumerate(self.turns, 1):
                reused = f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused"
                note(f"turn {i}: {common.stats_line(stats, reused)}")
        elif name == "/clear":
            self.messages = [m for m in self.messages if m["role"] == "system"]
            store_conversation(self.llm.name, [])
            note("the conversation is forgotten")
        elif name == "/draft":
            with bad_input(OutriderError, lambda _: f"/draft takes 0..{MAX_DRAFT} or auto, got {argument!r}"):
                self.draft_tokens = parse_draft_tokens(argument.strip() or "auto")
            note(f"draft tokens: {'auto' if self.draft_tokens is None else self.draft_tokens}")
        elif name == "/seed":
            with bad_input(ValueError, lambda _: f"/seed takes a whole number, got {argument!r}"):
                self.params = replace(self.params, seed=int(argument))
            note(f"seed: {self.params.seed}")
        elif name == "/system":
            system = argument.strip()
            others = [m for m in self.messages if m["role"] != "system"]
            self.messages = ([{"role": "system", "content": system}] if system else []) + others
            note(f"system message: {system or 'none'}")
        elif name == "/drafter":
            self.choose_drafter(argument.strip())
        elif name == "/adapter":
            self.choose_adapter(argument.strip())
        elif name in ("/image", "/audio"):
            self.attach(name[1:], str(named_file(name, argument)))
        elif name == "/retry":
            self.retry()
        elif name == "/save":
            path = named_file(name, argument)
            path.write_text(conversation_json(self.llm.name, self.messages), encoding="utf-8")
            note(f"{len(self.messages)} messages in {path}")
        elif name == "/load":
            self.messages = read_conversation(named_file(name, argument)).messages
            note(f"{len(self.messages)} messages")
        else:
            note(HELP)

    def choose_adapter(self, name: str) -> None:
        """Without a name: prints which one is used."""
        known = ("none", *(self.llm.adapters.paths if self.llm.adapters is not None else ()))
        if name:
            require(name in known, f"/adapter takes {', '.join(known)}, got {name!r}")
            self.llm.adapter = None if name == "none" else name
        note(f"adapter: {self.llm.adapter or 'none'}")

    def attach(self, kind: str, path: str) -> None:
        """Adds an image or a clip (`audio`) to the next message; an unreadable file is an error at once."""
        encoder = self.llm.images() if kind == "image" else self.llm.sound()
        count = encoder.encode(path).soft_tokens.shape[0]
        self.attached.append({"type": kind, kind: path})
        note(f"{path}: {count} tokens, with the next message")

    def choose_drafter(self, name: str) -> None:
        """Without a name: prints which one is used."""
        known: dict[str, bool | str] = {"auto": True, "none": False, "ngram": "ngram"}
        known |= {one.name: one.name for one in (self.llm.drafter.members if self.llm.drafter is not None else ())}
        if name:
            mend = "others are loaded with --drafter"
            require(name in known, f"/drafter takes {', '.join(known)}, got {name!r}: {mend}")
            self.drafter = known[name]
        else:
            now = next(key for key, value in known.items() if value == self.drafter)
            note(f"{self.llm.drafter_note}; in use: {now}")
            return
        note(f"drafter: {name}")

    def retry(self) -> None:
        """Sends the last message again with another seed; at temperature 0 the answer stays the same."""
        questions = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        require(bool(questions), "/retry: nothing was asked yet")
        self.params = replace(self.params, seed=self.params.seed + 1)
        self.answer(self.messages[questions[-1]]["content"], self.messages[: questions[-1]])

    def answer(self, content: str | list[dict[str, str]], before: Sequence[dict[str, Any]] | None = None) -> None:
        """content: a text, or the parts of an earlier message. before: the messages before it, if not all. A refused
        message leaves the conversation unchanged."""
        pending = self.attached if isinstance(content, str) else []
        if pending:
            content = [*pending, {"type": "text", "text": str(content)}]
        messages = [*(self.messages if before is None else before), {"role": "user", "content": content}]
        text = ""
        write = answer_writer()
        try:
            with terminal.keys_wait():
                ids = self.llm.chat_prompt(messages)
                said = [m for m in messages if m["role"] != "system"]
                max_context = self.llm.engine.max_context
                if len(ids) >= max_context and len(said) > 1:
                    sizes = f"the conversation has {len(ids)} tokens; the context holds {max_context}"
                    raise OutriderError(f"{sizes}: /clear forgets what was said so far")
                for event in self.llm.stream(ids, self.params, draft_tokens=self.draft_tokens, drafter=self.drafter):
                    text += event.text
                    write(event.text)
                    if event.stats is not None:
                        self.turns.append(event.stats)
                        out.print()
                        note(common.stats_line(event.stats, event.finish_reason or ""))
        except KeyboardInterrupt:
            out.print()
            note("stopped")
        self.messages = [*messages, {"role": "assistant", "content": text}]
        store_conversation(self.llm.name, self.messages)
        if pending:
            self.attached = []


def named_file(command: str, argument: str) -> Path:
    require(bool(argument.strip()), f"{command} takes a file's name")
    return Path(os.path.expanduser(argument.strip()))


@dataclass(frozen=True)
class StoredConversation:
    model: str | None
    messages: list[dict[str, Any]]


def conversation_json(model: str, messages: list[dict[str, Any]]) -> str:
    return json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=1)


def read_conversation(path: Path) -> StoredConversation:
    """Reads a conversation that /save wrote."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        messages = stored["messages"]
        if all(isinstance(m["role"], str) and isinstance(m["content"], str | list) for m in messages):
            model = stored.get("model")
            rows = [{"role": m["role"], "content": m["content"]} for m in messages]
            return StoredConversation(model if isinstance(model, str) else None, rows)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise OutriderError(f"{path} is not a conversation written by /save")


def last_path() -> Path:
    return cache_path("chat_last.json")


def store_conversation(model: str, messages: list[dict[str, Any]]) -> None:
    """Stores the conversation for --continue. If the cache is not writable, it is not stored."""
    path = last_path()
    with suppress(OSError, UnicodeEncodeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:  # mode 0600
            file.write(conversation_json(model, messages))
        os.replace(file.name, path)


def last_conversation() -> StoredConversation:
    try:
        conversation = read_conversation(last_path())
    except OSError:
        conversation = StoredConversation(None, [])
    require(bool(conversation.messages), "there is no conversation to continue: start one with `outrider chat`")
    return conversation
