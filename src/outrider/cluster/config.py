"""What is deployed: one YAML file (or a model's name and options), validated once, frozen.

Every refusal is one line that names the field, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..server.settings import ServerSettings, public_name, read_keys
from ..types import OutriderError

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Replicas:
    """How many engines: at least `low`, at most `high`. Equal: a fixed number."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Replicas:
        low, dots, high = text.partition("..")
        if not low.strip().isdigit() or (dots and not high.strip().isdigit()):
            raise ValueError
        made = cls(int(low), int(high) if dots else int(low))
        if not 1 <= made.low <= made.high:
            raise ValueError
        return made

    @property
    def fixed(self) -> bool:
        return self.low == self.high

    def __str__(self) -> str:
        return str(self.low) if self.fixed else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class ClusterConfig:
    model: str
    replicas: Replicas = Replicas(1, 1)
    name: str | None = None  # what clients call the model; default: as `outrider serve` names it
    host: str = "127.0.0.1"
    port: int = 8000
    # each engine
    drafter: str = "auto"
    draft_tokens: str = "auto"
    verify: str = "coupled"
    device: str | None = None
    dtype: str | None = None
    ops: str = "auto"
    threads: int | None = None  # default: as many as cpus_per_replica
    quantize: str | None = None
    load_format: str = "auto"
    max_concurrent: int | None = None  # default: 254 on a GPU, else 8
    max_context: int | None = None
    gpu_memory: float = 0.9
    tensor_parallel: int = 1
    # what a replica takes of its machine
    cpus_per_replica: float = 1.0
    gpus_per_replica: float | None = None  # default: one where the cluster has GPUs and device is not cpu
    # the API
    max_queued: int = 64  # a replica's
    timeout: float = 600.0
    max_body: int = 4 << 20
    max_prompt: int = 0
    api_key_file: str | None = None  # read where the ingress runs, besides OUTRIDER_API_KEY
    allowed_origin: str | None = None
    # the cluster
    routing: str = "prefix"
    ingresses: int = 1
    target_queue: float | None = None  # requests a replica may have before another is added; default: max_concurrent
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    retries: int = 2  # after a replica's death, while nothing has been told to the client
    wait: float = 30.0  # seconds a request waits for a replica before it hears 503
    drain: float = 120.0  # seconds a replica that leaves has for its running requests

    @classmethod
    def of(cls, fields: Mapping[str, object], where: str = "") -> ClusterConfig:
        """From a file's or a command's fields. `where` begins every complaint."""
        known: dict[str, Value | Replicas] = {}
        for raw, value in fields.items():
            name = str(raw).replace("-", "_")
            if name not in RULES:
                raise OutriderError(f"{where}unknown field {raw!r}; known: {', '.join(RULES)}")
            if value is None and DEFAULTS.get(name, ...) is None:
                continue
            rule = RULES[name]
            try:
                known[name] = rule.read(value)
            except (ValueError, TypeError):
                raise OutriderError(f"{where}{raw}: {json.dumps(value, default=str)} is not allowed; it must be {rule.allowed}") from None
        if "model" not in known:
            raise OutriderError(f"{where}model is missing: say what to load, e.g. model: smollm2")
        config = cls(**known)  # type: ignore[arg-type]  # each was read by its rule
        if config.tensor_parallel != 1:
            raise OutriderError(f"{where}tensor_parallel: {config.tensor_parallel} is not possible in a cluster yet; leave it at 1")
        return config

    @classmethod
    def read(cls, path: Path, over: Mapping[str, object] | None = None) -> ClusterConfig:
        """A YAML file, with some of its fields given anew."""
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise OutriderError(f"cannot read {path}: {e}") from None
        except yaml.YAMLError as e:
            raise OutriderError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
        if not isinstance(fields, dict):
            raise OutriderError(f"{path} must hold fields such as 'model: smollm2'")
        return cls.of({**fields, **(over or {})}, f"{path}: ")

    @classmethod
    def from_args(cls, args: Mapping[str, object]) -> ClusterConfig:
        """From the arguments of a Serve application: fields, and `config`, a file that they differ from. `serve run` gives all as text."""
        given = {name: _typed(name, value) for name, value in args.items() if name != "config"}
        path = args.get("config")
        return cls.read(Path(str(path)), given) if path else cls.of(given)

    def fields(self) -> dict[str, Value]:
        """What `of` would read this from: only what differs from the defaults."""
        out: dict[str, Value] = {}
        for name in RULES:
            value = getattr(self, name)
            if value != DEFAULTS.get(name, ...):
                out[name] = str(value) if isinstance(value, Replicas) else value
        return out

    @property
    def served_name(self) -> str:
        return self.name or public_name(self.model)

    def placed(self, gpus: float) -> ClusterConfig:
        """With what hangs on the machines filled in; `gpus`: of the whole cluster."""
        wanted = self.device is None or self.device.startswith("cuda")
        per_replica = self.gpus_per_replica if self.gpus_per_replica is not None else float(bool(gpus and wanted))
        if per_replica > gpus:
            raise OutriderError(f"gpus_per_replica: {per_replica:g}, but the cluster has {gpus:g} GPUs; set it to 0 or add machines")
        concurrent = self.max_concurrent or (254 if per_replica else 8)
        return dataclasses.replace(
            self, gpus_per_replica=per_replica, max_concurrent=concurrent, target_queue=self.target_queue or float(concurrent),
            threads=self.threads or max(1, int(self.cpus_per_replica)),
        )  # fmt: skip

    def front(self) -> ServerSettings:
        """The ingress's: it checks hosts, origins, keys and sizes."""
        origins = tuple(part.strip() for part in (self.allowed_origin or "").split(",") if part.strip())
        return dataclasses.replace(self._settings(), host=self.host, port=self.port, allowed_origins=origins)

    def back(self) -> ServerSettings:
        """A replica's: only the ingress talks to it, and that has checked who asks."""
        return dataclasses.replace(self._settings(), host="0.0.0.0")

    def _settings(self) -> ServerSettings:
        return ServerSettings(
            model_name=self.served_name, max_concurrent=self.max_concurrent or 8, max_queued=self.max_queued, timeout=self.timeout,
            max_body=self.max_body, max_prompt=self.max_prompt,
        )  # fmt: skip

    def keys(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        return read_keys(environment.get("OUTRIDER_API_KEY"), Path(self.api_key_file) if self.api_key_file else None)


DEFAULTS: dict[str, Value | Replicas] = {
    f.name: f.default for f in dataclasses.fields(ClusterConfig) if f.default is not dataclasses.MISSING
}


@dataclass(frozen=True)
class Rule:
    read: Callable[[object], Value | Replicas]
    allowed: str


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _one_of(*allowed: str) -> Rule:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError
        return str(value)

    return Rule(read, f"one of {', '.join(allowed)}")


def _whole(low: int, high: int | None = None) -> Rule:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError
        return value

    return Rule(read, f"a whole number, {low} or more" if high is None else f"a whole number in {low}..{high}")


def _number(low: float, high: float | None = None, over: bool = False) -> Rule:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not low <= value <= (float("inf") if high is None else high) or (over and value == low):
            raise ValueError
        return float(value)

    bounds = f"more than {low:g}" if over else f"{low:g} or more"
    return Rule(read, f"a number, {bounds}" + ("" if high is None else f", at most {high:g}"))


def _replicas(value: object) -> Replicas:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return Replicas.parse(str(value))


def _draft_tokens(value: object) -> str:
    if isinstance(value, bool) or str(value) not in ("auto", *map(str, range(17))):
        raise ValueError
    return str(value)


def _typed(name: str, value: object) -> object:
    """A text as the number it spells, where the field wants no text."""
    rule = RULES.get(name.replace("-", "_"))
    if rule is None or not isinstance(value, str):
        return value
    try:
        rule.read(value)
    except (ValueError, TypeError):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value
    return value


TEXT = Rule(_text, "a text that is not empty")
RULES = {
    "model": Rule(_text, "a model's name, folder, .gguf file or Hugging Face id"),
    "replicas": Rule(_replicas, "a number such as 2, or bounds such as 2..8"),
    "name": TEXT,
    "host": TEXT,
    "port": _whole(0, 65535),
    "drafter": TEXT,
    "draft_tokens": Rule(_draft_tokens, "auto or 0..16"),
    "verify": _one_of("coupled", "rejection", "block"),
    "device": TEXT,
    "dtype": _one_of("float32", "bfloat16", "float16"),
    "ops": TEXT,
    "threads": _whole(1),
    "quantize": _one_of("int8", "int4", "fp8"),
    "load_format": _one_of("auto", "dummy"),
    "max_concurrent": _whole(1),
    "max_context": _whole(1),
    "gpu_memory": _number(0, 1, over=True),
    "tensor_parallel": _whole(1),
    "cpus_per_replica": _number(0, over=True),
    "gpus_per_replica": _number(0),
    "max_queued": _whole(0),
    "timeout": _number(0, over=True),
    "max_body": _whole(1024),
    "max_prompt": _whole(0),
    "api_key_file": TEXT,
    "allowed_origin": TEXT,
    "routing": _one_of("prefix", "least-loaded"),
    "ingresses": _whole(1),
    "target_queue": _number(0, over=True),
    "upscale_delay": _number(0),
    "downscale_delay": _number(0),
    "retries": _whole(0),
    "wait": _number(0, over=True),
    "drain": _number(0),
}
