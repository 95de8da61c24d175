"""Errors in the shape OpenAI's clients expect: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
T = TypeVar("T")
TAGS = {"body", "str", "int", "float", "bool", "dict", "none", "tuple"}


class ApiError(Exception):
    """An answer that isn't 200. `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def reason(self) -> str:
        """For logs: says what was wrong and nothing of what was sent."""
        return self.code or TYPES.get(self.status, "invalid_request" if self.status < 500 else "server_error")

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**out, "WWW-Authenticate": "Bearer"} if self.status == 401 else out

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def from_validation(error: ValidationError) -> ApiError:
    """One line about the most telling of pydantic's complaints (unknown fields first, then the deepest)."""
    complaints: Sequence[ErrorDetails] = error.errors()
    first = min(complaints, key=lambda c: (c["type"] != "extra_forbidden", -len(c["loc"])))
    name = field_name(first["loc"])
    if first["type"] == "extra_forbidden":
        return bad(f"Unknown or unsupported field: '{name}'.", name, "unknown_field")
    if first["type"] == "json_invalid":
        return bad("The body is not valid JSON.", None, "invalid_json")
    if first["type"] == "missing":
        return bad(f"Missing field: '{name}'." if name else "The body is missing; send a JSON object.", name or None, "missing_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    return bad(f"Invalid value for '{name}': {message}." if name else f"{message}.", name or None, "invalid_value")


def read(raw: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body; what is wrong with it as an answer for its sender."""
    try:
        return parse(raw)
    except ValidationError as e:
        raise from_validation(e) from None
    except RecursionError:
        raise ApiError(400, "The body nests too deep.", code="invalid_json") from None


def field_name(loc: Sequence[int | str]) -> str:
    """('body', 'messages', 0, 'content') -> 'messages[0].content', without pydantic's union tags."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in TAGS and "[" not in part and "-" not in part:
            name += f".{part}" if name else part
    return name
