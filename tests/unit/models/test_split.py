"""How a model is divided: every head, column and token is somebody's, and the parts put together are the whole,
whatever the format."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.dummy_checkpoint import write_folder, write_gguf
from tests.engines import GEMMA4, LLAMA, VARIANTS, assistant
from torch import Tensor

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.names import tensor_plan
from outrider.models.split import Shards, TPRank, heads_of, piece, split_drafter, split_target
from outrider.types import OutriderError
from outrider.weights.load import load_target, shard_tensor

WIDE = {**LLAMA, "hidden_size": 64, "head_dim": 32, "intermediate_size": 512, "vocab_size": 320}
SMOLLM2 = {
    **LLAMA, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "parts", "alignment"), [(9, 2, 1), (48, 4, 1), (1536, 4, 256), (70, 4, 1), (96, 3, 32)]
)
def test_pieces_are_a_partition_on_the_grain(size: int, parts: int, alignment: int) -> None:
    spans = [piece(size, i, parts, alignment) for i in range(parts)]
    assert spans[0][0] == 0 and spans[-1][1] == size
    assert all(a[1] == b[0] and a[1] % alignment == 0 for a, b in pairwise(spans))
    sizes = [hi - lo for lo, hi in spans]
    assert max(sizes) - min(sizes) <= alignment


@pytest.mark.parametrize(("heads", "kv", "world"), [(9, 3, 2), (9, 3, 4), (8, 1, 8), (32, 8, 2), (14, 2, 4), (4, 2, 3)])
def test_query_heads_go_with_their_kv_head(heads: int, kv: int, world: int) -> None:
    seen: list[int] = []
    for rank in range(world):
        (q, q_end), (k, k_end) = heads_of(heads, kv, TPRank(rank, world))
        assert q < q_end and (q_end - q) % (k_end - k) == 0
        each = (q_end - q) // (k_end - k)  # as the ops see it: query head i reads K/V head i // each
        assert all(h // (heads // kv) == k + (h - q) // each for h in range(q, q_end))
        seen += range(q, q_end)
    assert seen == list(range(heads))


def held(config: ModelConfig, tp: TPRank) -> float:
    """Bytes that a process holds of the weights that are divided."""
    plans = tensor_plan(config)
    _, cuts = split_target(config, tp, lambda _: 1)
    whole = {name: torch.empty(plans[name].shape, device="meta") for name in cuts if name in plans}
    return sum(shard_tensor(w, plans[n], cuts[n]).numel() for n, w in whole.items()) / sum(
        w.numel() for w in whole.values()
    )


@pytest.mark.parametrize(
    "name", ["smollm2", *(f"google/gemma-4-{size}-it" for size in ("E2B", "E4B", "12B", "26B-A4B", "31B"))]
)
def test_nobody_holds_much_more_than_its_share(name: str) -> None:
    config = ModelConfig.from_hf(SMOLLM2 if name == "smollm2" else BUILTIN_CONFIGS[name])
    for world in (2, 4, 8):
        parts = [held(config, TPRank(rank, world)) for rank in range(world)]
        assert max(parts) <= 1 / world + (0.05 if name == "smollm2" else 0.005), world
        assert sum(parts) >= 0.999


def together(cuts: Shards, name: str, parts: list[Tensor], sources: tuple[int, ...]) -> Tensor:
    """The parts of all ranks as one tensor, for weights of which nothing is kept twice."""
    if cuts[name][0].columns:
        return torch.cat(parts, dim=-1)
    axis = 1 if parts[0].dim() == 3 else 0
    pieces = 2 if parts[0].dim() == 3 else len(sources)
    split = [part.chunk(pieces, dim=axis) for part in parts]
    return torch.cat([torch.cat([s[i] for s in split], dim=axis) for i in range(pieces)], dim=axis)


@pytest.mark.parametrize("name", [*VARIANTS, "q4_0", "q8_0"])
def test_the_parts_of_a_file_are_the_whole(name: str, tmp_path: Path) -> None:
    raw = {**VARIANTS.get(name, WIDE), "vocab_size": 288}
    raw |= {"vocab_size_per_layer_input": 288} if "vocab_size_per_layer_input" in raw else {}
    config = ModelConfig.from_hf(raw)
    path = tmp_path / "m.gguf"
    if name in VARIANTS:
        path = tmp_path / "m"
        write_folder(path, raw, config)
    else:
        write_gguf(path, config, name)
    _, whole, _ = load_target(path)
    shares = [TPRank(rank, 2) for rank in range(2)]
    loaded = [load_target(path, tp=share) for share in shares]
    _, cuts = split_target(config, shares[0], lambda _: 32 if name not in VARIANTS else 1)
    plans = tensor_plan(config)
    for key, weight in whole.items():
        assert isinstance(weight, Tensor)
        parts = [weights[key] for _, weights, _ in loaded]
        tensors = [p for p in parts if isinstance(p, Tensor)]
        assert len(tensors) == 2, key
        if key not in cuts:
            assert all(torch.equal(p, weight) for p in tensors), key
        elif key.endswith(("gate_up", "gate_up_bias", "down", "out", "embed", "head")) or not key.endswith(
            ("qkv", "qkv_bias")
        ):
            assert torch.equal(together(cuts, key, tensors, plans[key].sources), weight), key
        else:  # q is divided, K/V heads may be kept by both
            i = int(key.split(".")[1])
            rows = config.layers[i].attn.heads * config.layers[i].attn.head_dim
            widths = [c.layers[i].attn.heads * c.layers[i].attn.head_dim for c, _, _ in loaded]
            assert torch.equal(torch.cat([t[:n] for t, n in zip(tensors, widths)]), weight[:rows]), key
            assert all(t.shape[0] == (c.layers[i].attn.qkv_rows) for t, (c, _, _) in zip(tensors, loaded)), key


def test_what_cannot_be_divided_is_refused_in_one_line(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(GEMMA4)
    with pytest.raises(OutriderError, match=r"layer 0 has 4 heads over 2 K/V heads, too few for --tensor-parallel 8"):
        split_target(config, TPRank(0, 8), lambda _: 1)
    with pytest.raises(OutriderError, match=r"the MLP of layer 0 is 48 wide and may be cut at multiples of 32 only"):
        split_target(config, TPRank(0, 4), lambda _: 32)
    with pytest.raises(OutriderError, match=r"in an order of their own"):
        split_target(config, TPRank(0, 2), lambda _: 0)
    with pytest.raises(OutriderError, match=r"the drafter's layer 0 has 4 heads"):
        split_drafter(DrafterConfig.from_hf(assistant(GEMMA4, False)), TPRank(0, 8))
    thin = {**WIDE, "head_dim": 16}  # a head is half a block
    write_gguf(
        tmp_path / "thin.gguf",
        ModelConfig.from_hf({**thin, "num_attention_heads": 2, "num_key_value_heads": 2}),
        "q4_0",
    )
    with pytest.raises(
        OutriderError,
        match=r"o_proj.weight: a weight in Q4_0 cannot be cut at columns 0 to 16: only at multiples of 32",
    ):
        load_target(tmp_path / "thin.gguf", tp=TPRank(0, 2))
