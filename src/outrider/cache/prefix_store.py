"""Prefix cache on disk: full pages of K/V in files, found again after a restart by the chain hash of `prefix.py`.

One file per page, `FOLDER/<identity>/<page number>-<chain hash>.kv`: a header, then the page's bytes, group by group
and layer by layer, K before V. The identity is a hash of everything the bits depend on (weights, kernels, K/V format).
Files appear atomically (write, then rename), so any number of servers may share a folder without locks. A truncated,
changed or foreign file is ignored with one line in the log, and its page is recomputed.

Pages are copied out between steps into a bounded queue and written by a thread. They are read back when a prompt is
admitted, a bounded number of bytes per step, into ordinary entries of the prefix cache. Beyond its size limit the
folder evicts the least recently used pages, the deepest of a chain first, so that the remaining ones stay reachable.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..types import GroupName, bad_input
from .prefix import PrefixChain

if TYPE_CHECKING:
    from .store import KVStore

log = logging.getLogger("outrider")
# magic, identity, chain hash, CRC-32 of the payload, groups in it, payload bytes
HEADER = struct.Struct("<8s16s16sIIQ8x")
MAGIC = b"outrkv1\n"
MAX_QUEUED_BYTES = 256 << 20  # bytes copied out and not yet written; more pages wait in the cache
BYTES_PER_STEP = 64 << 20  # bytes read back, or copied out, between two steps
READ_PAGES = 8  # pages read, then copied together
KEPT_SHARE = 0.9  # of the size limit is left by an eviction, so that not every page evicts
StoredPage = tuple[bytes, bytes, Mapping[GroupName, Tensor]]  # parent, key, bytes by group


@dataclass(frozen=True)
class PrefixStoreOptions:
    folder: Path
    max_bytes: int  # of all files in the folder, those of other models included
    identity: str  # pages are read back by engines with the same one only


class PrefixStore:
    def __init__(self, kv: KVStore, folder: Path, limit: int, identity: str) -> None:
        """limit: bytes of all files in the folder, those of other models included."""
        self._kv = kv
        self._root = folder
        self._limit = limit
        self._names = sorted(kv.groups)  # bit i of a file's groups is group i
        shapes = " ".join(f"{name}{tuple(t.shape[1:])}" for name in self._names for t in kv.layers[name])
        self._id = hashlib.blake2b(f"{identity} {shapes}".encode(), digest_size=16).digest()
        self._folder = folder / self._id.hex()
        with bad_input(OSError, lambda e: f"can't use the prefix store {folder}: {e.strerror or e}"):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for directory in (folder, self._folder):
                directory.chmod(0o700)
        self._waiting: deque[tuple[int, bytes, float]] = deque()  # pages to be copied out: number, hash, time of use
        self._queued = 0  # bytes
        self._size: int | None = None  # bytes of the folder's files by our count; None: not counted yet
        self._lock = threading.Lock()
        self._failed = False
        # what is queued when the interpreter ends is still written
        self._writer = ThreadPoolExecutor(1, "outrider-prefix-store")
        self.pages_read = 0
        self.pages_written = 0

    # ---- out ------------------------------------------------------------------------------------------------------
    def offer(self, chain: PrefixChain, numbers: Sequence[int]) -> None:
        """Queue these pages of a chain for writing. The files of a chain have one timestamp, so that it is evicted from
        its end."""
        if self._failed:
            return
        if chain.files_used_at == 0.0:
            chain.files_used_at = time.time()
        self._waiting.extend((number, chain.keys[number], chain.files_used_at) for number in numbers)

    def drain(self) -> None:
        """Between two steps: copy waiting pages out, as far as the queue has space."""
        moved = 0
        while self._waiting and moved < BYTES_PER_STEP and self._queued < MAX_QUEUED_BYTES:
            number, key, used = self._waiting.popleft()
            entry = self._kv.prefix.entries.get(key)
            if entry is None:
                continue  # evicted before it was written
            groups = [name for name in self._names if entry.pages[name]]
            parts = [t[entry.pages[name]].reshape(-1) for name in groups for t in self._kv.layers[name]]
            # wholly before a window: a link of the chain
            data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
            done = None
            # the copy is in the order of the device's work; the writer waits for it, the step does not
            if data.device.type == "cuda":
                host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
                data = host.copy_(data, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            moved += data.numel()
            with self._lock:
                self._queued += data.numel()
            try:
                mask = sum(1 << self._names.index(name) for name in groups)
                path = self._path(number, key)
                self._writer.submit(self._write, path, key, groups=mask, data=data, done=done, used=used)
            except RuntimeError:  # the interpreter ends
                self._waiting.clear()

    def touch(self, keys: Sequence[bytes]) -> float:
        """This chain is in use, now: its files are the last to go."""
        now = time.time()
        if keys and not self._failed:
            with contextlib.suppress(RuntimeError):
                self._writer.submit(self._touch, list(keys), now)
        return now

    def flush(self) -> None:
        """Wait until all that was offered is written."""
        while self._waiting and not self._failed:
            self.drain()
            self._writer.submit(lambda: None).result()
        self._writer.submit(lambda: None).result()

    def _path(self, number: int, key: bytes) -> Path:
        return self._folder / f"{number:06d}-{key.hex()}.kv"

    def _touch(self, keys: Sequence[bytes], now: float) -> None:
        for number, key in enumerate(keys):
            try:
                os.utime(self._path(number, key), (now, now))
            except OSError:
                if self._kv.prefix.has_full:
                    return  # the chain ends here

    def _write(
        self, path: Path, key: bytes, groups: int, data: Tensor, done: torch.cuda.Event | None, used: float
    ) -> None:
        """On the writer's thread. If the folder is full or gone, the log says so and nothing is written any more."""
        try:
            if self._failed or path.exists():
                return
            if done is not None:
                done.synchronize()
            payload = data.numpy().data
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:  # mode 0600
                try:
                    file.write(HEADER.pack(MAGIC, self._id, key, zlib.crc32(payload), groups, len(payload)))
                    file.write(payload)
                    file.close()
                    os.utime(file.name, (used, used))
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self.pages_written += 1
            self._size = None if self._size is None else self._size + HEADER.size + len(payload)
            if self._size is None or self._size > self._limit:
                self._evict()
        except OSError as e:
            self._failed = True
            log.warning("the prefix store %s is not written any more: %s", self._root, e.strerror or e)
        finally:
            with self._lock:
                self._queued -= data.numel()

    def _evict(self) -> None:
        """Count the folder's bytes; if too many, delete files used least recently, the deepest of a chain first."""
        entries: list[tuple[float, int, int, str]] = []
        for folder in os.scandir(self._root):
            with contextlib.suppress(OSError):
                for file in os.scandir(folder.path):
                    status = file.stat()
                    number = file.name.partition("-")[0]
                    if file.name.endswith(".kv") and number.isdigit():
                        entries.append((status.st_mtime, -int(number), status.st_size, file.path))
                    elif file.name.endswith(".part") and time.time() - status.st_mtime > 3600:
                        os.unlink(file.path)  # its server was killed
        self._size = sum(size for _, _, size, _ in entries)
        if self._size <= self._limit:
            return
        for _, _, size, path in sorted(entries):
            with contextlib.suppress(FileNotFoundError):  # another server was faster
                os.unlink(path)
            self._size -= size
            if self._size <= KEPT_SHARE * self._limit:
                return

    # ---- back -----------------------------------------------------------------------------------------------------
    def restore(self, chain: PrefixChain, limit: int, granularity: int) -> Iterator[None]:
        """Bring the pages of a prompt's first `limit` positions that are on disk and not in the cache back into it;
        yields between two steps. A page that turns out to be bad ends the prefix before it."""
        kv = self._kv
        size = self._kv.spec.page_size
        keys = chain.keys[: max(0, limit) // size]
        chain.files_used_at = self.touch(keys)
        bad = len(keys)
        while bad:  # again with a shorter prefix if a page is missing: it needs other pages of sliding windows
            count = self._count_available(keys[:bad], granularity // size)
            if not count:
                return
            kv.prefix.use(keys[:count])
            bad = 0
            moved = 0
            at_once = list[StoredPage]()
            for number, key in enumerate(keys[:count]):
                seen = (name for name in self._names if number >= kv.prefix.first_page(name, count))
                wanted = [name for name in seen if not kv.prefix.page(key, name)]
                if not wanted and (key in kv.prefix.entries or not kv.prefix.has_full):
                    continue
                data = self._read(number, key) if wanted else {}
                if data is None or not set(wanted) <= data.keys():  # a file may lack pages that were before the window
                    bad = number
                    break
                parent = chain.parent(number)
                if kv.prefix.has_full and number and not at_once and parent not in kv.prefix.entries:
                    return  # evicted between two steps
                at_once.append((parent, key, {name: data[name] for name in wanted}))
                moved += sum(map(len, data.values()))
                if len(at_once) < READ_PAGES and moved < BYTES_PER_STEP:
                    continue
                if not self._adopt(at_once):
                    return
                if moved >= BYTES_PER_STEP:
                    moved = 0
                    yield
            if not self._adopt(at_once):
                return

    def _count_available(self, keys: Sequence[bytes], unit: int) -> int:
        """How many pages, a multiple of `unit`, the longest prefix has whose pages are in the cache or have a file."""
        prefix = self._kv.prefix
        available = 0
        run = 0  # pages up to this one without a gap
        for number, key in enumerate(keys):
            exists = key in prefix.entries or self._path(number, key).exists()
            if not exists and prefix.has_full:
                break
            run = run + 1 if exists else 0
            count = number + 1
            if count % unit == 0 and all(run >= count - prefix.first_page(name, count) for name in self._names):
                available = count
        return available

    def _adopt(self, pages: list[StoredPage]) -> bool:
        """Into the cache, and out of the list. False: it has no space."""
        fits = self._kv.adopt(pages)
        self.pages_read += fits * len(pages)
        pages.clear()
        return fits

    def _read(self, number: int, key: bytes) -> dict[GroupName, Tensor] | None:
        """The page's bytes by group, copied from its file; None: it is not there or not as it was written."""
        path = self._path(number, key)
        try:
            pages = self._parse(path, key)
        except FileNotFoundError:
            return None
        except OSError as e:
            log.warning("a page of the prefix store can't be read and is ignored: %s: %s", path.name, e.strerror or e)
            return None
        if pages is None:
            log.warning("a page of the prefix store is damaged or foreign and is ignored: %s", path.name)
            with contextlib.suppress(OSError):
                path.unlink()
        return pages

    def _parse(self, path: Path, key: bytes) -> dict[GroupName, Tensor] | None:
        """The pages in a file; None if its header, its length or its checksum is wrong."""
        layer_bytes = {name: sum(t[0].numel() for t in self._kv.layers[name]) for name in self._names}
        data = read_regular_file(path, HEADER.size + sum(layer_bytes.values()) + 1)
        if len(data) < HEADER.size:
            return None
        magic, identity, header_key, crc, groups, size = HEADER.unpack_from(data)
        names = [name for i, name in enumerate(self._names) if groups >> i & 1]
        sizes = [layer_bytes[name] for name in names]
        if (magic, identity, header_key, size) != (MAGIC, self._id, key, sum(sizes)):
            return None
        if len(data) != HEADER.size + size or zlib.crc32(memoryview(data)[HEADER.size :]) != crc:
            return None
        payload = torch.frombuffer(data, dtype=torch.uint8)[HEADER.size :]
        return dict(zip(names, payload.split(sizes), strict=True))


def read_regular_file(path: Path, limit: int) -> bytearray:
    """At most `limit` bytes of a regular file; nothing of anything else.

    Opening a fifo would wait for its writer. The bytes are copied: a mapping ends the process (SIGBUS) if the file is
    truncated while it is read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return bytearray()
        data = bytearray(min(limit, status.st_size))
        num_bytes = 0
        with open(descriptor, "rb", buffering=0, closefd=False) as file, memoryview(data) as view:
            while num_bytes < len(data):
                count = file.readinto(view[num_bytes:])
                if not count:
                    break  # truncated meanwhile
                num_bytes += count
        del data[num_bytes:]
        return data
    finally:
        os.close(descriptor)
