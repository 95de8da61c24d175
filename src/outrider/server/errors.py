"""Errors in the shape OpenAI's clients expect: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

log = logging.getLogger("outrider.server")
INTERNAL = "Internal error; the server's log has the details."
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
T = TypeVar("T")
UNION_TAGS = {"body", "str", "int", "float", "bool", "dict", "none", "tuple", "Tool", "Function"}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
UTF8_BOM = b"\xef\xbb\xbf"  # some editors write it at the start of a file
# A parser holds the GIL until it is done. 4 MB of text take 5 ms, 4 MB of `{},` half a second, so the number of values
# is limited.
# separators; members of objects together with lists and objects
MAX_VALUES = 1 << 19
MAX_MEMBERS = 1 << 16
BLOCK = 1 << 18  # bytes counted at once, in less than a millisecond


class ApiError(Exception):
    """An error that the client sees. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def reason(self) -> str:
        """Kind of the error for logs, without text of the request."""
        return self.code or self._kind("server_error")

    def _kind(self, ours: str) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else ours)

    def body(self) -> dict[str, object]:
        kind = self._kind("server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, object]:
        """The error in the shape of a route's clients: Ollama's, Anthropic's, else OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": self._kind("api_error"), "message": self.message}}
        if path.endswith("/responses") and self.param == "messages":
            self.param = "input"
        return self.body()

    def response(self, path: str = "") -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body_for(path), status_code=self.status, headers=headers)


class ContextOverflow(ApiError):
    """A prompt that exceeds the context, in the wording that makes clients and agents shorten it."""

    def __init__(self, tokens: int, *, field: str, most: int, context: int, at_least: bool = False) -> None:
        """most: maximum tokens of a prompt. at_least: the count is a lower bound, since the text was not tokenised to
        its end."""
        self._tokens = tokens
        self._most = most
        size = f"your {field} resulted in {'at least ' if at_least else ''}{tokens} tokens"
        advice = f"Please reduce the length of the {field}; at most {most} tokens are left for it."
        message = f"This model's maximum context length is {context} tokens. However, {size}. {advice}"
        super().__init__(400, message, param=field, code="context_length_exceeded")

    def body_for(self, path: str) -> dict[str, object]:
        """The error in Anthropic's wording for its clients."""
        if path.startswith("/v1/messages"):
            self.message = f"prompt is too long: {self._tokens} tokens > {self._most} maximum"
        return super().body_for(path)


def where(error: BaseException) -> str:
    """Type and place of an error, for the log. Its message is left out: it may hold a prompt."""
    return type(error).__name__ + "\n" + "".join(traceback.format_tb(error.__traceback__))


def api_error(error: Exception, request_id: str) -> ApiError:
    """Maps an exception to the error that the client sees. Logs it if the request is not at fault."""
    if isinstance(error, ApiError):
        return error
    log.error("unexpected, in request %s: %s", request_id, where(error))
    return ApiError(500, INTERNAL)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def bad_if(wrong: object, message: str, param: str | None = None) -> None:
    if wrong:
        raise bad(message, param)


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", retry_after=5, code="shutting_down")


def from_validation(error: ValidationError) -> ApiError:
    """One line about the most helpful of pydantic's errors: unknown fields first, then the most deeply nested."""
    complaints: Sequence[ErrorDetails] = error.errors(include_url=False, include_input=False)
    first = min(complaints, key=lambda c: (c["type"] != "extra_forbidden", -len(c["loc"])))
    unknown = first["type"] == "extra_forbidden"
    name = field_name(first["loc"][:-1] if unknown else first["loc"])
    if unknown:
        last = str(first["loc"][-1])[:100]  # verbatim, cut to a length
        name = f"{name}.{last}" if name else last
        return bad(f"Unknown or unsupported field: '{name}'.", name, "unknown_field")
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", ""))[:100]
        return bad(f"The body is not valid JSON: {why}.", None, "invalid_json")
    if first["type"] == "missing":
        message = f"Missing field: '{name}'." if name else "The body is missing; send a JSON object."
        return bad(message, name or None, "missing_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    return bad(f"Invalid value for '{name}': {message}." if name else f"{message}.", name or None, "invalid_value")


def read(raw: bytes, parse: Callable[[bytes], T], mend: bool = True) -> T:
    """Parses a body; errors become an `ApiError`. mend: replace lone surrogates and try again."""
    check_size(raw)
    error: ApiError | None
    try:
        return parse(raw.removeprefix(UTF8_BOM))
    except ValidationError as e:
        empty = not raw.removeprefix(UTF8_BOM).strip()
        error = bad("The body is empty; send a JSON object.", None, "invalid_json") if empty else from_validation(e)
    except RecursionError:
        error = ApiError(400, "The body nests too deep.", code="invalid_json")
    if mend and error.code == "invalid_json" and SURROGATE.search(raw):
        return read(_mended(raw), parse, mend=False)
    try:
        raise error  # not inside `except`: the validation error would stay attached, and it holds the body's values
    finally:
        error = None  # breaks the cycle of error, traceback and frame, which would wait for the garbage collector


def check_size(raw: bytes) -> None:
    """Refuses a body with more values than any request needs. Separators inside of texts do not count. Counts block by
    block, so another thread waits for the GIL no longer than one block takes."""
    if len(raw) <= min(MAX_VALUES, MAX_MEMBERS):
        return
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # every quote left begins or ends a text
    many = members = inside = 0
    for start in range(0, len(raw), BLOCK):
        block = np.frombuffer(raw, np.uint8, min(BLOCK, len(raw) - start), start)
        quotes = np.cumsum(block == ord('"'), dtype=np.uint8) + np.uint8(inside)
        inside = int(quotes[-1]) & 1
        outside = (quotes & 1) == 0
        colons, commas, lists, objects = (int(np.count_nonzero((block == kind) & outside)) for kind in b":,[{")
        many = many + commas + colons
        members = members + colons + lists + objects
        if many > MAX_VALUES or members > MAX_MEMBERS:
            most = f"{MAX_VALUES} values and {MAX_MEMBERS} objects, lists and members of objects"
            raise bad(f"The body is too complex: at most {most} can be read.", None, "body_too_complex")


def _mended(raw: bytes) -> bytes:
    """Replaces each lone surrogate with a ?. Clients that cut a text in two can leave half of an emoji."""
    try:
        return json.dumps(json.loads(raw.removeprefix(UTF8_BOM)), ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        raise bad("The body is not valid JSON, or nests too deep.", None, "invalid_json") from None


def field_name(loc: Sequence[int | str]) -> str:
    """('body', 'messages', 0, 'content') -> 'messages[0].content', without pydantic's union tags."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in UNION_TAGS and "[" not in part and "-" not in part:
            name += f".{part}" if name else part
    return name
