"""A target model during one pass in which some rows use low-rank adapters.

`AdaptedModel` is a `TextModel` over the same weights: only its operations differ (ops.lowrank, ops.adapter_slots). It
is made per pass, or per captured step, and costs a dictionary.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ..ops.adapter_slots import SlotOps
from ..ops.backend import Pass
from ..ops.formats import DeviceWeight
from ..ops.lowrank import AdaptedOps
from ..ops.reference import Backend
from ..types import KVView, OutputRows
from .decoder import TextModel

ADAPTED = ("qkv", "out", "gate_up", "down")  # fields of a `Block`, and the suffixes of their canonical names


def adaptable_weights(model: TextModel) -> dict[str, DeviceWeight]:
    """The weights that an adapter may change, by canonical name."""
    found = {f"layers.{i}.{f}": getattr(block, f) for i, block in enumerate(model.blocks) for f in ADAPTED}
    for i, side in enumerate(model.ple_blocks):
        found |= {f"layers.{i}.ple_gate": side.gate, f"layers.{i}.ple_out": side.out}
    if model.ple_input is not None:
        found["ple_proj"] = model.ple_input.proj
    return found


def weight_names(model: TextModel) -> dict[int, str]:  # by `id` of the weight
    return {id(weight): name for name, weight in adaptable_weights(model).items()}


class AdaptedModel(TextModel):
    def __init__(self, model: TextModel, ops: AdaptedOps | SlotOps):
        self.__dict__.update(model.__dict__)
        self.ops = cast(Backend, ops)

    def forward(self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None) -> Pass:
        """Runs all rows through all layers, so that a row's adapter group is valid in every layer."""
        out = super().forward(ids, kv, taps)
        if wanted is None:
            return out
        return Pass(out.hidden[wanted.rows], tuple(stream[wanted.rows] for stream in out.streams))
