"""One file describes a deployment; each mistake in it is one line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cluster.config import ClusterConfig, ReplicaCount
from outrider.types import OutriderError


@pytest.mark.parametrize(("text", "low", "high"), [("2", 2, 2), ("2..8", 2, 8), ("1..1", 1, 1)])
def test_replicas_are_a_number_or_bounds(text: str, low: int, high: int) -> None:
    count = ReplicaCount.parse(text)
    assert (count.low, count.high) == (low, high)
    assert ReplicaCount.parse(str(count)) == count


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"replicas": "8..2"},
            'replicas: "8..2" is not allowed: it must be a number such as 2, or bounds such as 2..8',
        ),
        ({"replicas": 0}, "replicas: 0 "),
        ({"replicas": True}, "replicas: true "),
        ({"replicas": "2.."}, "replicas: "),
        ({"port": 70000}, "port: 70000 is not allowed: input should be less than or equal to 65535"),
        ({"max_concurrent": "many"}, 'max_concurrent: "many" '),
        ({"routing": "random"}, "input should be 'prefix' or 'least-loaded'"),
        ({"wait": 0}, "wait: 0 is not allowed: input should be greater than 0"),
        ({"gpu_memory": 1.5}, "gpu_memory must be in (0, 1], got 1.5"),
        ({"draft_tokens": 17}, "draft_tokens must be in 0..16 or 'auto', got 17"),
        ({"dtype": "int7"}, "unknown dtype 'int7'; known: float32, bfloat16, float16"),
        ({"quantize": "int3"}, "unknown quantize 'int3'; known: int8, int4, fp8"),
        ({"colour": "red"}, "unknown field 'colour'; known: model, replicas,"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"model": ""}, 'model: "" is not allowed'),
        ({"host": ["a"]}, 'host: ["a"] '),
        ({"tree": True}, "tree: true is not allowed"),
        ({"draft_tokens": False}, "draft_tokens: false is not allowed"),
        ({"tree": 2.5}, "tree: 2.5 "),
        ({"tree": [9]}, "tree: [9] "),
    ],
)
def test_a_mistake_is_one_line(fields: dict[str, object], told: str) -> None:
    with pytest.raises(OutriderError) as caught:
        ClusterConfig.of({"model": "smollm2", **fields}, "cluster.yaml: ")
    assert (
        told in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith("cluster.yaml: ")
    )


def test_what_it_says_of_itself_reads_back() -> None:
    config = ClusterConfig.of({"model": "smollm2", "replicas": "2..8", "max-concurrent": 4, "device": None, "wait": 3})
    assert ClusterConfig.of(config.fields()) == config and config.fields()["replicas"] == "2..8"
    assert ClusterConfig.of({"model": "m", "vision": False}).load.vision is False
    placed = config.placed(0)
    assert (placed.gpus_per_replica, placed.max_concurrent, placed.load.threads, placed.target_queue) == (
        0.0,
        4,
        1,
        4.0,
    )
    assert ClusterConfig.of({"model": "m"}).placed(2).max_concurrent == 254  # as `outrider serve` on a GPU
    assert ClusterConfig.of({"model": "m", "device": "cpu"}).placed(2).gpus_per_replica == 0
    divided = ClusterConfig.of({"model": "m", "tensor_parallel": 2, "cpus_per_replica": 4})
    assert (divided.placed(0).load.threads, divided.placed(0).gpus_per_replica, divided.placed(4).gpus_per_replica) == (
        2,
        0.0,
        2.0,
    )
    with pytest.raises(OutriderError, match="one GPU per process"):
        ClusterConfig.of({"model": "m", "tensor_parallel": 2, "gpus_per_replica": 1}).placed(4)
    with pytest.raises(OutriderError, match="the cluster has 0 GPUs"):
        ClusterConfig.of({"model": "m", "gpus_per_replica": 1}).placed(0)


@pytest.mark.parametrize(("said", "tree"), [("off", 0), ("'off'", 0), ("auto", None), ("9", 9), ("'9'", 9)])
def test_trees_as_yaml_reads_them(tmp_path: Path, said: str, tree: int | None) -> None:
    (tmp_path / "c.yaml").write_text(f"model: m\ntree: {said}\n")
    config = ClusterConfig.read(tmp_path / "c.yaml", {})
    assert config.load.spec.tree == tree and ClusterConfig.of(config.fields()) == config
    assert ClusterConfig.from_args({"model": "m", "tree": said.strip("'")}).load.spec.tree == tree


def test_arguments_of_an_application_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: smollm2\nwait: 7\n")
    config = ClusterConfig.from_args(
        {"config": str(file), "replicas": "2", "gpu_memory": "0.5", "max_concurrent": "4", "name": "7"}
    )
    assert (config.model, config.wait, str(config.replicas), config.load.engine.gpu_memory, config.max_concurrent, config.name) == (
        "smollm2", 7.0, "2", 0.5, 4, "7",
    )  # fmt: skip
    with pytest.raises(OutriderError, match='max_concurrent: "x" is not allowed'):
        ClusterConfig.from_args({"model": "m", "max_concurrent": "x"})


def test_the_files_in_deploy_are_configurations() -> None:
    root = Path(__file__).resolve().parents[3]
    assert str(ClusterConfig.read(root / "deploy" / "cluster.yaml", {}).replicas) == "2..8"
    service = yaml.safe_load((root / "deploy" / "kuberay.yaml").read_text())
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    tree = ast.parse((root / "src" / Path(*module.split("."))).with_suffix(".py").read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)
    config = ClusterConfig.from_args(application["args"])
    [workers] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (config.replicas.low, config.replicas.high)
    pinned = (root / "constraints.txt").read_text()
    assert f"ray=={service['spec']['rayClusterConfig']['rayVersion']}" in pinned


def test_files_and_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: smollm2\nreplicas: 2..8\nrouting: least-loaded\n")
    shown = CliRunner().invoke(app(), ["deploy", str(file), "--replicas", "3", "--set", "wait=5", "--check"])
    assert shown.exit_code == 0 and shown.stdout.splitlines() == [
        "model: smollm2",
        "replicas: '3'",
        "routing: least-loaded",
        "wait: 5.0",
    ]
    for text, message in (
        ("model: [", "is not YAML"),
        ("- 1", "must hold fields"),
        ("replicas: 2", "model is missing"),
    ):
        file.write_text(text)
        with pytest.raises(OutriderError, match=message) as caught:
            ClusterConfig.read(file, {})
        assert "\n" not in str(caught.value)
    with pytest.raises(OutriderError, match="cannot read"):
        ClusterConfig.read(tmp_path / "none.yaml", {})
    assert isinstance(CliRunner().invoke(app(), ["deploy", "smollm2", "--set", "wait"]).exception, OutriderError)
