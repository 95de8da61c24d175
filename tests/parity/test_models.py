"""Our models against transformers' on tiny random checkpoints, through files and our loader, in float32.

Two sequences of different length run in one batch: a prompt, then token by token, then five at once, past the window.
transformers sees each whole sequence in one pass, so a fault in the cache, the masks, the positions or the batching
shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests import tiny
from tests.kv import PagedKV, build_kv
from torch import Tensor
from transformers import DynamicCache

from outrider.models.config import DrafterConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.reference import ReferenceOps
from outrider.weights.load import load_drafter, load_target

LENGTHS = (31, 21)
PROMPTS = (13, 7)  # the first passes the window of 8 already in its prompt
STEPS = ((1, 1), (1, 1), (1, 1), (5, 5), (5, 1), (1, 5), (4, 0))
TAPS = (0, 2)


def tolerance(name: str) -> float:
    return 5e-4 if name == "gemma4_moe" else 1e-4


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and a.isfinite().all()
    return (a - b).abs().max().item()


@dataclass
class Run:
    """Runs two sequences through both implementations."""

    model: TextModel
    kv: PagedKV
    ids: list[Tensor]
    hidden: list[Tensor]  # ours, by sequence [T, H]
    logits: list[Tensor]
    tapped: list[list[Tensor]]  # ours, by sequence and tap
    theirs: list[Any]  # transformers' outputs, by sequence


@cache
def run(name: str) -> Run:
    reference = tiny.target(name)
    with TemporaryDirectory() as folder:
        config, weights, _ = load_target(tiny.write(reference, Path(folder)))
    model = TextModel(config, weights, ReferenceOps())
    rng = torch.Generator().manual_seed(7)
    ids = [torch.randint(6, 262, (n,), generator=rng) for n in LENGTHS]
    kv = build_kv(config, batch=2, max_len=max(LENGTHS))
    hidden: list[list[Tensor]] = [[], []]
    tapped: list[list[list[Tensor]]] = [[[] for _ in TAPS] for _ in ids]
    at = [0, 0]
    for counts in (PROMPTS, *STEPS):
        rows = torch.cat([ids[b][at[b] : at[b] + n] for b, n in enumerate(counts)])
        out = model.forward(rows, kv.view([(at[b], n) for b, n in enumerate(counts)]), taps=TAPS)
        for b, part in enumerate(out.hidden.split(list(counts))):
            hidden[b].append(part)
            for k, stream in enumerate(out.streams):
                tapped[b][k].append(stream.split(list(counts))[b])
            at[b] += counts[b]
    assert tuple(at) == LENGTHS
    joined = [torch.cat(parts) for parts in hidden]
    with torch.no_grad():
        theirs = [
            reference(x[None], past_key_values=DynamicCache(), use_cache=True, output_hidden_states=True) for x in ids
        ]
    return Run(
        model,
        kv,
        ids,
        joined,
        [model.logits(h) for h in joined],
        [[torch.cat(k) for k in seq] for seq in tapped],
        theirs,
    )


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_logits_and_hidden_states(name: str) -> None:
    this = run(name)
    for b in range(2):
        assert this.logits[b].dtype == torch.float32
        assert worst(this.logits[b], this.theirs[b].logits[0]) <= tolerance(name)
        assert worst(this.hidden[b], this.theirs[b].hidden_states[-1][0]) <= tolerance(name)
        for tap, stream in zip(TAPS, this.tapped[b], strict=True):
            if tap + 1 < len(this.model.config.layers):  # transformers replaces the last stream by the normed one
                assert worst(stream, this.theirs[b].hidden_states[tap + 1][0]) <= tolerance(name)


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_keys_and_values(name: str) -> None:
    this = run(name)
    config = this.model.config
    for b in range(2):
        layers = this.theirs[b].past_key_values.layers
        assert len(layers) == len(config.kv_layers)
        for i in config.kv_layers:
            k, v = this.kv.read(i, config.layers[i].kind, b, LENGTHS[b])
            assert worst(k, layers[i].keys[0]) <= tolerance(name)
            assert worst(v, layers[i].values[0]) <= tolerance(name)


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_a_pass_does_not_depend_on_its_taps(name: str) -> None:
    this = run(name)
    kv = build_kv(this.model.config, batch=1, max_len=LENGTHS[0])
    whole = this.model.forward(this.ids[0], kv.view([(0, LENGTHS[0])])).hidden
    assert isinstance(whole, Tensor)
    assert worst(whole, this.hidden[0]) <= tolerance(name)


def whole_logits(drafter: MTPNet, g: Tensor) -> Tensor:
    """Float32 [B, V]; -inf where the clustered head did not look."""
    ids, z = drafter.candidates(g)
    return z if ids is None else torch.full((len(g), drafter.config.vocab_size), float("-inf")).scatter_(1, ids, z)


@pytest.mark.parametrize("offset", [2, 1])
@pytest.mark.parametrize("clustered", [False, True], ids=["full", "clustered"])
@pytest.mark.parametrize("name", tiny.GEMMA4S)
def test_four_chained_drafter_steps(name: str, clustered: bool, offset: int, tmp_path: Path) -> None:
    """The K/V of the newest tokens is hidden from the drafter: sequence b has L tokens, L - 2 is the last visible
    key."""
    this = run(name)
    reference = tiny.assistant(name, clustered)
    read, weights = load_drafter(tiny.write(reference, tmp_path, tokenizer=False))
    assert read.position_offset == 2
    config: DrafterConfig = replace(read, position_offset=offset)
    drafter = MTPNet(config, weights, ReferenceOps(), this.model)
    lengths = [29, 6]  # beyond the window and within it
    seen = [n - 2 for n in lengths]
    token = torch.stack([this.ids[b][n - 1] for b, n in enumerate(lengths)])
    hidden = torch.stack([this.hidden[b][p] for b, p in enumerate(seen)])
    state = drafter.start(this.kv.view([(p, 1) for p in seen]), hidden)
    their_hidden = [this.theirs[b].hidden_states[-1][:, p : p + 1] for b, p in enumerate(seen)]
    for _ in range(4):
        g, hidden = drafter.step(this.model.embed(token), hidden, state)
        z = whole_logits(drafter, g)
        embedded = this.model.embed(token)
        for b, n in enumerate(lengths):
            with torch.no_grad():
                out = reference(
                    inputs_embeds=torch.cat((embedded[b][None, None], their_hidden[b]), -1),
                    position_ids=torch.tensor([[n - offset]]),
                    shared_kv_states=shared_kv(this, b, n - 1),
                )
            their_hidden[b] = out.last_hidden_state
            expected = out.logits[0, 0]
            assert worst(hidden[b], out.last_hidden_state[0, 0]) <= tolerance(name)
            scored = z[b].isfinite()
            assert int(scored.sum()) == (tiny.CLUSTER_TOP * tiny.VOCAB // tiny.CLUSTERS if clustered else tiny.VOCAB)
            assert worst(z[b][scored], expected[scored]) <= tolerance(name)
            if clustered:  # transformers fills the tokens it does not score with min - 1
                assert (expected[~scored] < expected[scored].min() - 0.5).all()
        ids, best = drafter.candidates(g)
        token = best.argmax(-1) if ids is None else ids.gather(1, best.argmax(-1, keepdim=True))[:, 0]
        assert token.equal(z.argmax(-1))


def shared_kv(this: Run, b: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The donors' K/V of the first `count` positions; sliding: the last `window` of them, as the drafter was
    trained."""
    config = this.model.config
    layers = this.theirs[b].past_key_values.layers
    parts = {}
    for kind in ("sliding", "full"):
        first = max(0, count - tiny.WINDOW) if kind == "sliding" else 0
        donor = layers[config.donor(kind)]
        parts[f"{kind}_attention"] = (donor.keys[:, :, first:count], donor.values[:, :, first:count])
    return parts


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4_e2b", "gemma4_moe"])
def test_bfloat16_stays_bfloat16(name: str, tmp_path: Path) -> None:
    """Activations keep the load dtype, norm weights float32, logits float32; the answer is near the exact one."""
    this = run(name)
    config, weights, _ = load_target(tiny.write_target(name, tmp_path), dtype=torch.bfloat16)
    model = TextModel(config, weights, ReferenceOps())
    assert model.dtype == torch.bfloat16 and weights["norm"].dtype == torch.float32
    kv = build_kv(config, batch=1, max_len=LENGTHS[0], dtype=torch.bfloat16)
    hidden = model.forward(this.ids[0], kv.view([(0, LENGTHS[0])])).hidden
    assert isinstance(hidden, Tensor) and hidden.dtype == torch.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    assert (
        torch.nn.functional.cosine_similarity(logits, this.logits[0], dim=-1).mean() > 0.99
    )  # a router may choose otherwise
