"""Spans of calls, taken by an exporter in memory."""

from __future__ import annotations

import sys

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.server.tracing import Tracing
from outrider.types import OutriderError

TOK = tokenizer()


def test_a_call_is_a_span_with_its_parts() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed: pip install 'outrider[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    with Served(FakeEngine(TOK), TOK) as s:
        s.state.tracing = Tracing(provider)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5}
        headers = {"traceparent": parent, "x-request-id": "mine"}
        assert httpx.post(f"{s.url}/v1/chat/completions", json=body, headers=headers, timeout=120).status_code == 200
        assert "[DONE]" in httpx.post(f"{s.url}/v1/chat/completions", json={**body, "stream": True}, timeout=120).text
        s.settle()
    spans = seen.get_finished_spans()
    first, second = [x for x in spans if x.name == "chat fake"]
    assert format(first.context.trace_id, "032x") in parent and first.attributes["outrider.request_id"] == "mine"
    assert first.attributes["gen_ai.usage.output_tokens"] == second.attributes["gen_ai.usage.output_tokens"] == 5
    assert (
        first.attributes["gen_ai.response.finish_reasons"] == ("length",) and first.attributes["outrider.decode_s"] >= 0
    )
    parts = [x for x in spans if x.parent is not None and x.parent.span_id == first.context.span_id]
    assert [x.name for x in parts] == ["queue", "prefill", "decode"]
    assert first.start_time <= parts[0].start_time and parts[-1].end_time <= first.end_time
    assert "secret" not in str([(x.name, dict(x.attributes or {})) for x in spans])


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OutriderError, match=r"pip install 'outrider\[otel\]'"):
        Tracing.to("http://127.0.0.1:4318")
