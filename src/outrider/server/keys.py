"""The valid API keys: those of the command line, and those of a file, which is read again on SIGHUP."""

from __future__ import annotations

import hashlib
import hmac
import logging

from ..types import OutriderError
from .settings import ServerSettings, read_keys

log = logging.getLogger("outrider.server")


class Keys:
    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [k.encode() for k in settings.api_keys]
        self._own, self._file = settings.api_key, settings.api_key_file

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: bytes) -> str | None:
        """The client of a key. Compares with every key, in constant time each, so that timing reveals nothing."""
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return f"key {matches.index(True)}" if any(matches) else None

    def namespace(self, who: str) -> bytes:
        """A salt that separates this key's prefixes from other keys': stable over restarts, and not the key itself."""
        number = who.removeprefix("key ")
        if not self._keys or who == number or int(number) >= len(self._keys):
            return b""
        return hashlib.blake2b(self._keys[int(number)], digest_size=16, person=b"outrider-prefix").digest()

    def reload(self) -> None:
        """Read the file again. One that can't be read leaves the keys as they were: a typing error must not open the
        server."""
        if self._file is None:
            log.warning("there is no --api-key-file to read again")
            return
        try:
            self._keys = [k.encode() for k in read_keys(self._own, self._file)]
        except OutriderError as e:
            log.error("the API keys stay as they were: %s", e)
        else:
            log.info("read %d API keys again", len(self._keys))
