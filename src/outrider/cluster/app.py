"""The cluster as a Ray Serve application: engine replicas, and an ingress that relays to them.

`build` is the builder for `serve run outrider.cluster.app:build model=smollm2 replicas=2..8` and for KubeRay. A request
goes from the client to Serve's HTTP proxy, the Ingress and an EngineReplica. The ingress is our own deployment because
Serve's proxy answers 500 when a replica dies during a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..server.settings import ServerSettings, read_keys
from .config import ClusterConfig
from .ingress import Forward, Ingress, ReplicaLost, ReplicaRefused
from .router import PrefixRouter
from .totals import Snapshot

LOST = (RayActorError, ReplicaUnavailableError)
SNAPSHOT_S = 5.0
MOST_RELAYED = 4096  # concurrent requests per ingress
SCALING = ("replicas", "target_queue", "upscale_delay", "downscale_delay")
QUIET = LoggingConfig(enable_access_log=False)  # metrics and our own log suffice


class EngineReplica:
    """One replica: a whole Outrider engine and its app."""

    async def __init__(self, fields: dict[str, object]) -> None:  # type: ignore[misc]  # Serve awaits it
        from .replica import Replica, load

        config = ClusterConfig.of(fields)
        name = serve.get_replica_context().replica_id.unique_id
        backend = await asyncio.to_thread(load, config)
        self._replica = Replica(name, backend, config.back())
        await self._replica.start()

    async def answer(self, request: Forward) -> AsyncIterator[str | list[Message]]:
        yield self._replica.name
        async for batch in self._replica.answer(request):
            yield batch

    async def snapshot(self) -> Snapshot:
        return self._replica.snapshot()

    async def whole(self, request: Forward) -> tuple[int, bytes]:
        return await self._replica.whole(request)

    async def pid(self) -> tuple[str, int]:
        return self._replica.name, os.getpid()

    async def check_health(self) -> None:
        if not self._replica.healthy:
            raise RuntimeError("the engine has stopped after repeated failures")


class RayReplicas:
    """The ingress's view of the replicas, through a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._answer = handle.options(method_name="answer", stream=True)

    async def send(self, request: Forward) -> AsyncIterator[str | list[Message]]:
        response = self._answer.remote(request)
        try:
            async for item in response:
                yield item
        except LOST as e:
            raise ReplicaLost from e
        except BackPressureError as e:
            raise ReplicaRefused from e
        except DeploymentUnavailableError as e:
            raise TimeoutError from e
        except BaseException:  # includes closing and cancellation
            response.cancel()
            raise

    async def snapshots(self) -> list[Snapshot]:
        return [s for s in await self._broadcast("snapshot") if isinstance(s, Snapshot)]

    async def gather(self, request: Forward) -> list[tuple[int, bytes]]:
        return [answer for answer in await self._broadcast("whole", request) if isinstance(answer, tuple)]

    async def _broadcast(self, method: str, *args: object) -> list[object]:
        """Results of all replicas; a failed replica's is its exception."""
        call = self._handle.broadcast(method, *args)
        try:
            results: list[object] = await call.results_async(timeout_s=SNAPSHOT_S, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return results


class _Relayed(Response):
    """Passes the raw ASGI call to the ingress; Serve's `__call__` would pass requests and responses."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":  # Serve's proxy adds the same id itself
                message["headers"] = [(k, v) for k, v in message.get("headers", ()) if k != b"x-request-id"]
            await send(message)

        await self._ingress(scope, receive, told)


class IngressApp:
    """The ingress deployment."""

    def __init__(
        self, engines: DeploymentHandle, settings: ServerSettings, keys: tuple[str, ...], retries: int, wait: float
    ) -> None:
        api_keys = read_keys(os.environ.get("OUTRIDER_API_KEY"), settings.api_key_file)
        settings = dataclasses.replace(settings, api_keys=(*keys, *api_keys))
        self._ingress = Ingress(RayReplicas(engines), settings, retries, wait=wait)

    async def __call__(self, request: Request) -> Response:
        return _Relayed(self._ingress)


def grouped(config: ClusterConfig) -> dict[str, object]:
    """A tensor-parallel replica is a placement group of one bundle, hence on one machine. As rank 0 it starts the other
    ranks itself, like `outrider serve`, so it must see all their GPUs."""
    if config.load.tensor_parallel == 1:
        return {}
    takes = {"CPU": config.cpus_per_replica, **({"GPU": config.gpus_per_replica} if config.gpus_per_replica else {})}
    return {"placement_group_bundles": [takes], "placement_group_strategy": "STRICT_PACK"}


def application(config: ClusterConfig, keys: tuple[str, ...] = ()) -> Application:
    """The application of a configuration that was `placed`. Changes since the last deployment are rolled out replica by
    replica. `keys`: API keys besides the configuration's."""
    assert config.max_concurrent is not None and config.load.threads is not None, "not placed"
    bounds = config.replicas
    scaling = AutoscalingConfig(
        min_replicas=bounds.low,
        max_replicas=bounds.high,
        target_ongoing_requests=config.target_queue,
        upscale_delay_s=config.upscale_delay,
        downscale_delay_s=config.downscale_delay,
    )
    scale = {"num_replicas": bounds.low} if bounds.low == bounds.high else {"autoscaling_config": scaling}
    # changes of the other fields need no new engines
    engine_fields = {k: v for k, v in config.fields().items() if k not in SCALING}
    engines = serve.deployment(
        EngineReplica,
        name="Engine",
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica or 0},
        max_constructor_retry_count=1,  # a model that failed to load will fail again
        max_ongoing_requests=config.max_concurrent + config.max_queued,
        max_queued_requests=max(1, config.max_queued) * bounds.high,
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "slack": max(2, config.max_concurrent // 2),
                "by_prefix": config.routing == "prefix",
            },
        ),
        **scale,
        **grouped(config),
    ).bind(engine_fields)
    front = serve.deployment(
        IngressApp,
        name="Ingress",
        num_replicas=config.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MOST_RELAYED,
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=QUIET,
    )
    return front.bind(engines, config.front(), keys, config.retries, config.wait)


def build(args: dict[str, object]) -> Application:
    """For `serve run` and KubeRay: the fields of a configuration, or `config=FILE` and fields that differ from it."""
    return application(ClusterConfig.from_args(args).placed(ray.cluster_resources().get("GPU", 0.0)))
