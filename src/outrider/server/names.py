"""The short names of routes in metrics and logs: a fixed few, whatever paths clients ask for."""

from __future__ import annotations

LABELS = {
    "/v1/chat/completions": "chat", "/chat/completions": "chat", "/v1/completions": "completions",
    "/completions": "completions",
    "/v1/responses": "responses", "/responses": "responses", "/v1/messages": "messages", "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate", "/tokenize": "tokenize", "/detokenize": "detokenize",
    "/apply-template": "apply_template",
    "/v1/embeddings": "embeddings", "/embeddings": "embeddings", "/api/embed": "ollama_embed",
    "/v1/messages/count_tokens": "count_tokens", "/v1/responses/input_tokens": "count_tokens",
    "/api/embeddings": "ollama_embed",
}  # fmt: skip


def route_of(path: str) -> str:
    """The label of a path: one of a few, whatever clients ask for."""
    return LABELS.get(path) or ("page" if path == "/" or path.startswith("/page/") else "other")
