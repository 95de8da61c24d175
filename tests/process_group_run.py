"""Program of every process of a tensor-parallel test: `python tests/process_group_run.py OUT CASES.json WORLD`; the
first starts the others.

A case is {"name", "model", "drafter"?, "plain"?: no engine}. The processes load their parts of each in turn; rank 0
also loads it whole and compares logits (plain torch operators, float32), then runs an engine, drafting and not, and the
findings go to OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.engines import request, run
from tests.kv import build_kv
from torch import Tensor

from outrider.assemble import drafter_names
from outrider.config import EngineConfig, LoadSettings, SpecConfig
from outrider.engine.engine import Engine
from outrider.engine.grammar import AllowedTokens
from outrider.engine.memory import KVOptions
from outrider.engine.scoring import Scorer
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.split import TPRank, split_target
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.reference import ReferenceOps
from outrider.parallel import Leader, ProcessGroup, follow, join
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.loader import pick_drafter
from outrider.weights import hub
from outrider.weights.load import load_target

PROMPT = [5, 17, 40, 3, 22, 9, 31, 8, 60, 2, 11, 45, 7, 30]


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Logits of a prompt in one pass, and of three more rows in a second one."""
    kv = build_kv(model.config, 1, 32)
    first = model.logits(model.forward(torch.tensor(PROMPT), kv.view([(0, len(PROMPT))])).hidden)
    more = model.logits(model.forward(torch.tensor([4, 12, 33]), kv.view([(len(PROMPT), 3)])).hidden)
    return torch.cat((first, more))


def compare(case: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    config, weights, _ = load_target(case["model"], tp=group.tp)
    parallel = logits(TextModel(config, weights, ReferenceOps(), group))
    whole_config = ModelConfig.from_hf(hub.resolve(case["model"]).config)
    _, cuts = split_target(whole_config, TPRank(0, group.tp.world), lambda name: 1)

    def size(held):
        return sum(held[name].nbytes for name in cuts if name in held)

    most = -group.all_reduce_min([-size(weights)])[0]  # what the fullest process holds
    if group.tp.rank:
        return {}
    _, whole, _ = load_target(case["model"])
    want = logits(TextModel(whole_config, whole, ReferenceOps()))
    return {
        "off": float((parallel - want).abs().max()),
        "largest": float(want.abs().max()),
        "share": most / size(whole),
    }


def engine(case: dict[str, Any], group: ProcessGroup, graphs: bool) -> Engine:
    """graphs: by the executor that captures steps on a GPU; here the captured function itself runs, one step ahead of
    the host."""
    ops = CpuOps(1)
    cpu = torch.device("cpu")
    config, weights, _ = load_target(case["model"], cpu, torch.float32, ops, tp=group.tp)
    target = TextModel(config, weights, ops, group)
    load = LoadSettings(drafter=case.get("drafter", "ngram"))
    drafter, _ = pick_drafter(hub.resolve(case["model"]), load, target, dtype=torch.float32)
    settings = EngineConfig(max_batch=4, max_context=256, page_size=8, prefill_chunk=16, graphs=graphs)
    return Engine(
        target,
        None,
        settings,
        SpecConfig(4),
        drafter,
        Controller(CostTable(), drafter_names(drafter, load)),
        KVOptions(ops.kv_dtype(torch.float32, "auto")),
    )


def answers(made: Engine, drafter: bool, tag: str) -> list[list[int]]:
    """Greedy, sampled, filtered and with penalties, and under a mask; all at once."""
    shared = {"max_tokens": 8, "drafter": drafter}
    some = AllowedTokens(range(20, 50), made.model.config.vocab_size)
    requests = [
        request(f"{tag} 0", PROMPT, **shared), request(f"{tag} 1", PROMPT[:5] * 5, temperature=0.8, seed=3, **shared),
        request(f"{tag} 2", PROMPT[::-1], temperature=1.1, top_k=20, repetition_penalty=1.2, seed=9, logprobs=2, **shared),
        request(f"{tag} 3", PROMPT[3:], temperature=1.0, seed=1, grammar=some, **shared),
        request(f"{tag} 4", PROMPT[2:9], temperature=0.5, seed=4, **shared),
    ]  # fmt: skip
    done = run(made, requests)
    return [done[r.id] for r in requests]


def main() -> None:
    torch.set_num_threads(1)
    group = join(int(sys.argv[3]), "cpu", [sys.executable, *sys.argv])
    results = {}
    for case in json.loads(Path(sys.argv[2]).read_text()):
        one = results[case["name"]] = compare(case, group)
        if case.get("plain"):
            continue
        tested = engine(case, group, graphs=False)
        if case["name"] in ("dense", "llama"):
            ahead = engine(case, group, graphs=True)
            if group.tp.rank:
                follow(ahead, group)
            else:
                Leader(ahead, group)
                ahead.executors[0].prepare()
                one["ahead"] = answers(ahead, True, "ahead")
                group.send(None)
        if group.tp.rank:
            follow(tested, group)
            continue
        Leader(tested, group)
        one["plain"], one["drafted"] = answers(tested, False, "plain"), answers(tested, True, "drafted")
        one["accepted"], one["cycles"] = tested.metrics.accepted, tested.metrics.cycles
        scorer = Scorer(PROMPT, 1)
        while scorer.step(tested):
            pass
        one["scored"] = [next(iter(entry)) for entry in scorer.entries if entry]
        tested.check()
        group.send(None)
    if group.tp.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    group.close(announced=True)
    os._exit(0)  # threads of the collectives may abort an interpreter that is being taken down


if __name__ == "__main__":
    main()
