"""GGUF projectors (mmproj), written as llama.cpp's converter writes them with the names of the `gguf` package's own
tables, against the same model's safetensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import tiny_vision
from tests.unit.weights import ggufs

from outrider import LLM, OutriderError, SamplingParams
from outrider.models.names import normalise
from outrider.weights import hub
from outrider.weights.vision import load_vision, vision_config

SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
KINDS = {"gemma4_e2b": "gemma4v", "gemma4_31b": "gemma4v", "gemma4_12b": "gemma4uv", "gemma3_4b": "gemma3"}
UNIFIED = {"patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2", "pos_norm": "v.patch_norm.3"}


def converted(name: str, data: np.ndarray, swapped: bool) -> tuple[str, np.ndarray]:
    """A tensor's name and layout in a projector."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 2)
    name = name.removeprefix("model.").replace(".linear.weight", ".weight")
    module, _, tail = name.removeprefix("vision_embedder.").rpartition(".")
    if module in UNIFIED:
        if module == "patch_ln1":
            side = round((data.size // 3) ** 0.5)
            data = data.reshape(side, side, 3).transpose(2, 0, 1).reshape(-1)
        return f"{UNIFIED[module]}.{tail}", data
    if "pos_embedding" in name:
        return "v.position_embd.weight", data.transpose(1, 0, 2)
    if "input_proj.weight" in name or "patch_dense.weight" in name:
        side = round((data.shape[1] // 3) ** 0.5)
        data = data.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        return "v.patch_embd.weight", data if "input_proj" in name else data.reshape(data.shape[0], -1)
    if "patch_dense.bias" in name:
        return "v.patch_embd.bias", data
    if "mm_soft_emb_norm" in name:
        data = data + 1
    name = name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    name = name.replace(
        "vision_tower.encoder.layers",
        "vision_tower.vision_model.encoder.layers"
        if "fc" in name or "layer_norm" in name or "out_proj" in name
        else "vision_model.model.layers",
    )
    name = name.replace("vision_tower.embeddings", "vision_tower.vision_model.embeddings")
    name = name.replace("vision_tower.post_l", "vision_tower.vision_model.post_l")
    name += ".weight" if name.endswith("position_embedding_table") else ""
    for spelled in (name, f"model.{name}", name.replace("vision_tower.vision_model.encoder", "vision_model.model")):
        if (stored_name := table.get_name(spelled, try_suffixes=SUFFIXES)) is not None:
            if swapped and ".ffn_" in stored_name:  # as the first converter wrote them
                stored_name = stored_name.replace("ffn_up", "?").replace("ffn_down", "ffn_up").replace("?", "ffn_down")
            return stored_name, np.atleast_1d(data)
    raise AssertionError(name)


def write(kind: str, folder: Path, quantise: str | None = None, swapped: bool = False) -> Path:
    """A GGUF model and its projector; returns the model."""
    model = tiny_vision.target(kind)
    text = model.config.get_text_config()
    state = model.state_dict()
    weights = {normalise(k): v for k, v in state.items() if ".language_model." in k}
    folder.mkdir()
    arch = "gemma3" if kind == "gemma3_4b" else "gemma4"
    names = tiny_vision.SPELLED.get(kind, ("<|image>", "<|image|>", "<image|>"))
    ggufs.write(
        folder / "model-Q8_0.gguf", arch, text, weights, tokenizer=True, control=dict(zip((270, 271, 272), names))
    )
    writer = gguf.GGUFWriter(folder / "mmproj-model-F16.gguf", "clip")
    vision = model.config.vision_config
    writer.add_string("clip.vision.projector_type", KINDS[kind])
    if kind != "gemma4_12b":
        writer.add_uint32("clip.vision.attention.head_count", vision.num_attention_heads)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    if kind == "gemma3_4b":
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
    model.save_pretrained(folder / "hf")
    for name, tensor in load_file(folder / "hf" / "model.safetensors").items():
        if any(part in name for part in ("vision_tower.", "embed_vision.", "vision_embedder.", "multi_modal_pro")):
            named, data = converted(name, tensor.float().numpy(), swapped)
            if quantise is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
                raw = gguf.GGMLQuantizationType[quantise]
                writer.add_tensor(named, gguf.quants.quantize(np.ascontiguousarray(data), raw), raw_dtype=raw)
            else:
                writer.add_tensor(named, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model-Q8_0.gguf"


@pytest.mark.parametrize(("kind", "swapped"), [*((kind, False) for kind in KINDS), ("gemma3_4b", True)])
def test_a_projector_gives_the_weights_of_the_safetensors(kind: str, swapped: bool, tmp_path: Path) -> None:
    """A transposed table, channels first, a norm without its one, fc1 for fc2."""
    folder = hub.resolve(str(tiny_vision.write(kind, tmp_path / "folder")))
    files = hub.resolve(str(write(kind, tmp_path / "gguf", swapped=swapped)))
    want_config = vision_config(folder)
    config = vision_config(files)
    assert config is not None and want_config is not None
    assert (config.boi_id, config.image_id, config.eoi_id) == (270, 271, 272) and abs(config.eps - 1e-6) < 1e-12
    ids = {f"{name}_id": getattr(want_config, f"{name}_id") for name in ("boi", "image", "eoi")}
    assert replace(config, eps=want_config.eps, **ids) == want_config
    want, got = (load_vision(f, config, "cpu", torch.float32) for f in (folder, files))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kind", ["gemma4_e2b", "gemma3_4b"])
def test_a_gguf_model_reads_images(kind: str, tmp_path: Path) -> None:
    """Found without being named; quantised matrices are widened."""
    llm = LLM.load(str(write(kind, tmp_path / "gguf", "Q8_0")), drafter="none", image_tokens=70, dtype="float32")
    place = llm.images().config.placeholder_id
    prompt = {"text": [2, 40, place, 41, 42], "images": [tiny_vision.picture(90, 200, 1)]}
    answer = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(answer.token_ids) == 4 and answer.stats.prompt_tokens > 16
    llm.close()


def test_a_projector_of_another_model_is_refused(tmp_path: Path) -> None:
    other = write("gemma3_4b", tmp_path / "other")
    path = write("gemma4_e2b", tmp_path / "gguf")
    (path.parent / "mmproj-model-F16.gguf").write_bytes((other.parent / "mmproj-model-F16.gguf").read_bytes())
    with pytest.raises(OutriderError, match="'gemma3' projector does not fit gemma4_text"):
        LLM.load(str(path), drafter="none")
    (path.parent / "mmproj-model-F16.gguf").unlink()
    llm = LLM.load(str(path), drafter="none")
    with pytest.raises(OutriderError, match="no mmproj file"):
        llm.images()
