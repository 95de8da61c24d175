"""Captured code never looks at a value: the whole step runs on the meta device, for every way of
choosing."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from tests.engines import VARIANTS, VOCAB, assistant

from gpu_rig import Synthetic
from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.decode import Choosing, DecodeStep, Inputs, Key, Output, State
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.models.names import tensor_plan
from outrider.ops.reference import ReferenceOps
from outrider.spec.mtp import MTPDrafter
from outrider.spec.slot_sampling import NO_FEATURES, SamplingFeatures, SlotSampling
from outrider.weights.load import kept_dtype


class ShapesOnly(ReferenceOps):
    """The plain attention and experts look at values; their GPU twins do not. Shapes are enough here."""

    def attend(self, q: Any, spec: Any, kv: Any) -> Any:
        return torch.empty_like(q)

    def moe(self, router_in: Any, x: Any, *rest: Any) -> Any:
        return torch.empty_like(x)


@pytest.mark.parametrize("variant", ["dense", "edge", "moe"])
@torch.inference_mode()
def test_a_captured_step_never_looks_at_a_value(variant: str) -> None:
    """On the meta device there are none: whatever would wait for a GPU raises."""
    ops = ShapesOnly()
    config = ModelConfig.from_hf(VARIANTS[variant])
    drafter = DrafterConfig.from_hf(assistant(VARIANTS[variant], True))

    def blank(c: Any) -> dict[str, Any]:
        return {
            n: torch.zeros(p.shape, dtype=kept_dtype(p, torch.float32), device="meta")
            for n, p in tensor_plan(c).items()
        }

    model = TextModel(config, blank(config), ops)
    guesser = MTPDrafter(MTPNet(drafter, blank(drafter), ops, model), model)
    store = KVStore(config, CacheSpec(4, 128, 4, 17, 256), torch.float32, "meta")
    assumed = Synthetic([0.5] * 2, 2, torch.device("meta"))
    history = SlotSampling(5, VOCAB, (1,), torch.device("meta"))
    state = State.of(torch.zeros(5, 32, device="meta"), history)
    inputs = Inputs.of(torch.device("meta"), 4, 2)
    all_of_it = SamplingFeatures(True, 4, 2, 4, 2, 3, True)
    history.grow(all_of_it)
    bits = torch.zeros((8, VOCAB // 32), dtype=torch.int32, device="meta")
    # How tokens are chosen does not hang on the kind of layers: one variant goes through every way, the others through
    # all asks.
    ways: list[Choosing] = list(get_args(Choosing)) if variant == "dense" else ["sampled"]
    for choosing in ways:
        for k, source in ((0, None), (2, "drafter"), (2, "host"), (2, "both"), (2, "drafted")):
            for asks, override in ((NO_FEATURES, None), (all_of_it, None), (NO_FEATURES, assumed))[: 3 if k else 2]:
                key = Key(2, k, 512, choosing, source, "cycle", asks)  # type: ignore[arg-type]
                out = Output.of(key, torch.device("meta"))
                masks = bits if asks != NO_FEATURES else None
                logits = DecodeStep(model, store, guesser, state, inputs, key, out, masks, override)()
                assert logits is not None and logits.shape == (2 * (k + 1), VOCAB)
