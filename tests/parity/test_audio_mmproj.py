"""Audio encoders in GGUF projectors, written as llama.cpp's and Ollama's converters write them (the former with the
names of the `gguf` package's own tables), against the same model's safetensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests import tiny_audio
from tests.parity import test_mmproj
from tests.unit.weights import ggufs

from outrider.models.audio import AudioModel
from outrider.models.names import normalise
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.audio import audio_config, load_audio
from outrider.weights.vision import vision_config

SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
KINDS = {"gemma4_e2b": ("gemma4v", "gemma4a"), "gemma4_12b": ("gemma4uv", "gemma4ua")}
OLLAMA = {  # the other converter's names for the same tensors
    "a.pre_encode.out": "mm.a.fc", "a.input_projection": "a.pre_encode.out", "attn_pre_norm": "ln1",
    "attn_post_norm": "ln2", "ln2": "layer_pre_norm", "attn_k_rel": "linear_pos",
}  # fmt: skip


def converted(name: str, tensor: torch.Tensor, ollama: bool) -> tuple[str, np.ndarray]:
    """A tensor's name and content in a projector."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    data = tensor.float()
    if name.endswith("per_dim_scale"):
        name += ".weight"
        data = F.softplus(data)
    if "depthwise_conv1d" in name:
        data = data.squeeze(1)
    plain = name.replace(".linear.weight", ".weight").replace("model.audio_tower.", "conformer.")
    stored_name = table.get_name(plain, try_suffixes=SUFFIXES)
    assert stored_name is not None, name
    if ollama:
        stem, _, tail = stored_name.rpartition(".")
        where, dot, module = stem.rpartition(".") if ".blk." in stem else ("", "", stem)
        stored_name = f"{where}{dot}{OLLAMA.get(module, module)}.{tail}"
    return stored_name, np.ascontiguousarray(np.atleast_1d(data.numpy()))


def write(kind: str, folder: Path, ollama: bool = False, quantise: str | None = None, without: str = "") -> Path:
    """A GGUF model and its projector with images and sound; returns the model. without: leaves this tensor out."""
    model = tiny_audio.target(kind)
    text = model.config.get_text_config()
    weights = {normalise(k): v for k, v in model.state_dict().items() if ".language_model." in k}
    folder.mkdir()
    control = dict(zip((270, 271, 272, 273, 274, 275, 276), tiny_audio.SPELLED))
    ggufs.write(folder / "model-Q8_0.gguf", "gemma4", text, weights, tokenizer=True, control=control)
    writer = gguf.GGUFWriter(folder / "mmproj-model-F16.gguf", "clip")
    vision_kind, audio_kind = KINDS[kind]
    writer.add_string("clip.vision.projector_type", vision_kind)
    writer.add_string("clip.audio.projector_type", audio_kind)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)  # wrong, as in the files there are
    writer.add_uint32("clip.audio.num_mel_bins", 128)
    model.save_pretrained(folder / "hf")
    for name, tensor in load_file(folder / "hf" / "model.safetensors").items():
        if any(part in name for part in ("vision_tower.", "embed_vision.", "vision_embedder.")):
            writer.add_tensor(*test_mmproj.converted(name, tensor.float().numpy(), swapped=False))
        elif any(part in name for part in ("audio_tower.", "embed_audio.")):
            stored_name, data = converted(name, tensor, ollama)
            if without and without in stored_name:
                continue
            if quantise is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
                raw = gguf.GGMLQuantizationType[quantise]
                writer.add_tensor(stored_name, gguf.quants.quantize(data, raw), raw_dtype=raw)
            else:
                writer.add_tensor(stored_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model-Q8_0.gguf"


@pytest.mark.parametrize(("kind", "ollama"), [("gemma4_e2b", False), ("gemma4_e2b", True), ("gemma4_12b", False)])
def test_a_projector_gives_the_weights_of_the_safetensors(kind: str, ollama: bool, tmp_path: Path) -> None:
    """Swapped norms, softplus applied, a squeezed convolution, scalars as vectors."""
    folder = hub.resolve(str(tiny_audio.write(kind, tmp_path / "folder")))
    files = hub.resolve(str(write(kind, tmp_path / "gguf", ollama)))
    wanted_config = audio_config(folder)
    config = audio_config(files)
    assert config is not None and wanted_config is not None
    assert (config.audio_id, config.boa_id, config.eoa_id) == (274, 275, 276)
    ids = {name: getattr(wanted_config, name) for name in ("audio_id", "boa_id", "eoa_id")}
    assert replace(config, **ids) == wanted_config
    wanted, weights = (load_audio(f, config, "cpu", torch.float32) for f in (folder, files))
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(weights[name], tensor, rtol=0, atol=1e-6), name
    clip = tiny_audio.clip(1.0)
    soft = [AudioModel(config, weights).encode(clip) for weights in (wanted, weights)]
    assert torch.allclose(*soft, rtol=0, atol=1e-5)
    vision = vision_config(files)
    assert vision is not None and vision.layers == (2 if kind == "gemma4_e2b" else 0), "images are counted apart"


def test_quantised_matrices_are_widened(tmp_path: Path) -> None:
    files = hub.resolve(str(write("gemma4_e2b", tmp_path / "gguf", quantise="Q8_0")))
    folder = hub.resolve(str(tiny_audio.write("gemma4_e2b", tmp_path / "folder")))
    config = audio_config(files)
    assert config is not None
    weights, exact = (load_audio(f, config, "cpu", torch.float32) for f in (files, folder))
    apart = [float((weights[name] - exact[name]).abs().max()) for name in exact if name.endswith("linear.weight")]
    assert 0 < max(apart) < 0.02


@pytest.mark.parametrize(("without", "said"), [("blk.1.conv_dw", "lconv1d.depthwise_conv1d.weight is missing")])
def test_a_missing_tensor_is_named(without: str, said: str, tmp_path: Path) -> None:
    files = hub.resolve(str(write("gemma4_e2b", tmp_path / "gguf", without=without)))
    config = audio_config(files)
    assert config is not None
    with pytest.raises(OutriderError, match=said):
        load_audio(files, config, "cpu", torch.float32)


def test_a_projector_without_sound(tmp_path: Path) -> None:
    files = hub.resolve(str(write("gemma4_e2b", tmp_path / "gguf", without="a.")))
    assert audio_config(files) is None and vision_config(files) is not None
