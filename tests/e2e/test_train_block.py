"""A block drafter from prompts to a folder that others load: training, resume, the walk against the engine, layouts."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.block_drafters import LAYOUTS, speculators, tensors, write
from tests.e2e.test_train import job, prompts, quiet

from outrider.cli.main import main
from outrider.llm import LLM
from outrider.models.block_config import BlockConfig
from outrider.prompts import read_prompts
from outrider.train import run
from outrider.train.block_net import load_net
from outrider.train.config import EvalConfig
from outrider.train.data import Sequences
from outrider.train.evaluate import Judge, walk
from outrider.train.export import block_dict
from outrider.train.target import describe, encode, open_target
from outrider.train.tools import evaluate_drafter, export_drafter
from outrider.types import OutriderError, SamplingParams

torch.set_num_threads(1)
BLOCK = {"layers": 2, "unroll": 5, "anchor_share": 0.5, "taps": (0, 1)}


@pytest.fixture(scope="module", params=["dflash", "eagle3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    folder = tmp_path_factory.mktemp("block")
    kind = str(request.param)
    target = tiny.write_target("smollm2", folder / "target")
    data = prompts(folder / "prompts.jsonl")
    run.train(job(target, data, folder / "run", kind=kind, **BLOCK), quiet)
    return target, data, folder / "run", kind


def test_a_trained_drafter_is_in_the_speculators_layout(world: tuple[Path, Path, Path, str]) -> None:
    """And it has learnt: its last rows of the log are better than its first ones."""
    target, data, out, kind = world
    raw = json.loads((out / "drafter" / "config.json").read_text())
    assert raw["speculators_model_type"] == kind and raw["speculators_config"]["algorithm"] == kind
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in rows if "loss" in r]
    assert losses[-1] < losses[0]
    report = evaluate_drafter(str(target), str(out / "drafter"), EvalConfig(data, limit=8, max_tokens=24), say=quiet)
    assert report["tokens_per_cycle"][4] > 1.0 and report["answers"] == 8


def test_a_run_goes_on_bit_by_bit(world: tuple[Path, Path, Path, str], tmp_path: Path) -> None:
    """Stopped after 20 steps and continued, it ends with the weights of the run that was never stopped."""
    target, data, _, kind = world
    config = job(target, data, tmp_path / "r", kind=kind, **BLOCK)
    run.train(replace(config, steps=20, lr_hold=1.0), quiet)
    run.train(replace(config, steps=40, lr_hold=1.0), quiet)
    run.train(replace(config, steps=40, lr_hold=1.0, out=tmp_path / "whole"), quiet)
    kept, whole = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["net"] for name in ("r", "whole"))
    assert all(torch.equal(kept[name], whole[name]) for name in whole)


def test_the_walk_is_what_the_engine_does(world: tuple[Path, Path, Path, str]) -> None:
    """Cycles counted over known answers against cycles that the engine really took."""
    target, data, out, _ = world
    drafter = str(out / "drafter")
    llm = LLM.load(str(target), drafter=drafter, draft_tokens=3, device="cpu", ops="reference")
    opened = open_target(str(target), "cpu", torch.float32)
    net = load_net(drafter, opened)
    for temperature in (0.0, 1.0):
        encoded = encode(read_prompts(data, 12), describe(str(target)).text, opened.config.vocab_size, max_tokens=64)
        prompts = [encoded[i].tolist() for i in range(12)]
        seeds = list(range(12))
        params = [SamplingParams(temperature=temperature, max_tokens=24, seed=s) for s in seeds]
        plain = [llm.generate([p], q, drafter=False)[0].token_ids for p, q in zip(prompts, params, strict=True)]
        whole = [np.array(p + a) for p, a in zip(prompts, plain, strict=True)]
        answered = Sequences.of(
            whole, [len(p) for p in prompts], seeds, [not temperature] * 12, opened.config.vocab_size, seeds
        )
        right = Judge(opened.model, net).drafts(answered, 3, temperature).right
        took = []
        walked = []
        for i in range(12):
            (answer,) = llm.generate([prompts[i]], params[i])
            assert answer.token_ids == plain[i]
            took.append(answer.stats.cycles - 1)  # the first cycle starts inside the prompt
            walked.append(walk(right[i][answer.stats.first_emitted - 1 :], 3)[1])
        assert sum(took) > 60 and sum(a != b for a, b in zip(took, walked, strict=True)) <= 1, (took, walked)


def test_a_warm_start_begins_with_the_drafter_given(world: tuple[Path, Path, Path, str], tmp_path: Path) -> None:
    target, data, out, kind = world
    config = job(target, data, tmp_path / "r", kind=kind, **BLOCK, init=str(out / "drafter"), steps=1, lr=1e-9)
    run.train(config, quiet)
    before, after = (load_file(folder / "drafter" / "model.safetensors") for folder in (out, tmp_path / "r"))
    assert all(torch.allclose(after[name].float(), before[name].float(), atol=1e-2) for name in before)
    with pytest.raises(OutriderError, match="no block drafter"):
        shutil.copytree(Path(run.__file__).parents[1] / "assets" / "drafters" / "smollm2", tmp_path / "mtp")
        run.train(replace(config, out=tmp_path / "r2", init=str(tmp_path / "mtp")), quiet)


def test_export_and_back(world: tuple[Path, Path, Path, str], tmp_path: Path) -> None:
    """Both layouts hold the same drafter; the command says what it wrote."""
    _, _, out, _ = world
    there = export_drafter(str(out / "drafter"), tmp_path / "vllm", "vllm")
    back = export_drafter(str(tmp_path / "vllm"), tmp_path / "back", "speculators")
    ours, theirs = (BlockConfig.from_hf(raw) for raw in (back, there))
    assert replace(ours, layout=theirs.layout) == theirs
    first, last = (load_file(folder / "model.safetensors") for folder in (out / "drafter", tmp_path / "back"))
    assert first.keys() == last.keys() and all(torch.equal(first[n], last[n]) for n in first)


def test_export_says_how_to_use_what_it_wrote_and_overwrites_nothing(
    world: tuple[Path, Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, _, out, kind = world
    to = tmp_path / "for vllm"
    words = ["outrider", "export", str(out / "drafter"), "--to", "vllm", "--out", str(to)]

    def export() -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    code, said, _ = export()
    theirs, ours = (shlex.split(line) for line in said.splitlines()[-2:])
    assert code in (0, None) and theirs[:4] == ["vllm", "serve", str(target), "--speculative-config"]
    config = json.loads(theirs[4])
    assert config["method"] == kind and config["model"] == str(to) and config["num_speculative_tokens"] >= 1
    assert ours == ["outrider", "serve", str(target), "--drafter", str(to)]
    before = (to / "model.safetensors").stat().st_mtime_ns
    code, _, err = export()
    assert code == 2 and "is not empty" in err and (to / "model.safetensors").stat().st_mtime_ns == before


def test_a_trained_dflash_loads_in_the_speculators_package(world: tuple[Path, Path, Path, str]) -> None:
    _, _, out, kind = world
    if kind != "dflash":
        pytest.skip("an EAGLE-3 has a head of its own there")
    raw = json.loads((out / "drafter" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"]
    model = speculators("speculators").SpeculatorModel.from_pretrained(str(out / "drafter"), verifier=None)
    state = model.state_dict()
    stored = load_file(out / "drafter" / "model.safetensors")
    assert stored.keys() <= state.keys()
    assert all(torch.equal(state[name].float(), stored[name].float()) for name in stored)
    assert model.config.block_size == 6 and model.config.aux_hidden_state_layer_ids == [1, 2]


@pytest.mark.parametrize("layout", ["z-lab", "z-lab-old", "speculators-eagle3", "eagle3", "eagle3.1"])
def test_layouts_of_others_can_be_written(tmp_path: Path, layout: str) -> None:
    """A written layout reads back as the original."""
    folder = write(tmp_path / "d", LAYOUTS[layout], tensors(LAYOUTS[layout]))
    raw = export_drafter(str(folder), tmp_path / "e", "vllm")
    was = BlockConfig.from_hf(LAYOUTS[layout])
    now = BlockConfig.from_hf(raw)
    assert replace(was, layout=now.layout) == now


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "d", LAYOUTS["dspark"], tensors(LAYOUTS["dspark"]))
    monkeypatch.setattr("sys.argv", ["outrider", "export", str(folder), "--to", "vllm", "--out", str(tmp_path / "e")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "dspark drafters cannot be exported" in capsys.readouterr().err
    scaled = replace(BlockConfig.from_hf(LAYOUTS["z-lab"]), layout="speculators", output_scale=0.5)
    with pytest.raises(OutriderError, match="no place in the speculators layout"):
        block_dict(scaled)
