"""Server settings, validated once, frozen."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated

from ..types import OutriderError, bad_input, require

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_VALUES = {"max_concurrent": 1, "max_connections": 1, "max_body": 1024}
NOT_NEGATIVE = ("max_queued", "max_prompt", "shutdown_grace", "finish_prompts")


@dataclass(frozen=True)
class ServerSettings:
    model_name: str
    host: Annotated[str, "Address to listen on. Set an API key for anything but loopback."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0: a free one, printed at the start."] = 8000
    api_keys: tuple[str, ...] = ()  # valid at the start: `api_key` and the keys of the file
    api_key: str | None = None
    api_key_file: Annotated[Path | None, "File with further keys, one per line; reread on SIGHUP."] = None
    ssl_certfile: Annotated[Path | None, "Serve https with this certificate (PEM, with its chain)."] = None
    ssl_keyfile: Annotated[Path | None, "TLS private key, if not in --ssl-certfile."] = None
    otel_endpoint: str | None = None  # collector of spans; None: no tracing
    max_concurrent: int = 8  # concurrent sequences
    max_queued: Annotated[int, "Maximum waiting sequences; further requests get 429."] = 64
    timeout: Annotated[float, "Maximum seconds in the queue, then without prefill progress, then for the answer."] = (
        600.0
    )
    max_body: Annotated[int, "Maximum bytes of a request body; larger ones get 413."] = 4 << 20
    max_prompt: Annotated[int, "Maximum tokens of a prompt. 0: limited by the context only."] = 0
    max_choices: int = 16  # the largest n
    max_answers: int = 64  # maximum answers of one /v1/completions call: prompts times n
    log_prompts: Annotated[bool, "Write prompts to the log (off: no prompt text is ever logged)."] = False
    log_level: Annotated[str, "debug | info | warning | error."] = "info"
    log_json: Annotated[bool, "Log one JSON object per line."] = False
    shutdown_grace: Annotated[float, "Seconds for running requests to finish on shutdown."] = 10.0
    allowed_origins: tuple[str, ...] = ()  # origins whose pages may call, besides our own; "*": all
    trusted_hosts: tuple[str, ...] = ()  # host names accepted on loopback, besides localhost
    trusted_proxies: Annotated[
        str, "Proxies whose X-Forwarded-For is trusted: addresses or networks, comma-separated."
    ] = ""
    root_path: Annotated[str, "Path prefix under which a proxy serves this server."] = ""
    max_connections: Annotated[
        int, "Maximum open connections; beyond it the slowest client's connection is closed."
    ] = 512
    request_timeout: Annotated[float, "Maximum seconds to receive a request's headers, and its body."] = 30.0
    idle_timeout: Annotated[float, "Maximum idle seconds of a connection between requests."] = 60.0
    stall_timeout: Annotated[float, "Maximum seconds a client may leave its answer unread."] = 20.0
    finish_prompts: Annotated[
        float, "Seconds to continue the prefill of a long prompt after its client disconnected; 0: none."
    ] = 600.0
    allow_image_hosts: Annotated[
        str, "Hosts from which images and sound may be fetched: HOST or HOST:PORT, comma-separated."
    ] = ""
    runtime_adapters: Annotated[bool, "Allow clients to load and unload LoRA adapters (/v1/load_lora_adapter)."] = False
    record_prompt: Annotated[Path | None, "File for the longest prompt's system text and tools (for launch)."] = None
    share_prefixes: Annotated[bool, "Share the prefix cache between API keys. Answers stay the same."] = False
    replica_tag: str = (
        ""  # tag of a cluster's replica: part of the ids of stored objects, so that requests reach their owner
    )
    keep_prefixes: Annotated[float, "Minutes to keep unused prefix-cache pages in memory (CPU)."] = 5.0

    def __post_init__(self) -> None:
        require(bool(self.model_name), "the served model needs a name")
        require(0 <= self.port <= 65535, f"--port must be in 0..65535, got {self.port}")
        for name, least in {**MIN_VALUES, **dict.fromkeys(NOT_NEGATIVE, 0)}.items():
            value = getattr(self, name)
            require(value >= least, f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        for name in ("timeout", "request_timeout", "idle_timeout", "stall_timeout", "keep_prefixes"):
            value = getattr(self, name)
            require(value > 0, f"--{name.replace('_', '-')} must be more than 0, got {value}")
        levels = ("debug", "info", "warning", "error")
        require(self.log_level in levels, f"--log-level must be one of {', '.join(levels)}, got {self.log_level!r}")
        rooted = self.root_path == "" or self.root_path.startswith("/")
        require(rooted, f"--root-path must begin with /, got {self.root_path!r}")
        for proxy in self.proxies:
            try:
                ip_network(proxy)
            except ValueError:
                message = f"--trusted-proxies takes addresses and networks such as 127.0.0.1,10.0.0.0/8, got {proxy!r}"
                raise OutriderError(message) from None
        require(self.api_key != "", "--api-key is empty: leave it out for a server that needs none")
        fine = all(k.isascii() and k.isprintable() and " " not in k for k in self.api_keys)
        require(fine, "API keys must be printable ASCII without spaces")
        require(self.ssl_keyfile is None or self.ssl_certfile is not None, "--ssl-keyfile needs --ssl-certfile")
        if self.ssl_certfile is not None:
            check_certificate(self.ssl_certfile, self.ssl_keyfile)

    @property
    def proxies(self) -> list[str]:
        return [proxy.strip() for proxy in self.trusted_proxies.split(",") if proxy.strip()]

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Fails now instead of after loading the model."""
    what = f"{certificate}" + (f" with {key}" if key is not None else "")
    wrong = (OSError, ValueError)  # ssl's own errors are OSErrors
    with bad_input(wrong, lambda e: f"can't use the certificate {what}: {getattr(e, 'strerror', None) or e}"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")


def read_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """Keys of the option and of a file (one per line, # starts a comment)."""
    keys = [key] if key else []
    if file is not None:
        with bad_input((OSError, UnicodeDecodeError), lambda e: f"can't read the API keys in {file}: {e}"):
            lines = file.read_text(encoding="utf-8").splitlines()
        file_keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        require(bool(file_keys), f"{file} contains no API key; write one per line")
        keys += file_keys
    return tuple(keys)


def public_name(model: str) -> str:
    """The name for clients: never the path of a local folder."""
    name = model.rstrip("/\\")
    return Path(name).name if name.startswith((".", "/", "~")) or "\\" in name or Path(name).exists() else name


def without_paths(text: str) -> str:
    """Cuts words that are paths of this machine to their last part: clients must not learn where files lie."""
    return re.sub(
        r"(?<![^\s(:='\"])(?:[A-Za-z]:\\|[~.]{0,2}/)[^\s,;:)'\"]*", lambda m: Path(m[0].rstrip("/\\")).name, text
    )
