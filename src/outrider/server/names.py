"""What routes are called in metrics and logs."""

from __future__ import annotations

LABELS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


def route_of(path: str) -> str:
    """The label of a path: one of a few, whatever clients ask for."""
    return LABELS.get(path) or ("page" if path == "/" or path.startswith("/page/") else "other")
