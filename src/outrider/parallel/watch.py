"""Detects lost peers: a thread in every process ends it when another process of the group is lost.

A collective with a lost process would wait for ever. So rank 0 polls the processes it started, and every process writes
a heartbeat into rank 0's store once per second. Rank 0 ends the run with a one-line error when a process has ended, or
has sent no heartbeat for `MAX_SILENCE_S` seconds; the others end silently when the store is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..models.split import TPRank

# seconds
POLL_S = 0.25
HEARTBEAT_S = 1.0
MAX_SILENCE_S = 30.0
GRACE_S = 2.0  # seconds to send errors to running requests; 0: send none


class Watch:
    def __init__(self, tp: TPRank, host: str, port: int, children: Sequence[subprocess.Popen[bytes]]):
        self.tp = tp
        self.children = children
        self.ending = False  # a regular end of all processes
        self.gone: str | None = None  # which process was lost, once it is known
        self.grace = GRACE_S
        self._stopped = threading.Event()
        self._where = (host, port)
        self._thread = threading.Thread(target=self._run, name="outrider-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.ending = True
        self._stopped.set()
        self._thread.join(5.0)

    def lost(self, why: str) -> None:
        """Called when a collective failed. Usually a process is lost: gives the thread time to find out which."""
        if self.gone is None and not self.ending:
            until = time.monotonic() + 4 * POLL_S
            while self.gone is None and time.monotonic() < until:
                self.gone = self.gone or self._ended()
                time.sleep(POLL_S / 10)
            lost = f"the processes of --tensor-parallel {self.tp.world} lost one another"
            self.gone = self.gone or f"{lost} ({why.splitlines()[0][:120]})"
        if threading.current_thread() is threading.main_thread() or not (self.grace or self.ending):
            time.sleep(3600)  # the thread ends the process; print nothing else

    def _run(self) -> None:
        signs: dict[int, tuple[int, float]] = {}
        store: dist.Store | None = None
        at = 0.0
        while not self._stopped.wait(POLL_S):
            if self.tp.rank == 0:
                self.gone = self.gone or self._ended()
            if self.gone is None and time.monotonic() - at >= HEARTBEAT_S:
                at = time.monotonic()
                try:
                    if store is None:
                        store = dist.TCPStore(
                            *self._where, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False
                        )
                    store.add(f"alive/{self.tp.rank}", 1)
                    if self.tp.rank == 0:
                        self.gone = self._silent(store, signs)
                except Exception as error:  # the store ended with rank 0
                    self.gone = f"the first process is gone ({type(error).__name__})"
            if self.gone is not None and not self.ending:
                self._end(self.gone)

    def _ended(self) -> str | None:
        for rank, child in enumerate(self.children, 1):
            code = child.poll()
            if code is not None and not self.ending:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                which = f"process {rank} of --tensor-parallel {self.tp.world} (pid {child.pid})"
                return f"{which} {how}: the run cannot go on without it"
        return None

    def _silent(self, store: dist.Store, signs: dict[int, tuple[int, float]]) -> str | None:
        """Processes that sent a first heartbeat must keep sending them."""
        now = time.monotonic()
        for rank in range(1, self.tp.world):
            count = int(store.add(f"alive/{rank}", 0))
            before, since = signs.get(rank, (0, now))
            signs[rank] = (count, now if count != before else since)
            if count and now - signs[rank][1] > MAX_SILENCE_S:
                which = f"process {rank} of --tensor-parallel {self.tp.world}"
                return f"{which} gave no sign of life for {MAX_SILENCE_S:.0f} s"
        return None

    def _end(self, why: str) -> None:
        if self.tp.rank == 0:
            time.sleep(self.grace)
            for child in self.children:
                if child.poll() is None:
                    child.kill()
            sys.stdout.flush()
            print(f"outrider: {why}", file=sys.stderr, flush=True)
        os._exit(1)
