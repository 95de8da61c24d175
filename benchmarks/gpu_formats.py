"""Every stored format end to end on a GPU: logits against the float32 definition, rows alone and in company, plain
against drafted.

    python benchmarks/gpu_formats.py [--only ct-int4-g32 Q4_K] [--models E2B Llama] [--jobs 16] [--limit 150]
    TRITON_INTERPRET=1 python benchmarks/gpu_formats.py --dry --jobs 1 --only awq Q4_0      # the script itself, small,
    without a GPU

A model of two layers with the widths of Gemma 4 E2B (a sliding and a full layer) and one of Llama's kind, 2,048 wide,
is written to disk in each format and loaded as any checkpoint is. One line a model and format:

- products: the largest relative error of a product with a stored matrix against its values in float32; 1e-2 is allowed.
- logits: the same of 200 logits of a prompt against the model in float32 of the values that the checkpoint means, and
in brackets of the
  same values in bfloat16 by the dense kernels: what bfloat16 itself costs.
- rows: every row of a product has the same bits among 1, 2, 5, 9, 17, 40, 64, 200 and 2,048 rows; cut: hidden states of
a prompt are the
  same bits in one pass and in two; drafted: tokens and logits with K drafted tokens, a quarter of them wrong, are the
  plain ones' bits.

Compiling is nearly all of the time: formats that share kernels share a process, and processes run side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from safetensors.torch import save_file
from tests import quantised
from tests.dummy_checkpoint import write_gguf
from torch import Tensor

from gpu_rig import Rig, collect, plain_run, speculative_run
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import Foreign, ForeignDict, ModelConfig
from outrider.models.names import tensor_plan
from outrider.ops.formats import MODES, DeviceWeight, Packed, base
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps
from outrider.weights.files import from_folder, from_gguf
from outrider.weights.load import load

ROWS = (1, 2, 5, 9, 17, 40, 64, 200, 2048)
KS = (1, 4, 8, 16)
BATCHES = (1, 8)
CONTEXT = 48
STEPS = 20
PROMPT = 200
WRONG = 3
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M")
ROUNDED = tuple(f"--quantize {mode}" for mode in MODES)
FAMILIES = (  # formats that share kernels; those that take longest to compile first
    ("bf16",), ("Q4_K", "Q4_1"), ("Q5_K", "Q5_1"), ("Q6_K", "Q4_K_M"), ("Q5_0",), ("ct-nvfp4", "modelopt-nvfp4"),
    ("awq", "gptq-int4", "gptq-int4-actorder"), ("ct-int4-g64-asym",), ("gptq-int4-g128",),
    ("ct-int4-g32", "ct-int4-actorder", "--quantize int4"), ("Q4_0",), ("ct-int4-g128",), ("ct-int4-channel",),
    ("Q8_0",), ("ct-int8-g32",), ("gptq-int8",), ("ct-int8-channel-asym",), ("ct-int8-channel", "ct-mixed"),
    ("--quantize int8",),
    ("ct-fp8-tensor", "ct-fp8-channel", "--quantize fp8"), ("ct-fp8-block128",),
)  # fmt: skip


def llama(hidden: int, inner: int, heads: int, kv: int, vocab: int) -> ForeignDict:
    return dict(
        model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=hidden // heads, vocab_size=vocab, rms_norm_eps=1e-5, rope_theta=5e5,
        hidden_act="silu",
        max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip


def gemma(vocab: int, **sizes: int) -> ForeignDict:
    raw = dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it"])
    kinds = ["sliding_attention", "full_attention"]
    text = dict(raw["text_config"]) | dict(num_hidden_layers=2, layer_types=kinds, num_kv_shared_layers=0)
    return raw | {"text_config": text | dict(vocab_size=vocab, vocab_size_per_layer_input=vocab) | sizes}


@dataclass(frozen=True)
class Scale:
    """How large it all is."""

    device: str
    dtype: torch.dtype
    models: dict[str, Foreign]
    rows: tuple[int, ...] = ROWS
    ks: tuple[int, ...] = KS
    batches: tuple[int, ...] = BATCHES
    steps: int = STEPS
    prompt: int = PROMPT


def scale_of(dry: bool) -> Scale:
    if not dry:
        return Scale("cuda", torch.bfloat16, {"E2B": gemma(4096), "Llama": llama(2048, 6144, 32, 8, 4096)})
    small = {
        "E2B": gemma(
            320, hidden_size=256, intermediate_size=256, head_dim=64, global_head_dim=64, num_attention_heads=2,
            hidden_size_per_layer_input=128,
        ),
        "Llama": llama(256, 256, 4, 2, 320),
    }  # fmt: skip
    return Scale("cpu", torch.float32, small, (1, 2, 17), (1, 4), (1, 2), 6, 24)


# ---- checkpoints
def dense_state(config: ModelConfig, scale: Scale) -> dict[str, Tensor]:
    """Random tensors by their Hugging Face names, on the device."""
    rng = torch.Generator(device=scale.device).manual_seed(5)
    state = {}
    for plan in tensor_plan(config).values():
        for name, shape in zip(plan.sources, plan.source_shapes, strict=True):
            middle, spread = {"norm": (1.0, 0.05), "vector": (1.0, 0.0)}.get(plan.role, (0.0, 0.02))
            values = torch.empty(shape, device=scale.device).normal_(middle, 1.0, generator=rng)
            state[name] = (middle + (values - middle) * spread).to(torch.bfloat16)
    return state


def write_folder(folder: Path, raw: Foreign, state: dict[str, Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


def fused(config: ModelConfig, meant: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names, in float32."""
    return {
        n: torch.cat([meant[s].float() for s in plan.sources]).view(plan.shape)
        for n, plan in tensor_plan(config).items()
    }


def made(
    raw: Foreign, name: str, folder: Path, scale: Scale, ops: TritonOps
) -> tuple[dict[str, DeviceWeight], dict[str, Tensor]]:
    """A checkpoint in this format as the ops hold it, and the values it means in float32, both on the device."""
    config = ModelConfig.from_hf(raw)
    device = scale.device
    if name in GGUF:
        path = folder / f"{name}.gguf"
        write_gguf(path, config, name.lower())
        files = from_gguf(path, name)
        _, plain = load(files, config, device, torch.float32, ReferenceOps())
        meant = {n: w for n, w in plain.items() if isinstance(w, Tensor)}
        return load(files, config, device, scale.dtype, ops)[1], meant
    state = dense_state(config, scale)
    settings = None
    mode = None
    if name in quantised.SCHEMES:
        state, values = quantised.convert(state, name)
        settings = quantised.SCHEMES[name][1]
        meant = fused(config, values)
    else:
        meant = fused(config, state)
        mode = name.removeprefix("--quantize ") if name in ROUNDED else None
    write_folder(
        folder / name.replace(" ", ""), dict(raw) | ({"quantization_config": settings} if settings else {}), state
    )
    loaded = load(from_folder(folder / name.replace(" ", ""), name), config, device, scale.dtype, ops, quantize=mode)[1]
    if mode is not None:
        meant |= {n: MODES[mode][0].quantise(meant[n]).dense() for n, w in loaded.items() if not isinstance(w, Tensor)}
    return loaded, meant


def soften(weights: dict[str, DeviceWeight] | dict[str, Tensor]) -> None:
    """Gemma 4 does not divide its scores by anything: with norms near one a softmax would magnify every rounding."""
    for name, weight in weights.items():
        if name.endswith(("q_norm", "k_norm")) and isinstance(weight, Tensor):
            weight.mul_(0.3)


# ---- checks
def off(got: Tensor, want: Tensor) -> float:
    """Relative; nan and infinity stay what they are."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def products(
    ops: TritonOps, held: dict[str, DeviceWeight], meant: dict[str, Tensor], scale: Scale
) -> tuple[float, list[str]]:
    """The largest error, and which (matrix, number of rows) had other bits. One matrix of each name and shape."""
    worst = 0.0
    other = []
    done = set()
    for name, weight in held.items():
        part = name.rpartition(".")[2]
        if isinstance(weight, Tensor) or (part, weight.shape) in done:
            continue
        done.add((part, weight.shape))
        rng = torch.Generator(device=scale.device).manual_seed(weight.shape[1])
        x = torch.randn((scale.rows[-1], weight.shape[1]), device=scale.device, generator=rng).to(scale.dtype)

        def call(x: Tensor, part: str = part, weight: Packed = weight) -> Tensor:
            return ops.gated_linear(x, weight, "silu") if part == "gate_up" else ops.linear(x, weight)

        together = call(x)
        few = x[:PROMPT]
        want = few.float() @ meant[name].T
        if part == "gate_up":
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        worst = max(worst, off(together[:PROMPT], want))
        other += [f"{name} {count}" for count in scale.rows if not torch.equal(call(x[:count]), together[:count])]
    return worst, other


def logits(rig: Rig, ids: Tensor, cut: int) -> tuple[Tensor, bool]:
    """[n, V] of a prompt in one pass, and whether two passes give the same bits."""
    seq, again = rig.open(2, 0, len(ids) + 8)
    hidden = rig.prefill(seq, ids)
    parts = torch.cat((rig.prefill(again, ids[:cut]), rig.prefill(again, ids[cut:], cut)))
    out = rig.model.logits(hidden)
    same = torch.equal(parts, hidden)
    rig.close([seq, again])
    return out, same


def drafted(rig: Rig, scale: Scale) -> dict[str, bool]:
    """By K and batch."""
    seqs = rig.open(max(scale.batches), CONTEXT, STEPS + 100)
    rates = {}
    alone = None
    for batch in scale.batches:
        tokens, scores = plain_run(rig, seqs[:batch], CONTEXT, scale.steps)
        alone = scores[:1] if alone is None else alone
        rates[f"plain x{batch}"] = torch.equal(alone, scores[:1])
        for k in scale.ks:
            result = speculative_run(rig, seqs[:batch], CONTEXT, k, tokens, scores)
            rates[f"K={k} x{batch}"] = result.equal_tokens and result.equal_logits
    rig.close(seqs)
    return rates


@torch.inference_mode()
def family(names: list[str], models: list[str], dry: bool) -> bool:
    """All of one process: first every product, which compiles what nobody else does, then whole models. Whether all was
    right."""
    scale = scale_of(dry)
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    ops = TritonOps(scale.device) if not dry else TritonOps("cpu", pdl=False)
    if dry:
        base.SMALL = 1 << 16  # its matrices are all so small that a GPU would keep them dense
    loaded = {}
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            for name in names:
                folder = Path(root) / model
                folder.mkdir(exist_ok=True)
                held, meant = made(scale.models[model], name, folder, scale, ops)
                loaded[model, name] = held, meant, products(ops, held, meant, scale)
        rows = [whole(model, name, scale, ops, *rest, began) for (model, name), rest in loaded.items()]
    return all(rows)


def whole(
    model: str, name: str, scale: Scale, ops: TritonOps, held: dict[str, DeviceWeight], meant: dict[str, Tensor],
    multiplied: tuple[float, list[str]], began: float,
) -> bool:  # fmt: skip
    """The line of one model in one format."""
    worst, other = multiplied
    raw = scale.models[model]
    soften(held)
    soften(meant)
    room = dict(slots=max(scale.batches), context=512)
    ids = torch.randint(5, 300, (scale.prompt,), generator=torch.Generator().manual_seed(3)).to(scale.device)
    want, _ = logits(Rig(raw, None, ReferenceOps(), scale.device, torch.float32, weights=dict(meant), **room), ids, 9)
    small = {n: w.to(scale.dtype) if w.dim() > 1 else w for n, w in meant.items()}
    control, _ = logits(Rig(raw, None, ops, scale.device, scale.dtype, weights=dict(small), **room), ids, 9)
    rig = Rig(raw, None, ops, scale.device, scale.dtype, weights=held, **room)  # type: ignore[arg-type]
    got, cut = logits(rig, ids, 3 * scale.prompt // 8)
    same = drafted(rig, scale)
    packed = [w for w in held.values() if not isinstance(w, Tensor)]
    wrong = [*other, *(k for k, ok in same.items() if not ok), *([] if cut else ["cut"])]
    error = off(got, want)
    dense = off(control, want)
    ok = not wrong and worst <= 1e-2 and error <= max(1e-2, 1.25 * dense) and (bool(packed) or name == "bf16")
    count = sum(plan.role == "matrix" for plan in tensor_plan(rig.config).values())
    row = dict(
        model=model, format=name, ok=ok, matrices=f"{len(packed)} of {count}",
        products=round(worst, 5), logits=round(error, 5), bf16=round(dense, 5), rows="same" if not other else other[:6],
        cut="same" if cut else "OTHER", drafted="same" if all(same.values()) else [k for k, v in same.items() if not v],
        s=round(time.perf_counter() - began, 1),
    )  # fmt: skip
    print(json.dumps(row), flush=True)
    rig.free()
    collect()
    return ok


# ---- processes
def run(names: list[str], args: argparse.Namespace, deadline: float) -> str | None:
    """A family in a process of its own, which prints its lines; what went wrong with it, or None."""
    command = [
        sys.executable,
        __file__,
        "--family",
        "--only",
        *(n.replace("--", "") for n in names),
        "--models",
        *args.models,
    ]
    process = subprocess.Popen([*command, *(["--dry"] if args.dry else [])], stderr=subprocess.PIPE, text=True)
    try:
        _, err = process.communicate(timeout=max(1.0, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{', '.join(names)}: stopped, no time left"
    if process.returncode == WRONG:
        return f"{', '.join(names)}: not right, see above"
    return f"{', '.join(names)}: " + " | ".join(err.strip().splitlines()[-6:])[-700:] if process.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--models", nargs="+", default=["E2B", "Llama"])
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--limit", type=float, default=150, help="seconds")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--family", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    only = [f"--{n}" if n.startswith("quantize") else n for n in args.only]
    if args.family:
        sys.exit(0 if family(only, args.models, args.dry) else WRONG)
    began = time.perf_counter()
    chosen = [[n for n in names if not only or n in only] for names in FAMILIES]
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [
            f for f in pool.map(lambda names: run(names, args, began + args.limit), [c for c in chosen if c]) if f
        ]
    print(
        f"{time.perf_counter() - began:.0f} s;",
        "everything is right" if not failed else "\n".join(["FAILED", *failed]),
        flush=True,
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
