"""Routes that load and unload adapters at run time, spelled as in vLLM. Open only with --runtime-adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ..engine.adapters import AdapterPool
from ..types import OutriderError
from .errors import ApiError, bad, read
from .schema import Strict
from .settings import without_paths

if TYPE_CHECKING:
    from .app import Server


class LoadAdapter(Strict):
    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replaces an adapter of the same name


class UnloadAdapter(Strict):
    lora_name: str
    lora_int_id: int | None = None  # sent by vLLM's clients; not used


def _pool(server: Server) -> AdapterPool:
    if not server.settings.runtime_adapters:
        message = "Adapters are not loaded at run time here: start the server with --runtime-adapters."
        raise ApiError(403, message, code="runtime_adapters_off")
    adapters = server.pool.first.adapters
    if adapters is None:
        raise ApiError(503, "The model is not loaded, or takes no adapters.", code="model_not_loaded")
    return adapters


async def _changed(change: Callable[[], object], name: str, how: str) -> Response:
    """Reads files off the event loop and outside the engine's thread."""
    try:
        await asyncio.to_thread(change)
    except OutriderError as e:
        raise bad(f"{without_paths(str(e))}.", "lora_name") from None
    return JSONResponse({"status": "ok", "message": f"Success: LoRA adapter '{name}' {how} successfully."})


async def load_adapter(server: Server, request: Request) -> Response:
    adapters = _pool(server)
    body = read(await request.body(), LoadAdapter.model_validate_json)

    def change() -> None:
        adapters.add(body.lora_name, body.lora_path, replace=body.load_inplace)

    return await _changed(change, body.lora_name, "added")


async def unload_adapter(server: Server, request: Request) -> Response:
    adapters = _pool(server)
    body = read(await request.body(), UnloadAdapter.model_validate_json)
    if body.lora_name not in adapters.paths:
        raise ApiError(404, f"There is no adapter '{body.lora_name[:100]}'.", "lora_name", code="model_not_found")
    return await _changed(lambda: adapters.remove(body.lora_name), body.lora_name, "removed")
