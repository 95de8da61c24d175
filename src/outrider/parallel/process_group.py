"""The process group of tensor parallelism: how the ranks start and connect, and their collectives.

If `torchrun` (or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started a process, it takes its
rank from there; otherwise the first process starts the others itself, with that environment. Tensors travel by NCCL
between GPUs and by gloo between CPUs; rank 0's control messages (plain objects) always by gloo.

Sums have a fixed order: the parts of all processes are gathered and added in the order of the ranks. The library's
all-reduce would choose its order by the size of the message, and a row's sum would depend on the batch.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..models.split import Collectives, TPRank
from ..types import require
from .watch import POLL_S, Watch

if TYPE_CHECKING:
    from ..engine.step import Executor

NO_TIMEOUT = timedelta(days=365)  # an idle server waits without limit; `Watch` detects a lost process
EXIT_TIMEOUT_S = 20.0  # seconds until processes that should have ended are killed
START_TIMEOUT = timedelta(minutes=10)
DEVICE_ENV = "OUTRIDER_TEAM"  # in the environment of processes that the first one starts: cpu or cuda
FIRST_PID_ENV = "OUTRIDER_TEAM_FIRST"  # the first process's pid, in the environment of those it starts
# of processes that the first one starts
WORKER_COMMAND = (sys.executable, "-c", "from outrider.llm import worker; worker()")


class PeerLost(Exception):
    """A collective failed because another process is lost."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raises `PeerLost` for errors of collectives inside."""
    try:
        yield
    except RuntimeError as error:  # includes torch's errors of collectives
        raise PeerLost(str(error)) from error


def is_worker() -> bool:
    """True if this process was started as one of several, and not as the first."""
    return _number("RANK") > 0


def _number(name: str) -> int:
    """A number of the environment, such as RANK; 0 if it is not set."""
    text = os.environ.get(name, "0")
    require(text.isdecimal(), f"{name} in the environment must be a whole number, got {text!r}")
    return int(text)


def follow_to_the_end() -> None:
    """Ends a process that the first one started when the first one ends, even while it still waits for the others."""

    def look() -> None:
        while os.getppid() == _number(FIRST_PID_ENV):
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=look, name="outrider-first", daemon=True).start()


class ProcessGroup(Collectives):
    """One of `tp.world` processes; the models' `Collectives`. A process is in one group at a time, as in torch."""

    def __init__(self, store: dist.Store, device: torch.device, watch: Watch):
        self.tp = watch.tp
        self.device = device
        self.watch = watch
        self.children = watch.children
        tp = self.tp
        cuda = device.type == "cuda"
        self.executors: list[Executor] = []  # closed first: NCCL cannot end while captured graphs hold collectives
        self._open = True
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=tp.rank,
            world_size=tp.world,
            timeout=NO_TIMEOUT,
            device_id=device if cuda else None,
        )
        self.control_group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if cuda else dist.group.WORLD
        atexit.register(self.close)

    # ---- tensors
    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over processes in the order of the ranks; shorter types are summed in float32 and rounded once."""
        every = self._every(partial.contiguous())
        if self.tp.world <= 2:
            return every[0] + every[1] if self.tp.world == 2 else every[0]
        out = every[0].float() if partial.dtype != torch.float32 else every[0]
        for rank in range(1, self.tp.world):
            out = out + every[rank]
        return out.to(partial.dtype)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        wide = max(widths)
        padded = F.pad(part, (0, wide - part.shape[1])) if part.shape[1] < wide else part.contiguous()
        every = self._every(padded)
        return torch.cat([every[rank, :, :width] for rank, width in enumerate(widths)], dim=1)

    def _every(self, part: Tensor) -> Tensor:
        """[world, ...]: all processes' tensors, in the order of the ranks. With one process it is in place already."""
        every = part if self.tp.world == 1 else part.new_empty((self.tp.world * part.shape[0], *part.shape[1:]))
        with peer_errors():
            if self.device.type == "cuda":
                # one kernel of NCCL, which a CUDA graph captures like any other
                dist.all_gather_into_tensor(every, part)
            else:
                dist.all_gather(list(every.chunk(self.tp.world)), part)
        return every.view(self.tp.world, *part.shape)

    # ---- control messages
    def send(self, message: object) -> None:
        """Broadcasts rank 0's message to all others."""
        with peer_errors():
            dist.broadcast_object_list([message], 0, group=self.control_group)

    def receive(self) -> object:
        """Rank 0's next message."""
        box: list[object] = [None]
        with peer_errors():
            dist.broadcast_object_list(box, 0, group=self.control_group)
        return box[0]

    def all_reduce_min(self, numbers: Sequence[int], error: str | None = None) -> list[int]:
        """The elementwise minimum over processes. `error`: why this process has no values; it is raised in all."""
        replies: list[tuple[Sequence[int], str | None]] = [((), None)] * self.tp.world
        with peer_errors():
            dist.all_gather_object(replies, (numbers, error), group=self.control_group)
        for rank, (_, reason) in enumerate(replies):
            where = f"process {rank} of --tensor-parallel {self.tp.world}: " if rank > 0 else ""
            require(reason is None, f"{where}{reason}")
        return [min(values) for values in zip(*(values for values, _ in replies))]

    # ---- the end
    def close(self, announced: bool = False) -> None:
        """Ends all processes together; those that hang are killed. announced: the others already know of the end."""
        if not self._open:
            return
        self._open = False
        self.watch.ending = True
        atexit.unregister(self.close)
        late = threading.Timer(EXIT_TIMEOUT_S, self._force)  # a process may be stuck
        late.daemon = True
        late.start()
        if self.tp.rank == 0 and not announced:
            self.send(None)
        dist.barrier(group=self.control_group)
        self.watch.stop()
        for executor in self.executors:
            executor.close()
        dist.destroy_process_group()
        late.cancel()
        for child in self.children:
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()

    def abandon(self) -> None:
        """Kills the others at once: they are loading and would not receive a message."""
        self._open = False
        self.watch.ending = True
        atexit.unregister(self.close)
        for child in self.children:
            child.kill()

    def _force(self) -> None:
        self.abandon()
        os._exit(1)


def join(world: int, device: str | None, command: Sequence[str] = WORKER_COMMAND) -> ProcessGroup:
    """This process's group. The first process starts the others (with `command`) unless they run already."""
    require(not dist.is_initialized(), "one tensor-parallel model at a time: close the first one")
    place = _place(device, world)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = _number("RANK")
        there = _number("WORLD_SIZE")
        remedy = f"--tensor-parallel asks for {world}: give both the same number"
        require(there == world, f"{there} processes were started and {remedy}")
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
        watch = Watch(TPRank(rank, world), os.environ["MASTER_ADDR"], _number("MASTER_PORT"), children=[])
        return ProcessGroup(store, place, watch)
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=START_TIMEOUT, wait_for_workers=False)
    children = [_start(command, rank, world, port=store.port, kind=place.type) for rank in range(1, world)]
    return ProcessGroup(store, place, Watch(TPRank(0, world), "127.0.0.1", store.port, children=children))


def _start(command: Sequence[str], rank: int, world: int, port: int, kind: str) -> subprocess.Popen[bytes]:
    ours = str(Path(__file__).resolve().parents[2])
    known = [ours, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: connect to it
        DEVICE_ENV: kind,
        FIRST_PID_ENV: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(known)),
    }
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def _place(device: str | None, world: int) -> torch.device:
    """One GPU per process, in the order of the local ranks; or the CPU."""
    several = f"--tensor-parallel {world} takes several: choose them with CUDA_VISIBLE_DEVICES"
    require(not (device or "").startswith("cuda:"), f"--device {device} names one GPU, {several}")
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    local = _number("LOCAL_RANK")
    here = torch.cuda.device_count()
    enough = "RANK" in os.environ or here >= world
    seen = f"torch sees {here}"
    require(enough, f"--tensor-parallel {world} needs {world} GPUs, {seen}: take fewer, or --device cpu")
    require(local < here, f"local rank {local} has no GPU of its own: {seen}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
