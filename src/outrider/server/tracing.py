"""Optional OpenTelemetry tracing: a span for each call, with waiting, prefill and decoding as its children.

It needs the extra `otel`. Without an endpoint it imports nothing. Spans contain no text of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import __version__
from ..types import bad_input
from .answer import Answer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace

        self._provider = provider
        self._trace = trace
        self._tracer = provider.get_tracer("outrider", __version__)
        self._context = propagate.extract

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Exports spans to a collector by OTLP over HTTP, in batches, off the event loop."""
        with bad_input(ModuleNotFoundError, lambda e: f"--otel-endpoint needs {e.name}: pip install 'outrider[otel]'"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        resource = Resource.create({"service.name": "outrider", "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
        return cls(provider)

    def ended(
        self, headers: Mapping[str, str], request_id: str, route: str, answer: Answer, model: str, began: float
    ) -> None:
        """Records a finished call. began: its arrival by time.time(). The header `traceparent` names the parent."""
        end = time.time()
        choices = answer.choices
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.operation.name": route,
            "gen_ai.request.model": model,
            "gen_ai.provider.name": "outrider",
            "outrider.request_id": request_id,
            "gen_ai.response.finish_reasons": [c.finish or "abort" for c in choices],
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": answer.new_tokens,
        }
        parts: list[tuple[str, float, float]] = []
        stats = [c.stats for c in choices if c.stats is not None]
        if stats:
            attributes |= {
                "outrider.queue_s": max(0.0, end - began - max(s.ttft_s + s.decode_s for s in stats)),
                "outrider.prefill_s": max(s.prefill_s for s in stats),
                "outrider.time_to_first_token_s": min(s.ttft_s for s in stats),
                "outrider.decode_s": max(s.decode_s for s in stats),
                "outrider.cached_tokens": min(s.cached_tokens for s in stats),
                "outrider.drafted": sum(s.drafted for s in stats),
                "outrider.accepted": sum(s.accepted for s in stats),
            }
            first = max(began, end - stats[0].decode_s)
            submitted = max(began, first - stats[0].ttft_s)
            parts = [("queue", began, submitted), ("prefill", submitted, first), ("decode", first, end)]
        kind = self._trace.SpanKind.SERVER
        context = self._context(headers)
        name = f"{route} {model}"
        at = _ns(began)
        span = self._tracer.start_span(name, context, kind=kind, attributes=attributes, start_time=at)
        inside = self._trace.set_span_in_context(span)
        for name, start, stop in parts:
            self._tracer.start_span(name, inside, start_time=_ns(start)).end(_ns(stop))
        span.end(_ns(end))

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
