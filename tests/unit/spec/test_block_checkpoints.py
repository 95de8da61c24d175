"""Damaged and mismatched block drafters: each is refused in one line that names what is wrong, before a weight is read.
And every layout is recognised as what it is, with the taps that its own way of counting means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.block_drafters import LAYOUTS, QWEN, net, tensors, write
from tests.engines import tiny_model
from tests.quantised import SCHEMES, compressed

from outrider.models.block_config import BlockConfig, is_block
from outrider.spec.block import load_block
from outrider.types import OutriderError
from outrider.weights.files import from_folder
from outrider.weights.load import dummy_weights
from outrider.weights.quant_scheme import recipe

MODEL = tiny_model("llama")
ZLAB = LAYOUTS["z-lab"]
SPARK = LAYOUTS["dspark"]
EAGLE = LAYOUTS["eagle3"]
RED_HAT = LAYOUTS["speculators-dflash"]


def nested(**changes: Any) -> dict[str, Any]:
    return {**ZLAB, "dflash_config": {k: v for k, v in {**ZLAB["dflash_config"], **changes}.items() if v is not None}}


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({**ZLAB, "hidden_size": 16}, "hidden size"),
    "vocabulary": ({**ZLAB, "vocab_size": 65}, "vocabulary"),
    "target depth": ({**ZLAB, "num_target_layers": 3}, "layers"),
    "tap beyond": (nested(target_layer_ids=[0, 2]), "target layers"),
    "tap of embeddings": (nested(target_layer_ids=[-1, 1]), "target layers"),
    "tap not a number": (nested(target_layer_ids=["last"]), "target_layer_ids"),
    "no taps": (nested(target_layer_ids=None), "target_layer_ids"),
    "aux tap beyond": ({**RED_HAT, "aux_hidden_state_layer_ids": [1, 3]}, "target layers"),
    "aux tap 0": ({**RED_HAT, "aux_hidden_state_layer_ids": [0, 1]}, "target layers"),
    "no aux taps": ({k: v for k, v in RED_HAT.items() if "aux" not in k}, "aux_hidden_state_layer_ids"),
    "default taps": ({k: v for k, v in EAGLE.items() if k != "eagle_config"}, "target layers"),
    "no mask": (nested(mask_token_id=None), "mask_token_id"),
    "mask beyond": (nested(mask_token_id=64), "mask_token_id"),
    "mask a text": (nested(mask_token_id="<mask>"), "mask_token_id"),
    "block of one": (nested(block_size=1), "block_size"),
    "domino": (nested(projector_type="domino"), "domino"),
    "p-eagle": ({**RED_HAT, "speculators_model_type": "peagle"}, "P-EAGLE"),
    "unknown speculator": ({**RED_HAT, "speculators_model_type": "oracle"}, "oracle"),
    "no layer config": ({k: v for k, v in RED_HAT.items() if k != "transformer_layer_config"}, "transformer_layer"),
    "large draft vocabulary": ({**EAGLE, "draft_vocab_size": 65}, "draft_vocab_size"),
    "heads": ({**ZLAB, "num_key_value_heads": 3}, "K/V heads"),
    "layer types": ({**ZLAB, "layer_types": ["full_attention"]}, "layer_types"),
    "no window": ({**ZLAB, "sliding_window": None}, "sliding_window"),
    "rope": ({**ZLAB, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "activation": ({**ZLAB, "hidden_act": "relu"}, "relu"),
    "markov head": ({**SPARK, "markov_head_type": "lstm"}, "lstm"),
    "confidence without markov": ({**SPARK, "markov_rank": 0}, "markov_rank"),
    "two layers": ({**EAGLE, "num_hidden_layers": 2}, "one layer"),
    "two norms": ({**LAYOUTS["eagle3.1"], "norm_before_fc": True}, "exclude"),
    "groups": ({**LAYOUTS["dflash2"], "dflash_config": {**LAYOUTS["dflash2"]["dflash_config"], "conv_group_size": 7}},
               "conv_group_size"),
    "nonsense": ({**ZLAB, "num_hidden_layers": "two"}, "num_hidden_layers"),
    "nonsense inside": ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "block_size": [6]}}, "makes no sense"),
}  # fmt: skip


def refused(folder: Path) -> str:
    with pytest.raises(OutriderError) as caught:
        load_block(from_folder(folder, "tiny"), MODEL, torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_run(tmp_path: Path, case: str) -> None:
    """No weights are there: the configuration alone is enough to refuse it."""
    raw, said = CONFIGS[case]
    folder = write(tmp_path, raw, {})
    (folder / "model.safetensors").unlink()
    assert is_block(raw) and said in refused(folder)


@pytest.mark.parametrize(
    "layout, damage, said",
    [
        ("z-lab", lambda s: s.pop("fc.weight"), "fc.weight is missing"),
        ("z-lab", lambda s: s.update(extra=torch.zeros(2)), "extra is left over"),
        ("z-lab", lambda s: s.update({"fc.weight": torch.zeros(32, 96)}), "fc.weight has shape"),
        ("z-lab", lambda s: s.update({"norm.weight": torch.zeros(32, dtype=torch.int32)}), "norm.weight"),
        ("z-lab", lambda s: s.update({"model.fc.weight": s["fc.weight"].clone()}), "twice"),
        ("z-lab", lambda s: s.update({"layers.0.self_attn.attention_sink_bias": torch.zeros(4)}), "left over"),
        ("dspark", lambda s: s.pop("embed_tokens.weight"), "embed_tokens.weight is missing"),
        ("dspark", lambda s: s.pop("markov_head.markov_w2.weight"), "markov_w2"),
        ("dflash2", lambda s: s.pop("candidate_selector.successor_codebook"), "successor_codebook"),
        ("eagle3", lambda s: s.pop("d2t"), "d2t is missing"),
        ("eagle3", lambda s: s.update(d2t=torch.full((40,), 60)), "d2t names tokens outside"),
        ("eagle3", lambda s: s.pop("lm_head.weight"), "lm_head.weight is missing"),
    ],
)
def test_a_checkpoint_that_does_not_hold_what_its_configuration_says(
    tmp_path: Path, layout: str, damage: Any, said: str
) -> None:
    state = tensors(LAYOUTS[layout])
    damage(state)
    assert said in refused(write(tmp_path, LAYOUTS[layout], state))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised(layout: str) -> None:
    config = BlockConfig.from_hf(LAYOUTS[layout])
    kind = next(k for k in ("eagle3", "dflash2", "dspark", "dflash") if k in layout.replace("z-lab", "dflash"))
    assert config.kind == ("dspark" if layout == "deepseek-dflash" else kind) and config.taps == (0, 1)
    assert config.from_anchor == (config.kind in ("dspark", "eagle3"))


def test_other_spellings(tmp_path: Path) -> None:
    """A prefix, `midlayer`, un-nested heads, tensors of training: one checkpoint in two spellings loads alike."""
    for layout, changes in (
        ("eagle3", (("layers.0.", "midlayer."),)),
        ("dspark", (("markov_head.markov_w", "markov_w"), ("confidence_head.proj.", "confidence_proj."))),
        ("z-lab", (("fc.", "model.fc."), ("layers.", "model.layers."))),
    ):
        raw = LAYOUTS[layout]
        state = tensors(LAYOUTS[layout])
        other = dict(state)
        for old, new in changes:
            other = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in other.items()}
        other |= {"t2d": torch.zeros(64, dtype=torch.bool), "verifier_norm.weight": torch.ones(32)}
        assert set(other) != set(state)
        one = net(tmp_path / layout, raw, state, MODEL)
        two = net(tmp_path / f"{layout} other", raw, other, MODEL)
        assert all(torch.equal(w, two.weights[n]) for n, w in one.weights.items())  # type: ignore[arg-type]


def test_a_packed_head_is_loaded_and_not_left_over(tmp_path: Path) -> None:
    """Next to a tied target it was once dropped without a word, and the target's own used."""
    scheme = SCHEMES["ct-int4-g32"][1]
    state = tensors(ZLAB)
    head = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    scheme = {**scheme, "ignore": ["re:^(?!lm_head)"]}
    state |= {f"lm_head.{name}": part for name, part in compressed(4, 32, True)(head)[0].items()}
    write(tmp_path, {**ZLAB, "quantization_config": scheme}, state)
    for target in (MODEL, tiny_model("dense")):
        assert "head" in load_block(from_folder(tmp_path, "packed"), target, torch.float32).weights


def test_random_weights_whose_columns_are_no_whole_groups_stay_dense() -> None:
    config = BlockConfig.from_hf(ZLAB)
    how = recipe({"quantization_config": SCHEMES["ct-int4-g128"][1]}, "tiny")
    assert dummy_weights(config, "cpu", torch.float32, how=how)


def test_what_is_no_block_drafter() -> None:
    assert not is_block(QWEN) and not is_block({"architectures": ["LlamaForCausalLM"]}) and not is_block({})
