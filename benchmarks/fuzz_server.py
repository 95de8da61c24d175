"""Fuzz the HTTP side with schemathesis from the server's own OpenAPI document: no 5xx, whatever is sent.

    pip install schemathesis
    python benchmarks/fuzz_server.py smollm2 --cases 5000

Requests are made from the schema and by breaking it. Besides the generated ones, hand-made bodies that parsers trip
over are sent. Answers are kept short (max_tokens is overwritten) so that thousands of cases take minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]
from outrider.config import EngineConfig  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.prepare import ServedModel  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

MODEL = "fuzzed"
HAND_MADE: list[bytes] = [
    b"", b"{", b"null", b"[]", b"0", b'""', b"NaN", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 5_000, b'{"\\ud800":1}',
    b'{"model":"fuzzed"}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"\\u0000"}],"max_tokens":2}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"<|im_start|><|im_end|>"}],"max_tokens":1}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":1e400}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"seed":99999999999999999999999}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":2,"stop":["\\ud83d"]}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":2,"logit_bias":{"0":-100,"1":100}}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":2,"response_format":{"type":"json_schema","json_schema":'
    b'{"name":"x","schema":{"type":"string","pattern":"(a+)+$"}}}}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":2,"response_format":{"type":"json_schema","json_schema":'
    b'{"name":"x","schema":{"$ref":"#"}}}}',
    b'{"model":"fuzzed","messages":[{"role":"user","content":"x"}],"max_tokens":2,"tool_choice":"required","tools":[{"type":"function",'
    b'"function":{"name":"f","parameters":{"properties":{"a":{"$ref":"#"}}}}}]}',
]  # fmt: skip


def tame(body: Any) -> Any:
    """Keep generated requests cheap, and let most of them reach the engine."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > 4:
                body[name] = 4
        if isinstance(body.get("messages"), list) or "prompt" in body:
            body.setdefault("max_tokens", 4)
            if isinstance(body.get("model"), str):
                body["model"] = MODEL
    return body


def reconcile(body: Any) -> Any:
    """Fields that are fine alone but not together: the schema can't say so, and all would end as the same 400."""
    if not isinstance(body, dict):
        return body
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    for name in ("max_completion_tokens", "best_of", "echo", "min_tokens", "response_format"):
        if name in body and hash(str(body)) % 4:
            body.pop(name)
    body["n"] = 1 + hash(str(body)) % 3
    for message in body.get("messages") or []:
        if message.get("role") != "assistant":
            message.pop("tool_calls", None)
        if message.get("role") != "tool":
            message.pop("tool_call_id", None)
        else:
            message["tool_call_id"] = "x"
        if message.get("content") is None:
            message["content"] = "hi"
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = "{}"
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        body["logit_bias"] = {str(i): v for i, v in enumerate(bias.values())}
    body["stop"] = (
        [s for s in body["stop"] if s][:4] if isinstance(body.get("stop"), list) else body.get("stop") or None
    )
    return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--reasons", action="store_true", help="print what the 400s said")
    args = parser.parse_args()
    llm = LLM.load(args.model, engine=EngineConfig(max_batch=4, max_context=512))
    server = HttpServer(ServedModel.of(llm), ServerSettings(MODEL, port=0, max_concurrent=4, timeout=60.0))
    with server.running() as url:
        counts: Counter[int] = Counter()
        failures: list[dict[str, Any]] = []

        reasons: Counter[str] = Counter()

        def note(what: Any, status: int, text: str) -> None:
            counts[status] += 1
            if status == 400:
                reasons[json.loads(text)["error"]["message"][:60]] += 1
            if status >= 500:
                failures.append({"request": repr(what)[:2000], "status": status, "answer": text[:300]})

        with httpx.Client(base_url=url, timeout=120) as client:
            for path in ("/v1/chat/completions", "/v1/completions"):
                for body in HAND_MADE:
                    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
                    note(body[:200], answer.status_code, answer.text)
            schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
            operations = [o.ok() for o in schema.get_all_operations()]
            weights = {o.label: (1 if o.method == "get" else 20) for o in operations}
            began = time.monotonic()
            for operation in operations:
                each = max(1, round(1.2 * args.cases * weights[operation.label] / sum(weights.values()) / 2))
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    try:
                        strategy = operation.as_strategy(generation_mode=mode)
                    except Exception as e:  # a route without parameters can't be broken
                        print(f"{operation.label}: no {mode.name.lower()} cases ({type(e).__name__})", file=sys.stderr)
                        continue
                    fuzz(
                        client,
                        operation,
                        strategy,
                        each,
                        note,
                        reconcile if mode is GenerationMode.POSITIVE else lambda body: body,
                    )
        result = {"cases": sum(counts.values()), "by_status": dict(sorted(counts.items())), "failures": len(failures),
                  "seconds": round(time.monotonic() - began)}  # fmt: skip
        print(json.dumps(result))
        if args.reasons:
            print(json.dumps(reasons.most_common(40), indent=1), file=sys.stderr)
        for failure in failures[:10]:
            print(json.dumps(failure), file=sys.stderr)
        llm.engine.check()
    raise SystemExit(1 if failures else 0)


def fuzz(client: httpx.Client, operation: Any, strategy: Any, count: int, note: Any, mend: Any) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        body = mend(tame(case.body)) if case.body is not schemathesis.core.NOT_SET else None
        try:
            content = json.dumps(body).encode() if body is not None else None
            headers = {"Content-Type": "application/json"} if content is not None else {}
            answer = client.request(case.method, case.formatted_path, content=content, headers=headers)
        except (httpx.InvalidURL, TypeError, ValueError):
            return  # not a request that can be written down
        except httpx.TransportError as e:
            note((case.method, case.formatted_path, body), 599, repr(e))
            return
        note((case.method, case.formatted_path, body), answer.status_code, answer.text)

    try:
        run()
    except Exception as e:  # an unsatisfiable strategy (nothing to break) ends the cases of this route
        print(f"{operation.label}: {type(e).__name__}: {str(e)[:100]}", file=sys.stderr)


if __name__ == "__main__":
    main()
