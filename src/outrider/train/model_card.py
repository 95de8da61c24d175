"""The model card of a trained drafter, README.md: architecture, results on held-out answers, training, limitations."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig
from .export import Json

TEMPLATE = resources.files("outrider") / "assets" / "model_card.md"
COLUMNS = (1, 2, 3, 4, 6, 8)
VIEWS = {"clustered": "greedy, clustered head", "full": "greedy, full head", "sampled": "sampled, coupled"}


def model_card(config: DrafterConfig | BlockConfig, result: Json, runs: Sequence[Json]) -> str:
    """`result` of finish.finish; `runs`: the provenance of every run that made it, the last one last."""
    target, commands = runs[-1]["target"], "\n".join(dict.fromkeys(str(run["command"]) for run in runs))
    measured = any(view in result for view in VIEWS)
    phases = "\n".join(f"{number}. {trained(run)}" for number, run in enumerate(runs, 1))
    shown = figures(result) if measured else "Not measured: the run was stopped before its evaluation."
    return TEMPLATE.read_text(encoding="utf-8").format(
        target=target,
        description=describe(config),
        hash=runs[-1]["target_hash"],
        figures=shown,
        phases=phases,
        commands=commands,
    )


def trained(run: Json) -> str:
    start = f" It went on from {run['started_from']}." if run.get("started_from") else ""
    answers = f"{run['sequences']} answers of the target ({run['answer_tokens']} tokens"
    kinds = f"{run['greedy_share']:.0%} of them greedy, the others at T = {run['temperature']:g}"
    spent = f"{run['made'][:10]}, {run['device']}, {run['seconds']:.0f} s of training: {run['steps']} steps"
    return f"{spent} over {answers}, {kinds}) to the prompts of {run['data']}.{start}"


def describe(config: DrafterConfig | BlockConfig) -> str:
    some = config.layers[0]
    if isinstance(config, BlockConfig):
        block = f"; {config.max_tokens} tokens in one pass, mask token {config.mask_id}" if config.mask_id >= 0 else ""
        name, taps = "DFlash" if config.kind == "dflash" else "EAGLE-3", ", ".join(map(str, config.taps or ()))
        return (
            f"{name} in the speculators layout: {len(config.layers)} layers ({some.attn.heads} heads of "
            f"{some.attn.head_dim}, MLP {some.intermediate}, hidden {config.hidden}) over the target's hidden states "
            f"after layers {taps}{block}; the target's own embedding and head. `outrider export` writes it in vLLM's "
            f"layout."
        )
    read, tapped = (", ".join(map(str, layers)) for layers in (config.reads or (), config.taps))
    reads = f" that read the K/V cache of the target's layers {read}" if read else ""
    taps = f", fed the target's hidden states after layers {tapped} too" if tapped else ""
    own = f"a head of its own ({config.vocab_size} tokens)"
    head = "head tied to the target's embedding" if config.tied_to_target else own
    if config.clusters:
        head += f", in {config.clusters} clusters of which {config.cluster_top} are scored a step"
    bits = f" Its layers were trained as {config.weight_bits} bits hold them." if config.weight_bits else ""
    size = f"{some.attn.heads} heads of {some.attn.head_dim}, MLP {some.intermediate}, hidden {config.hidden}"
    return f"{len(config.layers)} query-only layers ({size}){reads}{taps}; {head}.{bits}"


def figures(result: Json) -> str:
    lines = ["Tokens per cycle on held-out prompts, walked exactly:", ""]
    lines.append("| | " + " | ".join(f"K = {k}" for k in COLUMNS) + " | first position |")
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for view, title in VIEWS.items():
        if view in result:
            found = {int(k): v for k, v in result[view]["tokens_per_cycle"].items()}
            cells = " | ".join(f"{found[k]:.3f}" if k in found else "" for k in COLUMNS)
            lines.append(f"| {title} | {cells} | {result[view]['acceptance_by_position'][0]:.3f} |")
    if counted := result.get("clustered", result.get("full")):
        share = f"A draft {result.get('draft_unit', 'step')} reads {result['draft_step_share']:.2%} of a target step."
        lines += ["", f"{counted['answers']} greedy answers, {counted['tokens']} tokens. {share}"]
    return "\n".join(lines)
