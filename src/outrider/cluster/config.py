"""What is deployed: one YAML file (or a model's name and options), validated once, frozen.

Every refusal is one line that names the field, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, get_args, get_type_hints

import yaml

from ..config import OPTIONS, LoadSettings, Option
from ..server.settings import ServerSettings, public_name, read_keys
from ..types import OutriderError

Value = str | int | float | bool | None
AS_IT_COMES = LoadSettings()


@dataclass(frozen=True)
class ReplicaCount:
    """How many engines: at least `low`, at most `high`. Equal: a fixed number."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> ReplicaCount:
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
    """Each field with the rule that it is read by."""

    model: Annotated[str, Rule(_text, "a model's name, folder, .gguf file or Hugging Face id")]
    replicas: Annotated[ReplicaCount, Rule(_replicas, "a number such as 2, or bounds such as 2..8")] = ReplicaCount(
        1, 1
    )
    name: Annotated[str | None, TEXT] = None  # what clients call the model; default: as `outrider serve` names it
    host: Annotated[str, TEXT] = "127.0.0.1"
    port: Annotated[int, _whole(0, 65535)] = 8000
    # each engine
    load: LoadSettings = (
        AS_IT_COMES  # in a file its options stand beside the others; threads by default: as many as cpus_per_replica
    )
    max_concurrent: Annotated[int | None, _whole(1)] = None  # default: 254 on a GPU, else 8
    # what a replica takes of its machine
    cpus_per_replica: Annotated[float, _number(0, over=True)] = 1.0
    gpus_per_replica: Annotated[float | None, _number(0)] = None  # default: one a process where the cluster has GPUs
    # the API
    max_queued: Annotated[int, _whole(0)] = 64  # a replica's
    timeout: Annotated[float, _number(0, over=True)] = 600.0
    max_body: Annotated[int, _whole(1024)] = 4 << 20
    max_prompt: Annotated[int, _whole(0)] = 0
    api_key_file: Annotated[str | None, TEXT] = None  # read where the ingress runs, besides OUTRIDER_API_KEY
    allowed_origin: Annotated[str | None, TEXT] = None
    # the cluster
    routing: Annotated[str, _one_of("prefix", "least-loaded")] = "prefix"
    ingresses: Annotated[int, _whole(1)] = 1
    target_queue: Annotated[float | None, _number(0, over=True)] = (
        None  # a replica's requests before one is added; max_concurrent
    )
    upscale_delay: Annotated[float, _number(0)] = 10.0
    downscale_delay: Annotated[float, _number(0)] = 300.0
    retries: Annotated[int, _whole(0)] = 2  # after a replica's death, while nothing has been told to the client
    wait: Annotated[float, _number(0, over=True)] = 30.0  # seconds a request waits for a replica before it hears 503
    drain: Annotated[float, _number(0)] = 120.0  # seconds a replica that leaves has for its running requests

    @classmethod
    def of(cls, fields: Mapping[str, object], where: str = "") -> ClusterConfig:
        """From a file's or a command's fields. `where` begins every complaint."""
        known: dict[str, Value | ReplicaCount] = {}
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
                raise OutriderError(
                    f"{where}{raw}: {json.dumps(value, default=str)} is not allowed; it must be {rule.allowed}"
                ) from None
        if "model" not in known:
            raise OutriderError(f"{where}model is missing: say what to load, e.g. model: smollm2")
        own = {name: value for name, value in known.items() if name not in OPTIONS}
        try:
            load = LoadSettings.of({name: value for name, value in known.items() if name in OPTIONS})
        except OutriderError as e:
            raise OutriderError(f"{where}{e}") from None
        return cls(**own, load=load)  # type: ignore[arg-type]  # each was read by its rule

    @classmethod
    def read(cls, path: Path, over: Mapping[str, object]) -> ClusterConfig:
        """A YAML file, with some of its fields given anew."""
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise OutriderError(f"cannot read {path}: {e}") from None
        except yaml.YAMLError as e:
            raise OutriderError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
        if not isinstance(fields, dict):
            raise OutriderError(f"{path} must hold fields such as 'model: smollm2'")
        return cls.of({**fields, **over}, f"{path}: ")

    @classmethod
    def from_args(cls, args: Mapping[str, object]) -> ClusterConfig:
        """Fields, and `config`, a file that they differ from: what a Serve application and `outrider deploy` are told.
        Most is text."""
        given = {name: _typed(name, value) for name, value in args.items() if name != "config"}
        path = args.get("config")
        return cls.read(Path(str(path)), given) if path else cls.of(given)

    def fields(self) -> dict[str, Value]:
        """What `of` would read this from: only what differs from the defaults."""
        out: dict[str, Value] = {}
        load = self.load.options()
        for name in RULES:
            value = load[name] if name in load else getattr(self, name)
            if value != DEFAULTS.get(name, ...):
                out[name] = str(value) if isinstance(value, ReplicaCount) else value
        return out

    @property
    def served_name(self) -> str:
        return self.name or public_name(self.model)

    def placed(self, gpus: float) -> ClusterConfig:
        """The same with the fields filled in that depend on the machines. gpus: of the whole cluster."""
        load = self.load
        wanted = load.device is None or load.device.startswith("cuda")
        per_replica = (
            self.gpus_per_replica
            if self.gpus_per_replica is not None
            else float(bool(gpus and wanted)) * load.tensor_parallel
        )
        if per_replica and load.tensor_parallel > 1 and per_replica != load.tensor_parallel:
            raise OutriderError(
                f"gpus_per_replica: {per_replica:g} with tensor_parallel {load.tensor_parallel}: a GPU a process; "
                f"leave the first out"
            )
        if per_replica > gpus:
            raise OutriderError(
                f"gpus_per_replica: {per_replica:g}, but the cluster has {gpus:g} GPUs; set it to 0 or add machines"
            )
        concurrent = self.max_concurrent or (254 if per_replica else 8)
        return dataclasses.replace(
            self,
            gpus_per_replica=per_replica,
            max_concurrent=concurrent,
            target_queue=self.target_queue or float(concurrent),
            load=dataclasses.replace(
                load, threads=load.threads or max(1, int(self.cpus_per_replica / load.tensor_parallel))
            ),
        )

    def front(self) -> ServerSettings:
        """The ingress's: it checks hosts, origins, keys and sizes."""
        origins = tuple(part.strip() for part in (self.allowed_origin or "").split(",") if part.strip())
        return dataclasses.replace(self._settings(), host=self.host, port=self.port, allowed_origins=origins)

    def back(self) -> ServerSettings:
        """A replica's: only the ingress talks to it, and that has checked who asks."""
        return dataclasses.replace(self._settings(), host="0.0.0.0")

    def _settings(self) -> ServerSettings:
        return ServerSettings(
            model_name=self.served_name,
            max_concurrent=self.max_concurrent or 8,
            max_queued=self.max_queued,
            timeout=self.timeout,
            max_body=self.max_body,
            max_prompt=self.max_prompt,
        )

    def keys(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        return read_keys(environment.get("OUTRIDER_API_KEY"), Path(self.api_key_file) if self.api_key_file else None)


DEFAULTS: dict[str, object] = {
    **{f.name: f.default for f in dataclasses.fields(ClusterConfig) if f.default is not dataclasses.MISSING},
    **{name: option.default for name, option in OPTIONS.items()},
}


@dataclass(frozen=True)
class Rule:
    read: Callable[[object], Value | ReplicaCount]
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


def _number(low: float, over: bool = False) -> Rule:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low or (over and value == low):
            raise ValueError
        return float(value)

    return Rule(read, f"a number, more than {low:g}" if over else f"a number, {low:g} or more")


def _replicas(value: object) -> ReplicaCount:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return ReplicaCount.parse(str(value))


def _option(name: str, option: Option) -> Rule:
    """Of a load setting: its kind is seen to here, what else it must be by `LoadSettings`."""
    kinds = [kind for kind in get_args(option.kind) or (option.kind,) if kind is not NoneType]
    if kinds == [int]:
        return _whole(1)
    if kinds == [float]:
        return _number(0)
    if int in kinds:
        return Rule(_tree, "auto, off or a number") if name == "tree" else Rule(_word, "auto or a number")
    return TEXT


def _word(value: object) -> str:
    """A text, or a number as one."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return _text(str(value))


def _tree(value: object) -> str:
    return "off" if value is False else _word(value)  # YAML reads the word `off` as false


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
RULES: dict[str, Rule] = {
    **{
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(ClusterConfig, include_extras=True).items()
        if name != "load"
    },
    **{name: _option(name, option) for name, option in OPTIONS.items()},
}
