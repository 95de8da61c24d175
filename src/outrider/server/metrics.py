"""/metrics: what the server saw (requests, latencies) and what the engine counted (tokens, drafts, pages), as
Prometheus text.

One registry a server, so that two servers in one process (tests) don't share counters.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .. import __version__
from ..types import RequestStats
from .model_pool import ModelPool
from .names import route_of

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1)

CYCLE_TOKENS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 17)


class ServerMetrics:
    def __init__(self, shelf: ModelPool, in_flight: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "outrider_http_requests", "Answers, by route and status.", ["route", "status"], registry=r
        )
        self.ttft = Histogram("outrider_ttft_seconds", "Arrival to first token.", buckets=SECONDS, registry=r)
        self.per_token = Histogram(
            "outrider_token_seconds", "Mean time a token after the first cycle.", buckets=TOKEN_SECONDS, registry=r
        )
        self.tokens_per_cycle = Histogram(
            "outrider_tokens_per_cycle", "Mean tokens per cycle, per request.", buckets=CYCLE_TOKENS, registry=r
        )
        self.end_to_end = Histogram(
            "outrider_request_seconds", "Submission to last token of a call.", buckets=SECONDS, registry=r
        )
        self.queued = Histogram(
            "outrider_queue_seconds", "Arrival of a call to its submission.", buckets=SECONDS, registry=r
        )
        self.ignored = Counter(
            "outrider_ignored_fields", "Fields that were sent and change nothing.", ["field"], registry=r
        )
        self.aborted = Counter("outrider_requests_aborted", "Clients that went away, and time-outs.", registry=r)
        flight = Gauge("outrider_sequences_in_flight", "Sequences running or queued.", registry=r)
        flight.set_function(in_flight)
        build = Gauge("outrider_build_info", "Always 1.", ["version", "python", "torch"], registry=r)
        build.labels(__version__, platform.python_version(), torch.__version__).set(1)
        ProcessCollector(registry=r)  # memory, processor time, file descriptors, start
        r.register(_EngineCollector(shelf))

    def count(self, method: str, path: str, status: int) -> None:
        """Every answer's route and status; of those that worked only the ones that were work."""
        if method == "POST" or status >= 400:
            self.requests.labels(route_of(path), str(status)).inc()

    def finished(self, stats: RequestStats) -> None:
        self.ttft.observe(stats.ttft_s)
        if stats.decode_tps:
            self.per_token.observe(1.0 / stats.decode_tps)
        if stats.cycles:
            self.tokens_per_cycle.observe(stats.tokens_per_cycle)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads the engines' own counters when asked, those of all models together."""

    def __init__(self, shelf: ModelPool) -> None:
        self._shelf = shelf

    def collect(self) -> Iterator[Metric]:
        tally = self._shelf.tally()
        m = tally.engine
        totals = {
            "prompt_tokens": (m.prompt_tokens, "Prompt tokens received."),
            "cached_tokens": (m.cached_tokens, "Prompt tokens found in the prefix cache."),
            "new_tokens": (m.new_tokens, "Tokens generated."),
            "steps": (m.steps, "Engine steps."),
            "cycles": (m.cycles, "Decode cycles, one a sequence and step."),
            "drafted": (m.drafted, "Tokens drafted."),
            "accepted": (m.accepted, "Drafted tokens accepted."),
            "trees": (m.trees, "Cycles whose draft was a tree."),
            "branched": (m.branched, "Accepted tokens that a draft without branches would not have brought."),
            "drafter_failures": (m.drafter_failures, "Times a drafter failed and was switched off for a request."),
            "preemptions": (m.preemptions, "Sequences set back because pages ran out."),
            "swapped_out": (m.swapped_out, "Sequences set back whose K/V was kept in host memory (--swap)."),
            "swapped_in": (m.swapped_in, "Sequences that went on with K/V from host memory."),
            "prefix_pages_read": (m.prefix_pages_read, "Pages of K/V read back from disk (--prefix-store)."),
            "prefix_pages_written": (m.prefix_pages_written, "Pages of K/V written to disk (--prefix-store)."),
            "step_seconds": (m.step_seconds, "Seconds in engine steps."),
            "prefill_seconds": (m.prefill_seconds, "Seconds in prefill."),
            "failed_steps": (tally.failed_steps, "Engine steps that raised."),
        }
        for name, (value, text) in totals.items():
            yield CounterMetricFamily(f"outrider_{name}", text, value=value)
        by_name = (("adapter_drafted", m.drafted_by_adapter), ("adapter_accepted", m.accepted_by_adapter))
        for name, by_adapter in by_name:
            text = f"Tokens {name.removeprefix('adapter_')} for requests with a LoRA adapter."
            family = CounterMetricFamily(f"outrider_{name}", text, labels=["adapter"])
            for adapter, count in list(by_adapter.items()):
                family.add_metric([adapter], count)
            yield family
        for name, counts in (("drafted_at", m.drafted_by_position), ("accepted_at", m.accepted_by_position)):
            text = f"Tokens {name.split('_')[0]} at a position of the draft."
            family = CounterMetricFamily(f"outrider_{name}", text, labels=["position"])
            for i, count in enumerate(counts):
                if m.drafted_by_position[i]:
                    family.add_metric([str(i + 1)], count)
            yield family
        finished = CounterMetricFamily("outrider_finished", "Finished requests.", labels=["reason"])
        for reason, count in list(m.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        for name, gauge in (("running", m.running), ("waiting", m.waiting + tally.waiting)):
            yield GaugeMetricFamily(f"outrider_{name}", f"Sequences {name}.", value=gauge)
        yield GaugeMetricFamily(
            "outrider_swap_bytes", "Host memory that K/V of waiting sequences takes (--swap).", value=m.swap_bytes
        )
        pages = GaugeMetricFamily("outrider_free_pages", "Free cache pages.", labels=["group"])
        for group, count in list(m.free_pages.items()):
            pages.add_metric([group], count)
        yield pages
        yield GaugeMetricFamily("outrider_kv_bytes", "Memory that K/V holds.", value=m.kv_bytes)
        yield from self._models()

    def _models(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("outrider_model_loaded", "1 while a model is loaded.", labels=["model"])
        size = GaugeMetricFamily("outrider_model_bytes", "Weights and K/V of a loaded model.", labels=["model"])
        loads = CounterMetricFamily("outrider_model_loads", "Times a model was loaded.", labels=["model"])
        evictions = CounterMetricFamily(
            "outrider_model_evictions", "Times a model made room for another.", labels=["model"]
        )
        for slot in self._shelf.slots.values():
            here = slot.model is not None
            loaded.add_metric([slot.name], int(here))
            size.add_metric([slot.name], slot.size if here else 0)
            loads.add_metric([slot.name], slot.loads)
            evictions.add_metric([slot.name], slot.evictions)
        yield from (loaded, size, loads, evictions)
