"""Deploys a cluster on Ray or updates a running one; if it started Ray itself, it shuts it down at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable

import ray
from ray import serve

from ..types import OutriderError, bad_input, require
from .app import application
from .config import ClusterConfig

APP = "outrider"
RAY_OPTIONS = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "serve"}
OBJECT_STORE = 200 << 20  # bytes: requests and answers are small and travel by value


def up(config: ClusterConfig, address: str, note: Callable[[str], None], say: Callable[[str], None]) -> None:
    """The whole command: connects, deploys, and keeps running if this process started Ray."""
    ours = connect(address, note)
    try:
        if not (config.front().loopback or config.api_key_file or os.environ.get("OUTRIDER_API_KEY")):
            say(f"warning: {config.host} can be reached from other machines and no API key is set")
        note(f"deploying {config.served_name}, replicas {config.replicas}")
        deploy(config, ours)
        say(f"serving {config.served_name} at http://{config.host}:{config.port} (API at /v1, metrics at /metrics)")
        if ours:
            stay()
            note("stopping: running requests finish")
            _drain(config.drain)
    finally:
        if ours:
            serve.shutdown()
        ray.shutdown()


def connect(address: str, say: Callable[[str], None]) -> bool:
    """Joins the Ray cluster at `address` (auto: RAY_ADDRESS, else one on this machine, else a new one). Returns True if
    the cluster is new."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    named = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if named != "local":
        _reachable(named)
        try:
            ray.init(named, **RAY_OPTIONS)
            say("joined the Ray cluster that runs here" if named == "auto" else f"joined the Ray cluster at {named}")
            return False
        except ConnectionError as e:
            if named != "auto":
                raise OutriderError(f"no Ray cluster at {named}: {_first_line(e)}") from None
    say("no Ray cluster found: starting one on this machine" if named == "auto" else "starting Ray on this machine")
    ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **RAY_OPTIONS)
    return True


def _reachable(address: str) -> None:
    """Tests the address first: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").partition(":")
    if port.isdigit():
        with bad_input(OSError, lambda e: f"no Ray cluster at {address}: {e.strerror or e}"):
            socket.create_connection((host, int(port)), timeout=10).close()


def deploy(config: ClusterConfig, ours: bool) -> None:
    """Returns when every replica answers. A running cluster is updated replica by replica; no request fails."""
    placed = config.placed(ray.cluster_resources().get("GPU", 0.0))
    if ours:
        need_room(placed)
    serve.start(http_options={"host": config.host, "port": config.port})
    try:
        key = os.environ.get("OUTRIDER_API_KEY")  # read here: the environment of Ray's processes may lack it
        serve.run(application(placed, (key,) if key else ()), name=APP, route_prefix="/")
    except RuntimeError as e:
        known = serve.status().applications.get(APP)
        reasons = " ".join(d.message for d in known.deployments.values()) if known else ""
        messages = re.findall(r"OutriderError: (.*)", reasons)
        unknown = f"the replicas did not start: {_first_line(e)} {reasons[:500]}"
        raise OutriderError(messages[-1] if messages else unknown) from None


def need_room(config: ClusterConfig) -> None:
    """Refuses replicas that do not fit a cluster that cannot grow: they would never start."""
    for what, each in (("cpu", config.cpus_per_replica), ("gpu", config.gpus_per_replica or 0.0)):
        have = ray.cluster_resources().get(what.upper(), 0.0)
        need = config.replicas.low * each
        requirement = f"{config.replicas.low} replicas with {what}s_per_replica {each:g} need {need:g} {what.upper()}s"
        more = f"lower one of them, or start Ray with more: ray start --head --num-{what}s {need:g}"
        require(need <= have, f"{requirement} and Ray has {have:g}; {more}")


def stay() -> None:
    """Waits until Ctrl-C or SIGTERM."""
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    end.wait()


def _drain(seconds: float) -> None:
    """Removes the application; replicas end after their running requests."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):  # Serve waits for a minute at a time
            serve.delete(APP)
            return


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
