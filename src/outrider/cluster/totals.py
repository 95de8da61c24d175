"""/metrics of a cluster: every replica's figures under a label, and their sums under the names a single server uses.

`outrider_replica_X{replica="…"}` is a replica's X; `outrider_X` is the cluster's, so that a dashboard for a single
server works for a cluster. The last known counters of a removed replica stay in the sums: counters never decrease.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # name and labels of a sample
COUNTS = ("counter", "histogram")
MAX_GONE = 64  # maximum lost replicas kept by name; older ones are summed


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of one replica."""

    replica: str
    healthy: bool
    load: int  # sequences in flight
    metrics: str  # text of its /metrics


class Totals(Collector):
    def __init__(self) -> None:
        self._families: list[Metric] = []
        self._last: dict[str, dict[Key, float]] = {}  # counters by replica, including lost ones
        self._older: dict[Key, float] = {}

    def text(self, replicas: list[Snapshot], registry: CollectorRegistry) -> bytes:
        """The text of /metrics. `own`: the ingress's own counters."""
        families = {s.replica: list(text_string_to_metric_families(s.metrics)) for s in replicas}
        for name, samples in families.items():
            self._last[name] = {_key(s.name, s.labels): s.value for f in samples if f.type in COUNTS for s in f.samples}
        gone = [name for name in self._last if name not in families]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            for key, value in self._last.pop(name).items():
                self._older[key] = self._older.get(key, 0.0) + value
        self._families = self._pages(families, replicas)
        return generate_latest(self) + generate_latest(registry)

    def collect(self) -> list[Metric]:
        return self._families

    def _pages(self, families: dict[str, list[Metric]], replicas: list[Snapshot]) -> list[Metric]:
        out: dict[str, Metric] = {}
        family_of: dict[Key, Metric] = {}
        sums: defaultdict[Key, float] = defaultdict(float)
        for replica, samples in families.items():
            for family in samples:
                total = out.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                name = family.name.replace("outrider_", "outrider_replica_", 1)
                each = out.setdefault(name, Metric(name, family.documentation, family.type))
                for s in family.samples:
                    if s.name.endswith("_created"):
                        continue
                    own_name = s.name.replace("outrider_", "outrider_replica_", 1)
                    each.add_sample(own_name, {**s.labels, "replica": replica}, s.value)
                    key = _key(s.name, s.labels)
                    family_of[key] = total
                    if family.type not in COUNTS:
                        sums[key] += s.value
        for counts in (*self._last.values(), self._older):
            for key, value in counts.items():
                sums[key] += value
        for key, total in family_of.items():
            total.add_sample(key[0], dict(key[1]), sums[key])
        there = len(replicas)
        ready = sum(s.healthy for s in replicas)
        gauges = [GaugeMetricFamily("outrider_cluster_replicas", "Replicas that answer.", value=there)]
        gauges.append(GaugeMetricFamily("outrider_cluster_replicas_ready", "Replicas whose engine runs.", value=ready))
        return [*out.values(), *gauges]


def _key(name: str, labels: dict[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))
