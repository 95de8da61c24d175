"""The configuration of a deployment: one YAML file (or a model's name and options), validated once, frozen.

Every validation error is one line that names the field and its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, PlainSerializer, ValidationError, create_model

from ..config import OPTIONS, LoadSettings
from ..server.settings import ServerSettings, public_name
from ..types import OutriderError, bad_input, require


@dataclass(frozen=True)
class ReplicaCount:
    """Number of engines: at least `low`, at most `high`. Equal: a fixed number."""

    low: int
    high: int

    @classmethod
    def parse(cls, value: object) -> ReplicaCount:
        low, dots, high = str(value).partition("..")
        if low.strip().isdigit() and (not dots or high.strip().isdigit()):
            count = cls(int(low), int(high) if dots else int(low))
            if 1 <= count.low <= count.high:
                return count
        raise ValueError("it must be a number such as 2, or bounds such as 2..8")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


Text = Annotated[str, Field(min_length=1)]
Bounds = Annotated[InstanceOf[ReplicaCount], BeforeValidator(ReplicaCount.parse), PlainSerializer(str)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# a file has the options of LoadSettings next to the others; LoadSettings checks their values
FIELDS = {name: (option.kind, option.default) for name, option in OPTIONS.items()}
LoadFields = create_model("LoadFields", **FIELDS)  # type: ignore[call-overload]


class ClusterConfig(BaseModel, frozen=True):
    model: Text
    replicas: Bounds = ReplicaCount(1, 1)
    name: Text | None = None  # the model's name in the API; default: as in `outrider serve`
    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    # each engine
    load: InstanceOf[LoadSettings] = LoadSettings()  # threads by default: as many as cpus_per_replica
    max_concurrent: AtLeastOne | None = None  # default: 254 on a GPU, else 8
    # resources of a replica
    cpus_per_replica: Positive = 1.0
    gpus_per_replica: Seconds | None = None  # default: one per process if the cluster has GPUs
    # the API
    max_queued: Count = 64  # per replica
    timeout: Positive = 600.0
    max_body: Annotated[int, Field(ge=1024)] = 4 << 20
    max_prompt: Count = 0
    api_key_file: Text | None = None  # read where the ingress runs, besides OUTRIDER_API_KEY
    allowed_origin: Text | None = None
    # the cluster
    routing: Literal["prefix", "least-loaded"] = "prefix"
    ingresses: AtLeastOne = 1
    target_queue: Positive | None = None  # requests per replica before one is added; default: max_concurrent
    upscale_delay: Seconds = 10.0
    downscale_delay: Seconds = 300.0
    retries: Count = 2  # after a replica's death, before the client received a byte
    wait: Positive = 30.0  # seconds a request waits for a replica before it gets 503
    drain: Seconds = 120.0  # seconds for running requests of a replica being removed

    @classmethod
    def of(cls, fields: Mapping[str, object], where: str = "") -> ClusterConfig:
        """Reads fields of a file or a command; numbers may be given as text. Every error begins with `where`."""
        known = [*(name for name in cls.model_fields if name != "load"), *OPTIONS]
        options = {str(name).replace("-", "_"): value for name, value in fields.items()}
        unknown = [name for name in options if name not in known]
        if unknown:
            raise OutriderError(f"{where}unknown field {unknown[0]!r}; known: {', '.join(known)}")
        require("model" in options, f"{where}model is missing: say what to load, e.g. model: smollm2")
        if options.get("tree") is False:  # how YAML reads the word `off`
            options["tree"] = "off"
        for name, value in options.items():
            if isinstance(value, bool) and name not in ("vision", "audio"):
                raise OutriderError(f"{where}{name}: {json.dumps(value)} is not allowed: use true or false")
        try:
            load = LoadFields.model_validate({name: value for name, value in options.items() if name in OPTIONS})
            serve_fields = {name: value for name, value in options.items() if name not in OPTIONS}
            return cls.model_validate({**serve_fields, "load": LoadSettings.of(load.model_dump())})
        except ValidationError as error:
            wrong = error.errors()
            name = str(wrong[0]["loc"][0])
            value = json.dumps(wrong[0]["input"], default=str)
            said = " or ".join(one["msg"].removeprefix("Value error, ") for one in wrong if one["loc"][0] == name)
            raise OutriderError(f"{where}{name}: {value} is not allowed: {said[0].lower()}{said[1:]}") from None
        except OutriderError as error:
            raise OutriderError(f"{where}{error}") from None

    @classmethod
    def read(cls, path: Path, over: Mapping[str, object]) -> ClusterConfig:
        """Reads a YAML file, with some of its fields overridden."""
        with bad_input((OSError, UnicodeDecodeError), lambda e: f"cannot read {path}: {e}"):
            text = path.read_text(encoding="utf-8")
        with bad_input(yaml.YAMLError, lambda e: f"{path} is not YAML: {' '.join(str(e).split())}"):
            fields = yaml.safe_load(text)
        if not isinstance(fields, dict):
            raise OutriderError(f"{path} must hold fields such as 'model: smollm2'")
        return cls.of({**fields, **over}, f"{path}: ")

    @classmethod
    def from_args(cls, args: Mapping[str, object]) -> ClusterConfig:
        """Reads arguments of a Serve application or of `outrider deploy`: fields that override those of `config`."""
        options = {name: value for name, value in args.items() if name != "config"}
        path = args.get("config")
        return cls.read(Path(str(path)), options) if path else cls.of(options)

    def fields(self) -> dict[str, object]:
        """The fields that differ from the defaults, from which `of` makes this configuration again."""
        load = {name: v for name, v in self.load.options().items() if v != OPTIONS[name].default}
        return self.model_dump(exclude_defaults=True, exclude={"load"}) | load

    @property
    def served_name(self) -> str:
        return self.name or public_name(self.model)

    def placed(self, gpus: float) -> ClusterConfig:
        """A copy with the fields that depend on the machines. gpus: number in the whole cluster."""
        load = self.load
        parts = self.load.tensor_parallel
        wanted = load.device is None or load.device.startswith("cuda")
        per_replica = self.gpus_per_replica
        if per_replica is None:
            per_replica = float(bool(gpus and wanted)) * parts
        one_each = parts == 1 or per_replica in (0, parts)
        requirement = f"gpus_per_replica: {per_replica:g}"
        require(one_each, f"{requirement} with tensor_parallel {parts}: one GPU per process; leave the first out")
        require(per_replica <= gpus, f"{requirement}, but the cluster has {gpus:g} GPUs; set it to 0 or add machines")
        concurrent = self.max_concurrent or (254 if per_replica else 8)
        changes = {
            "gpus_per_replica": per_replica,
            "max_concurrent": concurrent,
            "target_queue": self.target_queue or float(concurrent),
            "load": replace(load, threads=load.threads or max(1, int(self.cpus_per_replica / parts))),
        }
        return self.model_copy(update=changes)

    def front(self) -> ServerSettings:
        """Server settings of the ingress, which checks hosts, origins, keys and sizes."""
        origins = tuple(part.strip() for part in (self.allowed_origin or "").split(",") if part.strip())
        keys = None if self.api_key_file is None else Path(self.api_key_file)
        name = self.served_name
        host = self.host
        most = self.max_body
        return ServerSettings(name, host, api_key_file=keys, max_body=most, allowed_origins=origins)

    def back(self) -> ServerSettings:
        """Server settings of a replica. Only the ingress calls it, and has already checked the request."""
        shared = self.model_dump(include={"max_queued", "timeout", "max_body", "max_prompt"})
        concurrent = self.max_concurrent or 8
        return ServerSettings(model_name=self.served_name, host="0.0.0.0", max_concurrent=concurrent, **shared)
