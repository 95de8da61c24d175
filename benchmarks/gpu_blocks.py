"""Block drafters on a GPU with dummy weights: kernels against torch, bits of drafted and plain decoding, cycles.

    PYTHONPATH=src python3 benchmarks/gpu_blocks.py [--sections kernels bits cycles] [--sizes 31B E4B 12B] [--dry]

cycles: a plain step, cycles with the size's MTP drafter and with a block drafter of a published shape (its weights as
they are and rounded), and its draft pass alone, at 1k. --dry: on a CPU with tiny models, to try the script itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from gpu_common import RESULTS, attempt, error, finish, say, verdict
from gpu_rig import Rig, compared, plain_run, speculative_run
from outrider.models.block import BlockNet
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.ops.reference import ReferenceOps
from outrider.spec.block import BlockDrafter

QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 262144, "num_hidden_layers": 5, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 2048, "use_sliding_window": True,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "architectures": ["DFlashDraftModel"],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "31B": {  # z-lab's DFlash; its MLP as wide as the target's
        **QWEN, "hidden_size": 5376, "num_attention_heads": 64, "intermediate_size": 21504,
        "dflash_config": {
            "mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57], "block_size": 16,
            "final_logit_softcapping": 30.0,
        },
    },
    "E4B": {  # NVIDIA's DFlash for Nemotron 3.5 Bolt has five layers; the rest is assumed
        **QWEN, "hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 10, 20, 30, 39], "block_size": 16},
    },
    "12B": {  # deepseek-ai's DSpark
        **BUILTIN_CONFIGS["google/gemma-4-12B-it"]["text_config"], "num_hidden_layers": 5,
        "architectures": ["Gemma4DSparkModel"], "target_layer_ids": [5, 17, 29, 41, 46], "mask_token_id": 4,
        "block_size": 7, "markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip
EAGLE = {
    **QWEN, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
    "hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 10240, "layer_types": ["full_attention"],
    "draft_vocab_size": 32768, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 10, 20]},
}  # fmt: skip


def shape(size: str, layers: int | None, dry: bool) -> dict[str, Any]:
    """The drafter's configuration; for a target with fewer layers its taps are the last ones."""
    if dry:
        from tests.block_drafters import LAYOUTS

        return LAYOUTS["gemma-dspark" if size == "12B" else "eagle3" if size == "eagle3" else "z-lab"]
    raw = EAGLE if size == "eagle3" else SHAPES[size]
    if layers is None:
        return raw
    key = "eagle_config" if size == "eagle3" else "dflash_config" if "dflash_config" in raw else None
    name = "eagle_aux_hidden_state_layer_ids" if size == "eagle3" else "target_layer_ids"
    inner = dict(raw[key] if key else raw)
    inner[name] = list(range(layers - len(inner[name]), layers))
    return {**raw, key: inner} if key else inner


def rig_of(size: str, layers: int | None, slots: int, dry: bool) -> Rig:
    if not dry:
        return Rig.of(size, layers, slots=slots, context=2048, compiled=True)
    from tests.engines import VARIANTS, assistant  # tiny shapes

    raw = VARIANTS["dense"]
    return Rig(raw, assistant(raw, False), ReferenceOps(), "cpu", torch.float32, slots=slots, context=512)


def kernels(size: str, layers: int, dry: bool) -> None:
    """Compares the head's inputs of a block, by the backend and by plain torch, with float32."""
    with rig_of("E4B" if size == "eagle3" else size, layers, 4, dry) as rig:
        rig.take_block(shape(size, layers, dry), None, 4, 512 if dry else 2048)
        drafter = rig.drafter
        assert isinstance(drafter, BlockDrafter)
        net = drafter.block
        other = BlockNet(net.config, net.weights, ReferenceOps(), rig.model)
        wide = {
            n: w.float() if w.is_floating_point() else w for n, w in net.weights.items() if isinstance(w, torch.Tensor)
        }
        exact = BlockNet(net.config, wide, ReferenceOps(), rig.model)
        exact.embed = lambda ids: net.embed(ids).float()  # type: ignore[method-assign]
        seqs = rig.open(3, 90 if dry else 1000, 64)
        slots = torch.tensor([s.slot for s in seqs], device=rig.device)
        end = torch.tensor([90, 40, 7] if dry else [1000, 300, 7], device=rig.device)
        each = torch.arange(3, device=rig.device)
        start = torch.arange(4, dtype=torch.int32, device=rig.device)
        kv = rig.store.view(slots, end - 1, each, start, 1, 128 if dry else 1100)
        g = torch.Generator(device=rig.device).manual_seed(3)
        streams = [
            torch.randn((3, rig.config.hidden), device=rig.device, generator=g).to(rig.model.dtype)
            for _ in drafter.taps
        ]
        saved = [t.clone() for spec in drafter.kv_specs for t in (kv.keys[spec.kv_layer], kv.values[spec.kv_layer])]
        rows = []
        for each_net in (net, other, exact):
            streams = [s.float() for s in streams] if each_net is exact else streams
            each_net.write_context(streams, kv, end % 8)
            if net.config.kind == "eagle3":
                block_rows = each_net.rows(net.layers[0], streams[0], end, 2)
                feature = each_net.context(streams)
                h, feature = each_net.feature_step(end % 8, feature, kv, block_rows, 0)
                h, _ = each_net.feature_step(end % 7, feature, kv, block_rows, 1)
            else:
                ids = torch.full((3, net.config.block), net.config.mask_id, device=rig.device)
                h = each_net.backbone(ids, kv, end)
            written = [t.clone() for s in drafter.kv_specs for t in (kv.keys[s.kv_layer], kv.values[s.kv_layer])]
            rows.append((h, written))
            for spec, k, v in zip(drafter.kv_specs, saved[::2], saved[1::2]):
                kv.keys[spec.kv_layer].copy_(k)
                kv.values[spec.kv_layer].copy_(v)
        far, torchs = (error(h, rows[2][0]) for h, _ in rows[:2])
        apart = max(error(a, b) for a, b in zip(rows[0][1], rows[1][1]))
        note = f"hidden {far:.1e} from float32, torch's {torchs:.1e}; context K/V {apart:.1e}"
        verdict(f"{size}: block = torch", far <= 1.5 * torchs + 1e-6 and apart < 1e-2, note)


def bits(size: str, layers: int, dry: bool) -> None:
    """Plain decoding without the drafter against cycles with it: drafts of an oracle that is often right, so that its
    context is written over and over, then its own."""
    with rig_of("E4B" if size == "eagle3" else size, layers, 64, dry) as rig:
        context, steps = (100, 12) if dry else (1000, 40)
        raw = shape(size, layers, dry)
        k = 3 if dry else 7
        mtp = rig.drafter
        for batch in (1, 2) if dry else (1, 8, 64):
            rig.drafter = mtp
            rig.resize(batch, 512 if dry else 1200)
            seqs = rig.open(batch, context, 160)
            tokens, logits = plain_run(rig, seqs, context, steps)
            rig.close(seqs)
            rig.take_block(raw, None, batch, 512 if dry else 1200)
            seqs = rig.open(batch, context, 160)
            known = speculative_run(rig, seqs, context, k, tokens, logits)
            run = rig.graph(seqs, k, context, context + steps + 64, advance=True)
            offset = torch.arange(k + 1, device=rig.device).expand(batch, k + 1)
            results = [known, compared(run, context, tokens, logits, offset)]
            nodes = min(15, rig.drafter.max_nodes(k)) if rig.drafter else 0
            if nodes:
                run = rig.graph(seqs, k, context, context + steps + 64, advance=True, nodes=nodes)
                results.append(compared(run, context, tokens, logits, run.rows))
            rig.close(seqs)
            ok = all(e.equal_tokens and (e.equal_logits or dry) for e in results) and known.accepted > 1.0
            note = f"drafts taken per cycle: oracle, its own{', trees' if nodes else ''}: "
            note += ", ".join(f"{e.accepted:.2f}" for e in results)
            verdict(f"{size}, {layers} layers, K = {k}, batch {batch}: plain = drafted, bits", ok, note)


def cycles(size: str, batches: list[int], formats: list[str], dry: bool) -> None:
    """Median milliseconds of one graph."""
    context, most = (100, 512) if dry else (1024, 1280)
    with rig_of(size, None, max(batches), dry) as rig:
        rig.resize(max(batches), most)
        raw = shape(size, None, dry)
        row = dict[str, float]()
        ks = (3,) if dry else (7,) if size == "12B" else (7, 15)

        def of(seqs: list[Any], k: int, **how: Any) -> float:
            return rig.graph(seqs, k, context, context + 192, **how).time(3 if dry else 15)

        for batch in batches:
            seqs = rig.open(batch, context, 128)
            row[f"plain {batch}"] = of(seqs, 0)
            row |= {f"MTP {k} {batch}": of(seqs, k) for k in (4, 7)}
            rig.close(seqs)
        for quantize in (None,) if dry else (None, *formats):
            rig.take_block(raw, quantize, max(batches), most)
            name = f"{rig.drafter.name if rig.drafter else ''} {quantize or 'bf16'}"
            for batch in batches:
                seqs = rig.open(batch, context, 128)
                row[f"{name} 0 {batch}"] = of(seqs, 0)
                for k in ks:
                    row[f"{name} {k} {batch}"] = of(seqs, k)
                    row[f"{name} {k} {batch} draft"] = of(seqs, k, part="draft")
                rig.close(seqs)
        RESULTS[f"cycles {size}"] = row
        for batch in batches:
            base = row[f"plain {batch}"]
            say(f"  {size}, {batch} sequences, plain {base:.3f} ms; cycle / plain (draft / plain):")
            for name, ms in row.items():
                if name.endswith(f" {batch}") and not name.startswith("plain"):
                    draft = row.get(f"{name} draft")
                    say(f"    {name.rsplit(' ', 1)[0]}: {ms / base:.3f}" + (f" ({draft / base:.3f})" if draft else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["kernels", "bits", "cycles"])
    parser.add_argument("--sizes", nargs="+", default=["31B", "E4B", "12B"], choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--formats", nargs="*", default=["fp8", "int4"], help="what the drafter is rounded to")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_blocks"))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, job in (("kernels", kernels), ("bits", bits)):
        for size in [*args.sizes, "eagle3"] if name in args.sections else ():
            attempt(f"{name} {size}", job, size, 8 if size in ("E4B", "eagle3") else 6, args.dry)
    for size in args.sizes if "cycles" in args.sections else ():
        attempt(f"cycles {size}", cycles, size, args.batches, args.formats, args.dry)
    finish(args.out / "blocks.json")


if __name__ == "__main__":
    main()
