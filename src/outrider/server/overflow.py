"""A prompt that does not fit the context, told in the sentences by which clients and agents know it and shorten the
conversation."""

from __future__ import annotations

from .errors import ApiError


class ContextOverflow(ApiError):
    def __init__(self, tokens: int, most: int, context: int, field: str, at_least: bool = False) -> None:
        """most: tokens a prompt may have. at_least: the text was not tokenised to its end."""
        self._tokens, self._most = tokens, most
        told = f"your {field} resulted in {'at least ' if at_least else ''}{tokens} tokens"
        advice = f"Please reduce the length of the {field}; at most {most} tokens are left for it."
        message = f"This model's maximum context length is {context} tokens. However, {told}. {advice}"
        super().__init__(400, message, field, "context_length_exceeded")

    def body_for(self, path: str) -> dict[str, object]:
        """As Anthropic words it, for its clients."""
        if not path.startswith("/v1/messages"):
            return super().body_for(path)
        message = f"prompt is too long: {self._tokens} tokens > {self._most} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
