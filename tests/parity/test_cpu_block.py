"""Block drafters in the C library, at every instruction set: against the definition in float32 with dense weights, and
bit for bit against the library's own single operations with weights in 8 bits. They catch a block that sees a position
too many or too few, a window that is not the layer's own, states of another tap, K/V that depends on how rows are cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.block_drafters import LAYOUTS, net, tensors
from tests.engines import VARIANTS
from torch import Tensor

from outrider.cache.store import CacheSpec, KVStore
from outrider.models.block import BlockNet
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.reference import ReferenceOps
from outrider.types import KVView
from outrider.weights.load import dummy_weights

WIDE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
GEMMA = {**WIDE, "global_head_dim": 64, "sliding_window": 48}
KINDS = (
    "z-lab", "z-lab-old", "dflash2", "deepseek-dflash", "dspark", "gemma-dspark", "speculators-dflash",
    "speculators-eagle3", "eagle3.1", "gemma-eagle3",
)  # fmt: skip
LENGTHS = (9, 140)  # of two sequences: the second crosses a chunk of attention
BLOCK = 6


def wide(layout: str) -> dict[str, Any]:
    size = GEMMA if "gemma" in layout else WIDE
    body = {key: {**raw, **size} if key == "transformer_layer_config" else raw for key, raw in LAYOUTS[layout].items()}
    return body if "transformer_layer_config" in body else {**body, **size}


def target(ops: ReferenceOps, layout: str) -> TextModel:
    raw = {**VARIANTS["dense"], **GEMMA} if "gemma" in layout else {**VARIANTS["llama"], **WIDE}
    config = ModelConfig.from_hf(raw)
    return TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, 3), ops)


class Texts:
    """Two sequences in a store, and the target's states at their positions."""

    def __init__(self, block: BlockNet, page_size: int, dtype: torch.dtype = torch.float32):
        self.block = block
        spec = CacheSpec(2, 256, page_size, 64, 512)
        self.store = KVStore(block.target.config, spec, dtype, "cpu", block.kv_specs)
        self.slots = []
        for length in LENGTHS:
            cache, _ = self.store.open()
            self.store.reserve(cache, length + 2 * BLOCK)
            self.slots.append(cache.slot)
        random = torch.Generator().manual_seed(1)
        rows = sum(LENGTHS)
        self.streams = [torch.randn((rows, 64), generator=random) for _ in block.config.taps or ()]
        self.following = torch.randint(0, 60, (rows,), generator=random)

    def view(self, spans: list[tuple[int, int, int]]) -> KVView:
        """spans: sequence, first position, rows."""
        positions = torch.cat([torch.arange(start, start + n) for _, start, n in spans])
        row_seq = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([n for _, _, n in spans]))
        row_start = torch.tensor([0, *(n for _, _, n in spans)]).cumsum(0).to(torch.int32)
        slots = torch.tensor([self.slots[s] for s, _, _ in spans])
        return self.store.view(slots, positions, row_seq, row_start, 200, max(LENGTHS) + 2 * BLOCK)

    def write(self, spans: list[tuple[int, int, int]]) -> None:
        first = (0, LENGTHS[0])
        rows = torch.cat([torch.arange(first[s] + start, first[s] + start + n) for s, start, n in spans])
        streams = [stream[rows] for stream in self.streams]
        self.block.write_context(streams, self.view(spans), self.following[rows])

    def write_all(self) -> None:
        self.write([(0, 0, LENGTHS[0]), (1, 0, LENGTHS[1])])

    def draft(self) -> Tensor:
        """Inputs of the head for both sequences; EAGLE-3: of its first three steps."""
        block = self.block
        end = torch.tensor(LENGTHS)
        kv = self.view([(0, LENGTHS[0] - 1, 1), (1, LENGTHS[1] - 1, 1)])
        if block.config.kind != "eagle3":
            ids = torch.tensor([[7, 4, 4, 4, 4, 4], [11, 4, 4, 4, 4, 4]])
            return block.backbone(ids, kv, end)
        feature = block.context([stream[-2:] for stream in self.streams])
        drafts = []
        own_rows = block.rows(block.layers[0], feature, end - 1, 3)
        for step in range(3):
            h, feature = block.feature_step(torch.tensor([5, 9]) + step, feature, kv, own_rows, step)
            drafts.append(h)
        return torch.stack(drafts, 1)

    def kv(self) -> list[Tensor]:
        first = len(self.block.target.config.layers)
        return [t for side in (self.store.keys, self.store.values) for t in side[first:] if t is not None]


def loaded(folder: Path, layout: str, model: TextModel) -> BlockNet:
    raw = wide(layout)
    return net(folder / layout, raw, tensors(raw, 4, 0.2), model)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("page_size", [4, 16])
@torch.inference_mode()
def test_it_is_the_definition(tmp_path: Path, ops: CpuOps, layout: str, page_size: int) -> None:
    """Compares with the same dense weights in float32."""
    reference = loaded(tmp_path, layout, target(ReferenceOps(), layout))
    compiled = BlockNet(reference.config, reference.weights, ops, target(ops, layout)).compiled()
    assert compiled.call is not None
    want = Texts(reference, page_size)
    got = Texts(compiled, page_size)
    for texts in (want, got):
        texts.write_all()
    if page_size == 4:  # pages without tiles: both keep rows
        for a, b in zip(want.kv(), got.kv(), strict=True):
            torch.testing.assert_close(a[1:], b[1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(want.draft(), got.draft(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@torch.inference_mode()
def test_one_call_is_the_single_operations(tmp_path: Path, ops: CpuOps, layout: str, dtype: torch.dtype) -> None:
    """K/V and drafts, bit for bit; also if the text is read in other pieces."""
    block = loaded(tmp_path, layout, target(ops, layout))
    single = BlockNet(block.config, block.weights, ops, block.target)
    assert block.call is not None and single.call is None
    whole = Texts(block, 16, dtype)
    pieces = Texts(block, 16, dtype)
    by_op = Texts(single, 16, dtype)
    whole.write_all()
    by_op.write_all()
    pieces.write([(1, 0, 77)])
    pieces.write([(0, 0, 9), (1, 77, 1)])
    pieces.write([(1, 78, 62)])
    for a, b, c in zip(whole.kv(), pieces.kv(), by_op.kv(), strict=True):
        assert torch.equal(a[1:], b[1:]) and torch.equal(a[1:], c[1:])
    drafts = [texts.draft() for texts in (whole, pieces, by_op)]
    assert torch.equal(drafts[0], drafts[1]) and torch.equal(drafts[0], drafts[2])
