"""A lock on an open file that one process holds at a time."""

from __future__ import annotations

import sys
from typing import BinaryIO

FAR = 1 << 62  # Windows makes locked bytes unreadable to others: lock one behind the end of any file


def lock_file(file: BinaryIO) -> None:
    """Locks the file until it is closed. Raises OSError if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        at = file.tell()
        file.seek(FAR)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        finally:
            file.seek(at)
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
