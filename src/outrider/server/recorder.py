"""Records the beginning of an agent's prompts in a file: system prompt and tools, without the user's messages. At its
next start the server can prefill it before the agent's first request (`outrider launch`)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("outrider.server")
ROUTES = {"/v1/chat/completions": "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
PREFIX_FIELDS = ("system", "instructions", "tools", "chat_template_kwargs")  # the fields before the conversation
LONG = 4000  # minimum characters; prefill of less takes no time


def beginning(path: str, raw: bytes) -> str | None:
    """A request for one token with the same beginning, as JSON {path, body}; None if the beginning is short."""
    if path not in ROUTES:
        return None
    request: dict[str, Any] = json.loads(raw)
    body = {name: request[name] for name in PREFIX_FIELDS if request.get(name)}
    talk = "input" if path == "/v1/responses" else "messages"
    turns = request[talk] if isinstance(request.get(talk), list) else []
    first = next((i for i, m in enumerate(turns) if m.get("role") not in ("system", "developer")), len(turns))
    body |= {talk: [*turns[:first], {"role": "user", "content": "."}], ROUTES[path]: 1, "stream": False}
    text = json.dumps({"path": path, "body": body}, ensure_ascii=False)
    return text if len(text) >= LONG else None


class PromptRecorder:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._longest = 0

    def take(self, path: str, raw: bytes) -> None:
        """Keeps the longest beginning since the start. raw: a validated body. Errors here do not reach the client."""
        try:
            text = beginning(path, raw)
            if text is None or len(text) <= self._longest:
                return
            self._longest = len(text)
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # mode 0600
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=self._file.parent, delete=False) as new_file:
                new_file.write(text)
            os.replace(new_file.name, self._file)
        except (OSError, ValueError, AttributeError, TypeError) as e:
            log.warning("could not record the beginning of a prompt: %s", type(e).__name__)
