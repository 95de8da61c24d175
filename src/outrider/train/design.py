"""Chooses the drafter architecture for a target, and its initial weights.

Plain style (Llama-family targets, our own model_type): layers read target layers spread over the upper part of the
depth, the width is the target's, the head is the target's embedding. Each layer starts as the layer it reads, and the
input projection is fitted so that the first one gets, as nearly as a linear map can give it, that layer's input.

Gemma style (Gemma targets): Gemma 4's own layout, three sliding layers and a full one on the last layers that own K/V,
with a separate head, initialised with the target's embedding in its principal directions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..models.config import DrafterConfig, LayerSpec, ModelConfig
from ..models.decoder import TextModel
from ..ops.reference import as_tensor
from ..types import AttnSpec, require
from .clusters import balanced_kmeans, cluster_means, cluster_of, fit_centroids, likely_together
from .config import TrainConfig
from .data import Sequences, TrainBatch
from .evaluate import Judge, Recorded
from .losses import exact_logits
from .net import DrafterModule
from .target import Layers, capture

START_ROWS = 1024  # minimum anchors that the initial weights are fitted on
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # relative to the mean square of the inputs


def spread_reads(target: ModelConfig, count: int) -> Layers:
    """`count` layers with their own K/V, evenly spaced over the upper half (or all layers if that is too few),
    including the last. No other choice matters as much, and upper layers are best (docs/training.md)."""
    owners = target.kv_layers
    has = f"the target has {len(owners)} that own K/V"
    require(count <= len(owners), f"{count} drafter layers cannot read different layers: {has}")
    upper = owners[min(len(owners) // 2 - 1, len(owners) - count) :] if len(owners) > 2 else owners
    return tuple(upper[round((i + 1) * len(upper) / count) - 1] for i in range(count))


def default_clusters(vocab: int) -> int:
    """The divisor of the vocabulary nearest to 4.2·√V (1024 of 49,152; 1187 of 151,936); 0 if none is near."""
    aim = 4.2 * vocab**0.5
    divisors = [d for d in range(8, vocab // 4 + 1) if vocab % d == 0]
    best = min(divisors, key=lambda d: abs(math.log(d / aim)), default=0)
    return best if best and aim / 8 <= best <= 8 * aim else 0


def plain(
    target: ModelConfig, reads: Layers, hidden: int | None = None, intermediate: int | None = None, taps: Layers = ()
) -> DrafterConfig:
    width = hidden or target.hidden
    owners = target.kv_layers
    inter = intermediate or max(32, width * 11 // 18 // 32 * 32)
    layers = []
    for r in reads:
        require(r in owners, f"layer {r} of the target owns no K/V to read; layers that do: {owners[0]}..{owners[-1]}")
        a = target.layers[r].attn
        spec = AttnSpec(
            a.heads,
            a.kv_heads,
            head_dim=a.head_dim,
            kv_layer=-1,
            writes=False,
            window=a.window,
            scale=a.scale,
            eps=target.norm_eps,
        )
        layers.append(LayerSpec(spec, target.layers[r].rope, inter))
    config = bare(target, "outrider_drafter", hidden=width, layers=layers)
    return replace(config, reads=reads, tied_to_target=True, taps=taps, gemma=False)


def gemma(target: ModelConfig, hidden: int, intermediate: int | None = None) -> DrafterConfig:
    """Gemma 4's layout: `gemma4_assistant` if the target is Gemma 4, else our own model_type."""
    layers = []
    for kind in ("sliding", "sliding", "sliding", "full"):
        donor = target.layers[target.donor(kind)]
        spec = replace(donor.attn, kv_layer=-1, writes=False, scale=1.0, norm_v=True)
        layers.append(LayerSpec(spec, donor.rope, intermediate or 4 * hidden))
    kind = "gemma4_unified_assistant" if "unified" in target.model_type else "gemma4_assistant"
    return bare(target, kind if target.family == "gemma4" else "outrider_drafter", hidden=hidden, layers=layers)


def bare(target: ModelConfig, kind: str, hidden: int, layers: list[LayerSpec]) -> DrafterConfig:
    """Parts common to both styles."""
    wide = target.hidden
    vocab = target.vocab_size
    return DrafterConfig(
        kind,
        wide,
        hidden=hidden,
        vocab_size=vocab,
        layers=tuple(layers),
        reads=None,
        norm_eps=target.norm_eps,
        activation=target.activation,
    )


def new_drafter(job: TrainConfig, target: ModelConfig, target_hash: str | None) -> DrafterConfig:
    """The default drafter for a target."""
    clusters = default_clusters(target.vocab_size) if job.clusters is None else job.clusters
    style = job.style
    if style == "auto":
        style = "gemma" if target.family in ("gemma3", "gemma4") else "plain"
    if style == "gemma":
        wide = job.hidden_size or min(256, target.hidden)  # the head is the target's in fewer dimensions
        advice = "give less, or style plain"
        require(wide <= target.hidden, f"hidden_size {wide} is wider than the target ({target.hidden}): {advice}")
        config = gemma(target, wide, job.intermediate_size)
    else:
        reads = job.kv_layers or spread_reads(target, min(job.layers, len(target.kv_layers)))
        config = plain(target, reads, hidden=job.hidden_size, intermediate=job.intermediate_size, taps=job.taps)
    return replace(config, clusters=clusters, cluster_top=max(1, clusters // 16), target_hash=target_hash)


# ---- where the weights start
@torch.no_grad()
def start_from_target(net: DrafterModule, model: TextModel) -> None:
    """Plain style at the target's width: layer i starts as target layer reads[i], with its strongest MLP neurons."""
    for i, layer in enumerate(net.layers):
        block = model.blocks[layer.attn.kv_layer]
        at = f"layers.{i}."
        for name in ("attn_norm", "out", "mlp_norm"):
            net.weight(at + name).copy_(as_tensor(getattr(block, name)))
        net.weight(at + "qkv").copy_(as_tensor(block.qkv)[: layer.attn.heads * layer.attn.head_dim])
        gate, up = as_tensor(block.gate_up).float().chunk(2, dim=0)  # [I, H]
        down = as_tensor(block.down).float()  # [H, I]
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        keep = strength.topk(min(layer.intermediate, gate.shape[0])).indices
        # additional neurons of a wider MLP stay random
        gate_up = net.weight(at + "gate_up")
        count = keep.numel()
        gate_up[:count] = gate[keep]
        gate_up[layer.intermediate : layer.intermediate + count] = up[keep]
        net.weight(at + "down")[:, :count] = down[:, keep]
    net.weight("norm").copy_(model.blocks[-1].next_norm)


@torch.no_grad()
def fold_biases(net: DrafterModule, model: TextModel, batches: list[TrainBatch]) -> None:
    """Qwen 2's queries have biases, larger than what they are added to; a drafter's have none. What enters a layer
    has a direction u with u · x = 1 nearly everywhere, so bias · uᵀ is added to each layer's query matrix."""
    if not model.config.qkv_bias:
        return
    reads = [layer.attn.kv_layer for layer in net.layers]
    # the residual stream that enters layer r is the one after layer r - 1
    entering = tuple(max(0, r - 1) for r in reads)
    rows: list[list[Tensor]] = [[] for _ in reads]
    for batch in batches:
        b, a = batch.where(batch.anchors[0])
        for layer_rows, stream in zip(rows, capture(model, batch.ids, entering).taps, strict=True):
            layer_rows.append(stream[b, a].float())
    for i, (layer_rows, layer) in enumerate(zip(rows, net.layers, strict=True)):
        block = model.blocks[reads[i]]
        assert block.qkv_bias is not None
        x = model.ops.rms_norm(torch.cat(layer_rows), block.attn_norm.float(), net.config.norm_eps)  # [A, H]
        constant = least_squares(x.T @ x, x.sum(0), RIDGES[1])  # u
        bias = block.qkv_bias[: layer.attn.heads * layer.attn.head_dim].float()
        net.weight(f"layers.{i}.qkv").add_(bias[:, None] * constant[None])


def least_squares(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Solves for the factor from x to y. gram = xᵀx [in, in], cross = xᵀy [in, ...]; ridge: strength of
    regularisation."""
    damp = ridge * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    return torch.linalg.solve((gram + damp).double(), cross.double()).float()


@torch.no_grad()
def fit_inputs(net: DrafterModule, model: TextModel, batches: list[TrainBatch]) -> float:
    """Fit `pre` by least squares: inputs of step 1 -> the residual stream entering target layer reads[0] at the
    token fed. The ridge is chosen on a quarter of the rows. Returns the share of their variance that is explained."""
    config = net.config
    eps = net.config.norm_eps
    layer = max(0, net.layers[0].attn.kv_layer - 1)
    width = config.backbone_hidden * (2 + len(config.taps))
    device = model.device
    gram = [torch.zeros(width, width, device=device) for _ in range(2)]  # of rows to fit, and of rows to evaluate
    cross = [torch.zeros(width, config.hidden, device=device) for _ in range(2)]
    power = [0.0, 0.0]
    for batch in batches:
        seen = capture(model, batch.ids, (*config.taps, layer))
        b, a = batch.where(batch.anchors[0])
        parts = [model.embed(batch.ids[b, a + 1]), seen.hidden[b, a], *(t[b, a] for t in seen.taps[:-1])]
        x = torch.cat([model.ops.rms_norm(part, None, eps) for part in parts], -1).float()
        y = seen.taps[-1][b, a + 1].float()
        # huge single coordinates of the residual stream (attention sinks) would dominate the fit
        y = y.clamp(-10 * y.std(), 10 * y.std())
        judged = torch.arange(len(x), device=device) % 4 == 3
        for n, rows in enumerate((~judged, judged)):
            gram[n] += x[rows].T @ x[rows]
            cross[n] += x[rows].T @ y[rows]
            power[n] += float(y[rows].pow(2).sum())

    def unexplained(solved: Tensor) -> float:
        return power[1] - 2 * float((solved * cross[1]).sum()) + float((solved * (gram[1] @ solved)).sum())

    left, ridge = min((unexplained(least_squares(gram[0], cross[0], r)), r) for r in RIDGES)
    net.weight("pre").copy_(least_squares(gram[0] + gram[1], cross[0] + cross[1], ridge).T)
    return 1.0 - left / max(power[1], 1e-9)


@torch.no_grad()
def start_gemma(net: DrafterModule, model: TextModel, batch: TrainBatch) -> None:
    """Gemma style. The head: the target's rows in the principal directions of their spread, widest first. Projections
    at the scale of what they read and write (Gemma's hidden states are large), q norms as in the donor layers."""
    config = net.config
    table = as_tensor(model.head).float()  # [V, Hb]
    _, vectors = torch.linalg.eigh(table.T @ table)
    rows = table @ vectors[:, -config.hidden :].flip(-1)  # [V, h]
    net.weight("embed").copy_(rows * (config.hidden**-0.5 / rows.std()))
    seen = capture(model, batch.ids)
    parts = (model.embed(batch.ids.reshape(-1)), seen.hidden.flatten(0, 1)[batch.teacher])
    sizes = [float(x.float().pow(2).mean().sqrt()) for x in parts]
    for n, size in enumerate(sizes):
        net.weight("pre")[:, n * config.backbone_hidden : (n + 1) * config.backbone_hidden] /= size
    net.weight("post").mul_(sizes[1])
    for i, layer in enumerate(net.layers):
        donor = model.config.layers[layer.attn.kv_layer].attn
        norm = model.blocks[layer.attn.kv_layer].q_norm
        if norm is not None:
            net.weight(f"layers.{i}.q_norm").copy_(norm * donor.scale)


@torch.no_grad()
def start_clusters(net: DrafterModule, model: TextModel, seed: int = 0) -> None:
    """Initialises token_ordering by balanced k-means of the head's rows, and centroids as the clusters' means."""
    rows = as_tensor(model.head) if net.config.tied_to_target else net.weight("embed")
    order, means = balanced_kmeans(rows, net.config.clusters, seed=seed)
    net.weight("token_ordering").copy_(order)
    net.weight("centroids").copy_(means)


@torch.no_grad()
def cluster_by_use(net: DrafterModule, model: TextModel, data: Sequences) -> int:
    """Clusters tokens that are likely in the same places, in the first four draft steps on `data`, and fits centroids
    to tokens drawn from the full head's distribution. Returns the number of states used."""
    judge = Judge(model, net)
    clusters = net.config.clusters
    seen = Recorded()
    judge.drafts(data, 4, record=seen)
    g = torch.cat([states for states, _ in seen])
    head = judge.head
    drawn = []
    for part in g.split(1024):
        z = exact_logits(model, part) if net.config.tied_to_target else (part @ head.T).float()
        drawn.append((z - torch.empty_like(z).exponential_().clamp_min_(1e-20).log_()).argmax(-1))
    order = likely_together(g[:: max(1, g.shape[0] // 300_000)], head, clusters)
    label = cluster_of(order, clusters)[torch.cat(drawn)]
    fitted = fit_centroids(g, label, centroids=cluster_means(head, order, clusters), steps=300, lr=1e-2, batch=16384)
    net.weight("token_ordering").copy_(order)
    net.weight("centroids").copy_(fitted)
    return int(g.shape[0])
