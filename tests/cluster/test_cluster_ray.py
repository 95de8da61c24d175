"""On a real Ray cluster on this machine: `make test-ray`. Skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'outrider[ray]' (make test-ray does)")

ROOT = Path(__file__).resolve().parents[2]


def python(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",
    }
    environment = {**os.environ, **own}  # local: never a cluster that somebody else has here
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=seconds, env=environment, cwd=ROOT
    )


@pytest.mark.timeout(1500)
def test_a_kill_an_update_and_prefix_routing() -> None:
    done = python(
        "tests/stress/cluster_storm.py",
        "smollm2",
        "--requests",
        "240",
        "--concurrency",
        "16",
        "--cases",
        "40",
        "--groups",
        "10",
        seconds=1400,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "verdicts ok" in done.stdout and "FAIL" not in done.stdout


@pytest.mark.timeout(900)
def test_two_nodes_keys_and_a_replica_over_two_processes() -> None:
    """One of two nodes killed under load, and the second process of a tensor-parallel replica: every answer right or a
    clean error."""
    done = python("tests/stress/cluster_nodes.py", "--requests", "120", seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "14 of 14 verdicts ok" in done.stdout and "FAIL" not in done.stdout


@pytest.mark.timeout(900)
def test_a_batch_file_on_ray_equals_one_on_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {
            "custom_id": f"r{i}",
            "url": "/v1/completions",
            "body": {"model": "smollm2", "prompt": f"{i} apples and", "max_tokens": 6, "temperature": i % 2},
        }
        for i in range(24)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no request\n")
    texts = []
    for out, more in ((tmp_path / "local.jsonl", ()), (tmp_path / "ray.jsonl", ("--ray", "--replicas", "2"))):
        done = python(
            "-m",
            "outrider.cli.main",
            "batch",
            str(source),
            "--out",
            str(out),
            "--max-concurrent",
            "4",
            *more,
            seconds=400,
        )
        assert done.returncode == 0, done.stderr
        rows = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
        assert len(rows) == 25
        texts.append(
            {id: r["response"]["body"]["choices"][0]["text"] if r["response"] else r["error"] for id, r in rows.items()}
        )
    assert texts[0] == texts[1]


def test_a_model_that_does_not_load_is_tried_once_and_a_divided_one_stays_on_one_machine() -> None:
    from outrider.cluster.app import application
    from outrider.cluster.config import ClusterConfig

    config = ClusterConfig.of({"model": "smollm2", "tensor_parallel": 2, "cpus_per_replica": 4}).placed(8)
    (engines, *_) = application(config)._bound_deployment.init_args
    made = engines._bound_deployment
    assert made._deployment_config.max_constructor_retry_count == 1
    assert made._replica_config.placement_group_bundles == [{"CPU": 4.0, "GPU": 2.0}]
    assert made._replica_config.placement_group_strategy == "STRICT_PACK"
    assert (
        made.ray_actor_options["num_gpus"] == 2
    )  # it starts the second process itself, which finds its GPU among these


@pytest.mark.timeout(400)
def test_what_cannot_be_deployed_is_one_line() -> None:
    for words, message in (
        (("--replicas", "2", "--set", "cpus_per_replica=500"), "CPUs and Ray has"),
        (("--set", "draft_tokens=3", "--set", "drafter=./no-such-drafter"), "no-such-drafter"),
    ):
        done = python("-m", "outrider.cli.main", "deploy", "smollm2", "--address", "local", *words, seconds=180)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
