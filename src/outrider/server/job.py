"""One HTTP call as the engine and the writer of its answer need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..engine.grammar import CompiledGrammar
from ..engine.step import Request
from .grammar_source import GrammarSource
from .output import Parser
from .schema import OutriderOptions


@dataclass(frozen=True)
class Job:
    """One HTTP call: its engine requests (choice i is requests[i]) and how to read their answers."""

    requests: list[Request]
    parser: Callable[[], Parser]
    options: OutriderOptions
    seed: int
    stream: bool
    include_usage: bool
    one_call: bool = False  # parallel_tool_calls: false
    echoes: tuple[str, ...] = ()  # /v1/completions with echo: the prompt's text, per request
    priority: int = 0  # among the waiting requests of one client: lower comes first
    continuous_usage: bool = False
    return_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by their ids
    functions: bool = False  # calls are told as they were before there were tools
    best: tuple[int, int] = (1, 1)  # keep so many of each prompt's so many answers
    hide_logprobs: bool = False  # they were computed to choose the best
    max_zero: bool = False  # max_tokens: 0: nothing is wanted but the prompt
    prompt_logprobs: int | None = None  # score the prompt, with so many alternatives
    echo_logprobs: bool = False  # and tell it with the answer's
    grammar: GrammarSource | None = None  # what the answers must match, to be compiled before the job can run

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many answers it has."""
        return sum(len(p) for p in {id(r.prompt): r.prompt for r in self.requests}.values())

    def under(self, grammar: CompiledGrammar) -> Job:
        return replace(
            self, requests=[replace(r, params=replace(r.params, grammar=grammar)) for r in self.requests], grammar=None
        )
