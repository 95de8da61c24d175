"""Tensor parallelism on one GPU: a group of one (NCCL inside the captured graph) beside the plain path, and two ranks on
one device.

    PYTHONPATH=src python3 tests/stress/gpu_cluster.py                    # all parts, each in a process of its own:
    about 2 minutes on an H200
    PYTHONPATH=src python3 tests/stress/gpu_cluster.py --dry              # the same on the CPU with tiny models, over
    gloo
    PYTHONPATH=src python3 tests/stress/gpu_cluster.py --part one --size 31B | --part two --how nccl|mps|gloo

`one`: three engines over the same dummy weights, steps timed in turn: `solo` (what --tensor-parallel 1 runs: no
exchange), `group` (a group of one: rank 0 tells every step, NCCL is called for every exchange and finds its part in
place), `copies` (the same, but NCCL has to move each part: one node a call in the graph). Texts of all three, plain and
drafted, must be equal, and `group` within 1 % of `solo`.

`two`: two processes of one model on the same GPU. NCCL refuses two ranks on one device of one host; told that they are
two hosts (NCCL_HOSTID) it connects them by sockets. The two share the GPU in turn, so times say nothing: what counts is
that logits are those of one process, that drafting changes nothing, that exchanges are captured, and that both
processes end. `mps`: with NVIDIA's daemon that lets both run at once. `gloo`: through the host's memory, without
graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tests.gpu.place import tiny
from tests.kv import build_kv
from torch import Tensor

from gpu_common import FAILED, say, verdict
from gpu_rig import SIZES, shallow
from outrider import assemble
from outrider.config import EngineConfig, LoadSettings
from outrider.engine.decode_graphs import DecodeGraphs
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.engine.scoring import ScoringJob
from outrider.engine.step import Request
from outrider.llm import LLM
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.decoder import TextModel
from outrider.ops.reference import ReferenceOps
from outrider.parallel import ProcessGroup, join
from outrider.parallel import process_group as team_module
from outrider.parallel.broadcast import BroadcastExecutor
from outrider.spec import loader
from outrider.types import SamplingParams
from outrider.weights.load import load_target

K = 4


# ---- models
@contextmanager
def folder(size: str, layers: int | None, dry: bool) -> Iterator[tuple[str, str]]:
    """Folder with the configurations of a target and its drafter; weights are made up."""
    target = dict(BUILTIN_CONFIGS[SIZES[size]])
    drafter = dict(BUILTIN_CONFIGS[SIZES[size] + "-assistant"])
    target = shallow(target, layers) if layers else target
    with tempfile.TemporaryDirectory() as root:
        for name, raw in (("target", target), ("drafter", drafter)):
            (Path(root) / name).mkdir()
            (Path(root) / name / "config.json").write_text(json.dumps(tiny(raw) if dry else raw))
        yield f"{root}/target", f"{root}/drafter"


def settings(context: int, sequences: int, graphs: bool = True) -> EngineConfig:
    room = context + 512
    return EngineConfig(sequences, room, kv_tokens=sequences * (room + 32), prefix_cache=False, graphs=graphs)


def prompts(vocab: int, context: int) -> list[list[int]]:
    rng = random.Random(1)
    separate = [[rng.randrange(5, vocab) for _ in range(length)] for length in (context, context // 2, 9)]
    return [*separate, separate[2] * 5]  # the last repeats itself


def texts(llm: LLM, context: int, tokens: int, drafter: bool | str, k: int | None) -> list[list[int]]:
    """Greedy and drawn."""
    many = prompts(llm.config.vocab_size, context)
    out = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=tokens, ignore_eos=True)
        out += [done.token_ids for done in llm.generate(many, params, draft_tokens=k, drafter=drafter)]
    return out


def graphs_of(engine: Engine) -> DecodeGraphs | None:
    for executor in engine.executors:
        inner = executor.inner if isinstance(executor, BroadcastExecutor) else executor
        if isinstance(inner, GraphExecutor):
            return inner.decode_graphs
    return None


# ---- one rank
class Copies(ProcessGroup):
    """A process group whose exchanges move their part."""

    def __init__(self, group: ProcessGroup) -> None:
        self.__dict__.update(group.__dict__)

    def _every(self, mine: Tensor) -> Tensor:
        every = torch.empty_like(mine)
        if self.device.type == "cuda":
            dist.all_gather_into_tensor(every, mine)
        else:
            dist.all_gather([every], mine)
        return every.view(1, *mine.shape)


def share_weights() -> None:
    """Every engine of this process is built over the same tensors: 31B fits once."""
    for module, name in ((assemble, "load_target"), (loader, "load_target"), (loader, "load_drafter")):
        load = getattr(module, name)
        made = {}

        def once(what, *rest, load=load, made=made, **how):  # type: ignore[no-untyped-def]
            key = str(getattr(what, "path", what))
            if key not in made:
                made[key] = load(what, *rest, **how)
            return made[key]

        setattr(module, name, once)


def block(engine: Engine, tag: str, prompt: list[int], k: int, steps: int) -> float:
    """Milliseconds a step of one sequence, the host included."""
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.submit(Request(tag, prompt, params, k, bool(k)))
    while engine.running(tag) is None or engine.running(tag).first_token_at is None:  # type: ignore[union-attr]
        engine.step()
    for _ in range(8):
        engine.step()
    sync(engine.device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    sync(engine.device)
    ms = (time.perf_counter() - began) * 1e3 / steps
    engine.abort(tag)
    while engine.busy:
        engine.step()
    return ms


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nodes(engine: Engine, prompt: list[int]) -> str:
    """Nodes of one captured step, as the profiler sees its replay."""
    from torch.profiler import ProfilerActivity, profile

    engine.submit(Request("profile", prompt, SamplingParams(max_tokens=64, ignore_eos=True), 0, False))
    for _ in range(12):
        engine.step()
    sync(engine.device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            engine.step()
        sync(engine.device)
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    engine.abort("profile")
    while engine.busy:
        engine.step()
    moved = sum("Memcpy DtoD" in name for name in names) / 4
    return f"{len(names) / 4:.0f} kernels and copies a step, {moved:.0f} of them device to device, {sum('nccl' in n.lower() for n in names) / 4:.0f} NCCL's own"


def one(size: str, device: str, dry: bool) -> None:
    share_weights()
    context, steps, rounds, tokens = (
        (40, 6, 3, 12) if dry else (1024, 30, 5, 24) if size == "31B" else (1024, 150, 9, 48)
    )
    with folder(size, 10 if dry else None, dry) as (target, drafter):
        load = LoadSettings(
            drafter=drafter, draft_tokens=K, tree="off", device=device, load_format="dummy", engine=settings(context, 4)
        )

        def quiet(line):
            return None

        group = join(1, device)
        say(
            f"one: {size}, {dist.get_backend()} at world size 1"
            + (f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if not dry else "")
        )
        engines: dict[str, LLM] = {}
        for name, whose in (("solo", None), ("group", group), ("copies", Copies(group))):
            engines[name] = LLM(assemble.assemble(target, load, say if name == "solo" else quiet, whose), target, whose)
        want: list[list[int]] | None = None
        for name, llm in engines.items():
            plain = texts(llm, context, tokens, False, 0)
            drafted = texts(llm, context, tokens, True, K)
            want = want or plain
            graphs = graphs_of(llm.engine)
            assert graphs is not None
            verdict(
                f"{size} {name}: plain and drafted texts are solo's plain ones",
                plain == want and drafted == want,
                f"({sum(map(len, plain))} tokens each)",
            )
            verdict(
                f"{size} {name}: captured",
                graphs.broken is None,
                graphs.broken or f"({len(graphs.cache.graphs)} graphs)",
            )
        prompt = prompts(engines["solo"].config.vocab_size, context)[0]
        for k in (0, K):
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(rounds + 1):
                order = list(engines) if turn % 2 else list(engines)[::-1]
                for name in order:
                    ms = block(engines[name].engine, f"{name} {k} {turn}", prompt, k, steps)
                    if turn:  # the first captures
                        seconds[name].append(ms)
            middle = {name: statistics.median(each) for name, each in seconds.items()}
            ratio = {
                name: statistics.median(a / b for a, b in zip(each, seconds["solo"])) for name, each in seconds.items()
            }
            shown = ", ".join(f"{name} {middle[name]:.3f} ms ({ratio[name]:.4f} x)" for name in engines)
            verdict(
                f"{size} K = {k}, one sequence at {context}: group within 1 % of solo",
                ratio["group"] <= 1.01 or dry,
                shown,
            )
            say(
                f"     exchanges that copy cost {(middle['copies'] - middle['solo']) * 1e3:.0f} us a step; all: {json.dumps({n: [round(x, 3) for x in e] for n, e in seconds.items()})}"
            )
        if not dry:
            for name in engines:
                say(f"     {name}: {nodes(engines[name].engine, prompt)}")
        began = time.perf_counter()
        group.close()
        verdict(
            f"{size}: the group ends with its graphs",
            time.perf_counter() - began < 10,
            f"({time.perf_counter() - began:.2f} s)",
        )


# ---- two ranks
class Logits(ScoringJob):
    logits = True

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens, len(tokens))
        self.found: list[Tensor] = []

    def take(self, states: Tensor, begin: int) -> None:
        self.found.append(states.float().cpu())


def logits_of(llm: LLM, context: int) -> Tensor:
    walk = Logits(prompts(llm.config.vocab_size, context)[1][:64])
    while walk.step(llm.engine):
        pass
    return torch.cat(walk.found)


@torch.inference_mode()
def exact_logits(where: str, device: str, context: int) -> Tensor:
    """Logits of the weights widened to float32, by the defining operators; no cache in fewer bits."""
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    config, held, _ = load_target(where, device, kind, ReferenceOps(), load_format="dummy")
    weights = {name: weight.float() if weight.is_floating_point() else weight for name, weight in held.items()}  # type: ignore[union-attr]
    model = TextModel(config, weights, ReferenceOps())
    ids = prompts(config.vocab_size, context)[1][:64]
    kv = build_kv(config, 1, len(ids), device=device)
    return model.logits(model.forward(torch.tensor(ids, device=device), kv.view([(0, len(ids))])).hidden).float().cpu()


def by_host() -> None:
    """Exchanges through the host's memory, for ranks that NCCL does not connect."""
    start = dist.init_process_group
    team_module.dist.init_process_group = lambda backend, device_id=None, **rest: start("gloo", **rest)

    def every(self: ProcessGroup, mine: Tensor) -> Tensor:
        here = mine.cpu()
        out = here.new_empty((self.tp.world, *mine.shape))
        dist.all_gather(list(out.unbind(0)), here)
        return out.to(mine.device)

    ProcessGroup._every = every  # type: ignore[method-assign]


def rank(how: str, device: str, dry: bool, where: str) -> None:
    """One of the two, by the public way: LLM.load with the environment that torchrun sets."""
    if how == "gloo" and not dry:
        by_host()
    context = 40
    tokens = 12
    options = {
        "draft_tokens": K,
        "tree": 0,
        "device": device,
        "load_format": "dummy",
        "engine": settings(context, 4, graphs=how != "gloo"),
    }
    llm = LLM.load(f"{where}/target", drafter=f"{where}/drafter", tensor_parallel=2, say=say, **options)  # type: ignore[arg-type]  # rank 1 stays in here
    whole = LLM.load(f"{where}/target", drafter=f"{where}/drafter", say=lambda line: None, **options)  # type: ignore[arg-type]
    logits = logits_of(llm, context)
    want = logits_of(whole, context)
    exact = exact_logits(f"{where}/target", device, context)
    off = {
        name: (a - b).abs()
        for name, a, b in (("two - one", logits, want), ("one - exact", want, exact), ("two - exact", logits, exact))
    }
    say(
        "logits (exact: the same weights in float32, plain torch), rms and most: "
        + ", ".join(f"{name} {float(x.square().mean().sqrt()):.2e} {float(x.max()):.2e}" for name, x in off.items())
    )
    say(
        f"     they spread by {float(exact.std()):.3f}; two ranks have the best token of one process at {int((logits.argmax(1) == want.argmax(1)).sum())} of {len(logits)} positions"
    )
    rms = {name: float(x.square().mean().sqrt()) for name, x in off.items()}
    verdict(
        f"two ranks ({how}): as close to the exact logits as one process",
        rms["two - exact"] <= 1.25 * rms["one - exact"] + 1e-6,
    )
    began = time.perf_counter()
    plain = texts(llm, context, tokens, False, 0)
    between = time.perf_counter()
    drafted = texts(llm, context, tokens, True, K)
    copied = texts(llm, context, tokens, "ngram", K)
    cycles = llm.engine.metrics
    verdict(
        f"two ranks ({how}): plain = drafted = copied",
        plain == drafted == copied,
        f"(8 x {tokens} tokens; plain {between - began:.1f} s, drafted twice {time.perf_counter() - between:.1f} s; {cycles.accepted} drafts accepted)",
    )
    graphs = graphs_of(llm.engine)
    if graphs is not None:
        verdict(
            f"two ranks ({how}): exchanges captured",
            graphs.broken is None,
            graphs.broken or f"({len(graphs.cache.graphs)} graphs)",
        )
    began = time.perf_counter()
    llm.close()
    verdict(f"two ranks ({how}): both end", time.perf_counter() - began < 15, f"({time.perf_counter() - began:.2f} s)")


def two(size: str, how: str, dry: bool) -> bool:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    daemon = shutil.which("nvidia-cuda-mps-control") if how == "mps" else None
    if how == "mps" and daemon is None:
        say("two ranks (mps): there is no nvidia-cuda-mps-control here")
        return False
    with folder(size, 10 if dry else 6, dry) as (target, _), tempfile.TemporaryDirectory() as pipes:
        if daemon is not None:
            shared |= {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
            subprocess.run([daemon, "-d"], env=shared, timeout=20)
        words = [
            sys.executable,
            __file__,
            "--part",
            "rank",
            "--how",
            how,
            "--where",
            str(Path(target).parent),
            *(["--dry"] if dry else []),
        ]
        ranks = [subprocess.Popen(words, env=shared | {"RANK": str(r), "NCCL_HOSTID": f"rank{r}"}) for r in range(2)]
        try:
            codes = [process.wait(timeout=75) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for process in ranks:
                process.kill()
            if daemon is not None:
                subprocess.run([daemon], input=b"quit\n", env=shared, timeout=20)
    verdict(f"two ranks on one device ({how})", codes == [0, 0], f"exit codes {codes}")
    return codes == [0, 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("all", "one", "two", "rank"), default="all")
    parser.add_argument("--size", default="E2B")
    parser.add_argument("--how", choices=("nccl", "mps", "gloo"), default="nccl")
    parser.add_argument("--where", default="")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # one machine
    device = "cpu" if options.dry else "cuda"
    if options.part == "one":
        one(options.size, device, options.dry)
    elif options.part == "rank":
        rank(options.how, device, options.dry, options.where)
    elif options.part == "two":
        two("31B", options.how, options.dry)
    else:
        more = ["--dry"] if options.dry else []
        for size in ("E2B", "31B"):
            words = ["timeout", "-k", "5", "100", sys.executable, __file__, "--part", "one", "--size", size, *more]
            code = subprocess.run(words).returncode
            verdict(f"part one, {size}", code == 0, f"exit code {code}")
        worked = two("31B", "nccl", True) if options.dry else two("31B", "mps", False) or two("31B", "nccl", False)
        if options.dry or not worked:
            two("31B", "gloo", options.dry)
        say("all passed" if not FAILED else f"failed: {'; '.join(FAILED)}")
    sys.stdout.flush()
    os._exit(1 if FAILED else 0)  # threads of the collectives may abort an interpreter that is being taken down


if __name__ == "__main__":
    main()
