"""Tools as clients send them: lists that MCP servers publish, and others modelled on OpenAI's, Anthropic's, pydantic's
and zod's documents (tests/data/tool_schemas.json names the source of each)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from outrider.engine.text import Tokenizer

TOOLS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "tool_schemas.json").read_text())
# as pydantic's model_json_schema and zod's two converters write them
CLIENT_SCHEMAS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "client_schemas.json").read_text())
# keywords of the tools' schemas that no grammar enforces: they are named in a header, and calls need not follow them
UNENFORCED = {"set_preferences": ["uniqueItems"], "register": ["if"], "set_password": ["pattern", "format", "not"]}


def expected_note(tool: dict[str, Any], gemma: bool) -> str:
    keywords = UNENFORCED.get(tool["name"], tool.get("gemma_ignores" if gemma else "json_ignores", []))
    if tool["name"] == "firecrawl_search" and not gemma:
        keywords = ["maxLength", "minLength"]  # llguidance cannot intersect them with a host name's pattern
    return f"{tool['name']}: {', '.join(keywords)}" if keywords else ""


def relaxed(tool: dict[str, Any]) -> Any:
    """The tool's schema without the keywords that are not enforced, in today's spelling of tuples and bounds."""
    dropped = {*UNENFORCED.get(tool["name"], []), *tool.get("json_ignores", [])}

    def walk(node: Any, names: bool = False) -> Any:
        if isinstance(node, list):
            return [walk(child) for child in node]
        if not isinstance(node, dict):
            return node
        fields: Any = {key: child for key, child in node.items() if names or key not in dropped}
        if not names and isinstance(fields.get("items"), list):
            fields["prefixItems"] = fields.pop("items")
            fields["items"] = fields.pop("additionalItems", True)
        if not names and fields.get("exclusiveMinimum") is True:
            fields["exclusiveMinimum"] = fields.pop("minimum")
        tables = ("properties", "$defs", "definitions", "patternProperties")
        return {key: walk(child, not names and key in tables) for key, child in fields.items()}

    schema = walk(tool["parameters"])
    schema.pop("$schema", None)
    return schema


def compact_choice(tok: Tokenizer, allowed: np.ndarray, rng: random.Random) -> int:
    """One of the allowed tokens; often one that ends a string, a list, an object or a number, so that calls end."""
    closers = [t for text in ('"', "}", "]", ",", '<|"|>', "<tool_call|>") for t in tok.encode(text)[:1]]
    ending = [token for token in [*closers, *tok.eos_ids] if allowed[token]]
    if ending and rng.random() < 0.6:
        return rng.choice(ending)
    return int(rng.choice(np.flatnonzero(allowed)))
