"""The policy of prefix.py as Ray Serve's request router.

Serve keeps the set of replicas, probes their queues, lets a full one reject and counts waiting requests for
autoscaling; the router only gives an order of preference. The interface is marked alpha in Ray 2.60.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .ingress import Forward
from .owner import replica_tag
from .prefix import PrefixMap, rank

NO_REQUEST = Forward("", "", b"", headers=(), body=b"", client="")


class PrefixRouter(RequestRouter):
    def initialize_state(self, slack: int, by_prefix: bool) -> None:  # type: ignore[override]
        self._slack = slack
        self._by_prefix = by_prefix
        self._map: PrefixMap[ReplicaID] = PrefixMap()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # try full replicas again after a pause
        owner = _forward(pending_request).owner
        owners = [r for r in candidate_replicas if owner and replica_tag(r.replica_id.unique_id) == owner]
        if owners:
            return [owners]
        known = {r.replica_id: r for r in candidate_replicas}
        loads = {id: self.replica_queue_len_cache.get(id) or 0 for id in known}
        holders = self._map.holders(_forward(pending_request).prefix, loads) if self._by_prefix else []
        return [[known[id] for id in group] for group in rank(loads, holders, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        self._map.sent(_forward(pending_request).prefix, replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._map.gone(replica_id)


def _forward(request: PendingRequest | None) -> Forward:
    """The forwarded request; an empty one for calls without one."""
    if request is None or not request.args or not isinstance(request.args[0], Forward):
        return NO_REQUEST
    return request.args[0]
