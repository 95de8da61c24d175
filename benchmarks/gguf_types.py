"""Memory and speed of each GGUF type on the CPU: TinyLlama-1.1B's shape with random weights, one type per file.

    python benchmarks/gguf_types.py                                 # every type, beside llama.cpp where it is installed
    python benchmarks/gguf_types.py --types Q4_0,IQ2_XXS --layers 22

Each layer's matrices have the type; the head is Q6_K in all files. A file is written, loaded, timed and deleted. The
engines take turns on the same file; a round during which other programs use over a tenth of the machine is repeated.
MB is what the layers' matrices take in memory; times are medians of one pass over one row (a plain step) and over five
rows (a cycle that checks four drafted tokens).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from tests.dummy_checkpoint import write_gguf

from cpu_kernels import LlamaCppKernels, OurKernels, Stopwatch
from outrider.engine.machine_load import NOTABLE_SHARE, OtherLoad
from outrider.models.config import Foreign, ModelConfig
from outrider.ops.gguf_blocks import BLOCKS

TINYLLAMA: Foreign = dict(
    model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
    num_key_value_heads=4, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu",
    eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip
DRAFT_ROWS = 5
PLAIN = "plain"
PEER = "llama.cpp"
DRAFT = f"{DRAFT_ROWS} rows"
MAX_TRIES = 4


def layer_bytes(ours: OurKernels) -> tuple[int, int]:
    """Bytes that the layers' matrices take in memory, and their number of weights."""
    matrices = [w for name, w in ours.weights.items() if name.startswith("layers.") and len(w.shape) == 2]
    return sum(w.nbytes for w in matrices), sum(w.shape[0] * w.shape[1] for w in matrices)


def peer_of(path: Path, ours: OurKernels) -> LlamaCppKernels | None:
    try:
        return LlamaCppKernels(str(path), ours.ops.threads, ours.ids.tolist())
    except ImportError:
        return None
    except ValueError:
        print(f"llama.cpp does not load {path.name}")
        return None


def one_round(ours: OurKernels, peer: LlamaCppKernels | None, repeat: int) -> Stopwatch:
    clock = Stopwatch()
    plain = partial(ours.one_pass, 1)
    if peer is None:
        clock.run(PLAIN, plain, repeat)
    else:
        clock.pairs(PLAIN, plain, PEER, partial(peer.one_pass, 1), repeat)
    clock.run(DRAFT, partial(ours.one_pass, DRAFT_ROWS), repeat)
    return clock


def quiet_rounds(ours: OurKernels, peer: LlamaCppKernels | None, args: argparse.Namespace) -> Stopwatch:
    """All times of so many rounds. A round beside busy programs is repeated: an engine that waits at barriers becomes
    many times slower when it loses one of two cores."""
    clock = Stopwatch()
    num_rounds = 0
    num_tries = 0
    while num_rounds < args.rounds:
        load = OtherLoad()
        turn = one_round(ours, peer, args.repeat)
        share = load.share() or 0.0
        num_tries += 1
        if share > NOTABLE_SHARE and num_tries < MAX_TRIES * args.rounds:
            continue
        if share > NOTABLE_SHARE:
            print(f"other programs use {share:.0%} of this machine")
        for name, times in turn.times.items():
            clock.times.setdefault(name, []).extend(times)
        num_rounds += 1
    return clock


def measure(path: Path, kind: str, args: argparse.Namespace) -> str:
    """One line of the table."""
    ours = OurKernels(str(path), args.threads, args.isa)
    held, weights = layer_bytes(ours)
    peer = None if args.no_peer else peer_of(path, ours)
    clock = quiet_rounds(ours, peer, args)
    size, width = BLOCKS[kind]
    plain_ms = clock.median(PLAIN)
    peer_ms = "–"
    if peer is not None:
        peer_ms = f"{clock.median(PEER):.1f}"
    cells = (
        kind, f"{8 * width / size:.2f}", f"{8 * held / weights:.2f}", f"{held / 1e6:.0f}", f"{plain_ms:.1f}", peer_ms,
        f"{clock.median(DRAFT) / plain_ms:.2f}",
    )  # fmt: skip
    for name in clock.times:
        clock.show(name)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(BLOCKS), help="comma-separated (default: all)")
    parser.add_argument("--layers", type=int, default=11, help="TinyLlama has 22")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no type after so long")
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    kinds = args.types.split(",")
    unknown = [kind for kind in kinds if kind not in BLOCKS]
    if unknown:
        parser.error(f"unknown types: {', '.join(unknown)} (known: {', '.join(BLOCKS)})")
    torch.set_num_threads(1)  # torch's own threads would spin beside ours
    config = ModelConfig.from_hf(TINYLLAMA | {"num_hidden_layers": args.layers})
    lines = ["| type | bits, file | bits, memory | MB | plain, ms | llama.cpp, ms | 5 rows, × |", "|---" * 7 + "|"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            if time.perf_counter() - began > args.seconds:
                print(f"no time left for {kind} and the types after it")
                break
            path = Path(folder, f"{kind}.gguf")
            write_gguf(path, config, kind)
            lines.append(measure(path, kind, args))
            path.unlink()
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
