"""/metrics: the server's counters (requests, latencies) and the engine's (tokens, drafts, pages), as Prometheus text.

There is one registry per server, so that two servers in one process (tests) don't share counters.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .. import __version__
from ..types import RequestStats
from .model_pool import ModelPool

# Short names of routes, without /v1: a fixed set, whatever paths clients request.
LABELS = {
    "/audio/transcriptions": "transcriptions", "/audio/translations": "translations",
    "/chat/completions": "chat", "/completions": "completions", "/responses": "responses", "/messages": "messages",
    "/api/chat": "ollama_chat", "/api/generate": "ollama_generate", "/tokenize": "tokenize",
    "/detokenize": "detokenize", "/apply-template": "apply_template", "/embeddings": "embeddings",
    "/api/embed": "ollama_embed", "/api/embeddings": "ollama_embed", "/messages/count_tokens": "count_tokens",
    "/responses/input_tokens": "count_tokens",
}  # fmt: skip
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1)
CYCLE_TOKENS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 17)
COUNTERS = {  # counters of the engine
    "prompt_tokens": "Prompt tokens received.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "new_tokens": "Tokens generated.",
    "steps": "Engine steps.",
    "failed_steps": "Engine steps that raised.",
    "cycles": "Decode cycles, one a sequence and step.",
    "drafted": "Tokens drafted.",
    "accepted": "Drafted tokens accepted.",
    "trees": "Cycles whose draft was a tree.",
    "branched": "Accepted tokens that a draft without branches would not have brought.",
    "drafter_failures": "Times a drafter failed and was switched off for a request.",
    "preemptions": "Sequences set back because pages ran out.",
    "prefix_pages_read": "Pages of K/V read back from disk (--prefix-store).",
    "prefix_pages_written": "Pages of K/V written to disk (--prefix-store).",
    "step_seconds": "Seconds in engine steps.",
    "prefill_seconds": "Seconds in prefill.",
}


def route_of(path: str) -> str:
    return LABELS.get(path.removeprefix("/v1")) or ("page" if path == "/" or path.startswith("/page/") else "other")


class ServerMetrics:
    def __init__(self, pool: ModelPool, in_flight: Callable[[], int]) -> None:
        self.registry = r = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=r)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=r)

        self.requests = counter("http_requests", "Answers, by route and status.", ["route", "status"])
        self.ttft = histogram("ttft_seconds", "Arrival to first token.")
        self.per_token = histogram("token_seconds", "Mean time a token after the first cycle.", TOKEN_SECONDS)
        self.tokens_per_cycle = histogram("tokens_per_cycle", "Mean tokens per cycle, per request.", CYCLE_TOKENS)
        self.end_to_end = histogram("request_seconds", "Submission to last token of a call.")
        self.queued = histogram("queue_seconds", "Arrival of a call to its submission.")
        self.ignored = counter("ignored_fields", "Request fields accepted but ignored.", ["field"])
        self.aborted = counter("requests_aborted", "Clients that went away, and time-outs.")
        Gauge("outrider_sequences_in_flight", "Sequences running or queued.", registry=r).set_function(in_flight)
        build = Gauge("outrider_build_info", "Always 1.", ["version", "python", "torch"], registry=r)
        build.labels(__version__, platform.python_version(), torch.__version__).set(1)
        ProcessCollector(registry=r)  # memory, processor time, file descriptors, start
        self._pool = pool
        r.register(self)

    def count(self, path: str, status: int) -> None:
        self.requests.labels(route_of(path), str(status)).inc()

    def finished(self, stats: RequestStats) -> None:
        self.ttft.observe(stats.ttft_s)
        if stats.decode_tps:
            self.per_token.observe(1.0 / stats.decode_tps)
        if stats.cycles:
            self.tokens_per_cycle.observe(stats.tokens_per_cycle)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the engines' own counters, summed over all models."""
        m = self._pool.metrics
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"outrider_{name}", text, value=getattr(m, name))
        for name, text, label, values in (
            ("adapter_drafted", "Tokens drafted for requests with a LoRA adapter.", "adapter", m.drafted_by_adapter),
            ("adapter_accepted", "Tokens accepted for requests with a LoRA adapter.", "adapter", m.accepted_by_adapter),
            ("drafter_drafted", "Tokens drafted by a drafter.", "drafter", m.drafted_by_drafter),
            ("drafter_accepted", "Tokens accepted by a drafter.", "drafter", m.accepted_by_drafter),
            ("finished", "Finished requests.", "reason", m.finished),
        ):
            yield _labelled(CounterMetricFamily, name, text, label=label, values=values)
        for name, counts in (("drafted_at", m.drafted_by_position), ("accepted_at", m.accepted_by_position)):
            known = {str(i + 1): count for i, count in enumerate(counts) if m.drafted_by_position[i]}
            text = f"Tokens {name.removesuffix('_at')} at a position of the draft."
            yield _labelled(CounterMetricFamily, name, text, label="position", values=known)
        yield _labelled(GaugeMetricFamily, "free_pages", "Free cache pages.", label="group", values=m.free_pages)
        for name, text, value in (
            ("running", "Sequences running.", m.running),
            ("waiting", "Sequences waiting.", m.waiting + sum(model.turns.waiting for model in self._pool.loaded)),
            ("kv_bytes", "Memory that K/V holds.", m.kv_bytes),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", text, value=value)
        slots = self._pool.slots.values()
        size = {s.name: s.size if s.model is not None else 0 for s in slots}
        there = {s.name: int(s.model is not None) for s in slots}
        loads = {s.name: s.loads for s in slots}
        gone = {s.name: s.evictions for s in slots}
        yield _labelled(GaugeMetricFamily, "model_loaded", "1 while a model is loaded.", label="model", values=there)
        yield _labelled(
            GaugeMetricFamily, "model_bytes", "Weights and K/V of a loaded model.", label="model", values=size
        )
        yield _labelled(CounterMetricFamily, "model_loads", "Times a model was loaded.", label="model", values=loads)
        yield _labelled(
            CounterMetricFamily, "model_evictions", "Times a model was evicted for another.", label="model", values=gone
        )


def _labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    family = kind(f"outrider_{name}", text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family
