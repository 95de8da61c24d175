"""Forms: multipart/form-data bodies, as uploads of files and sound send them."""

from __future__ import annotations

from dataclasses import dataclass
from email.errors import MessageError
from email.message import Message
from email.parser import HeaderParser

from .errors import ApiError, bad

MAX_PARTS = 64
MAX_HEAD_BYTES = 4096  # maximum bytes of one part's headers
FORM = "multipart/form-data"


@dataclass(frozen=True)
class FormPart:
    content: bytes
    filename: str = ""

    def text(self, field: str) -> str:
        try:
            return self.content.decode().strip()
        except UnicodeDecodeError:
            raise bad(f"{field} is not valid UTF-8.", field) from None


def read_form(content_type: str, raw: bytes, fields: str) -> dict[str, FormPart]:
    """The parts of a form by name; of parts with the same name, the last. fields: names the expected parts in
    errors."""
    boundary = _boundary(content_type)
    if boundary is None:
        raise bad(f"The body must be {FORM} with {fields}.", "file")
    delimiter = b"\r\n--" + boundary
    _, *sections = (b"\r\n" + raw).split(delimiter, MAX_PARTS + 1)
    parts: dict[str, FormPart] = {}
    for section in sections:
        if section.startswith(b"--"):
            return parts
        if len(parts) == MAX_PARTS:
            raise bad(f"The form has more than {MAX_PARTS} parts.", code="too_many_parts")
        named = _part(section)
        if named is not None:
            name, part = named
            parts[name] = part
    raise bad(f"The form ends before its closing boundary; it must have {fields}.", "file", "incomplete_form")


def _boundary(content_type: str) -> bytes | None:
    """The boundary in the header; None if there is none or the body is not a form."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != FORM:
        return None
    try:
        boundary = header.get_boundary()
    except (MessageError, ValueError, LookupError):
        return None
    return boundary.encode("latin-1", "replace") if boundary else None


def _part(section: bytes) -> tuple[str, FormPart] | None:
    """Name and content of the part between two boundaries; None if it has no name."""
    _, _, behind_boundary = section.partition(b"\r\n")
    head, blank_line, content = (b"\r\n" + behind_boundary).partition(b"\r\n\r\n")
    if not blank_line or len(head) > MAX_HEAD_BYTES:
        return None
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace").strip())
    try:
        name = headers.get_param("name", header="content-disposition")
        filename = headers.get_filename()
    except (MessageError, ValueError, LookupError):
        return None
    return (name, FormPart(content, filename or "")) if isinstance(name, str) else None


def refuse_other_types(content_type: str) -> None:
    """Refuses a body that is not a form before it is read."""
    if content_type.partition(";")[0].strip().lower() != FORM:
        message = f"The body must be a form: send 'Content-Type: {FORM}'."
        raise ApiError(415, message, code="unsupported_media_type")
