"""Our GGUF reader against the `gguf` package and against the same model's safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests import tiny
from tests.unit.weights import ggufs
from torch import Tensor

from outrider.engine.text import Tokenizer
from outrider.models.config import ModelConfig
from outrider.models.names import normalise
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import Weight
from outrider.ops.formats.gguf import BLOCKS, dequantize
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.files import fingerprint, model_config
from outrider.weights.gguf_config import unpermute
from outrider.weights.load import load_target
from outrider.weights.sizes import stored_size

NOT_IN_PACKAGE = {"Q1_0", "Q2_0"}
ARCHS = {
    "llama": "llama", "llama3": "llama", "smollm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3",
    "gemma4_31b": "gemma4", "gemma4_e2b": "gemma4", "gemma4_e4b": "gemma4", "gemma4_moe": "gemma4",
}  # fmt: skip


def make(name: str, path: Path, **options: Any) -> tuple[Any, Path]:
    model = tiny.target(name)
    config = model.config.get_text_config()
    state = model.state_dict()
    if name in tiny.MULTIMODAL:
        state = {normalise(k): v for k, v in state.items() if ".language_model." in k}
    return model, ggufs.write(path, ARCHS.get(name, name), config, state, **options)


def by_definition(kind: str, rows: np.ndarray) -> np.ndarray:
    """Q1_0 and Q2_0, which the package does not decode: a float16 and codes of one or two bits, the first lowest."""
    blocks = rows.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    width = {"Q1_0": 1, "Q2_0": 2}[kind]
    codes = ((blocks[:, 2:, None] >> np.arange(0, 8, width)) & (2**width - 1)).reshape(len(blocks), -1)
    integers = 2.0 * codes - 1 if kind == "Q1_0" else codes - 1.0
    return (integers.astype(np.float32) * scales).reshape(len(rows), -1)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_block_format_decodes_exactly_as_the_gguf_package(kind: str) -> None:
    size, nbytes = BLOCKS[kind]
    rows = np.random.default_rng(5).integers(0, 256, (7, 3 * nbytes), dtype=np.uint8)
    ours = dequantize(kind, torch.from_numpy(rows)).numpy()
    with np.errstate(all="ignore"):
        if kind in NOT_IN_PACKAGE:
            theirs = by_definition(kind, rows)
        else:
            theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert ours.shape == (7, 3 * size) and ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)  # NaN and infinite scales included
    finite = np.isfinite(theirs)
    assert (ours.view(np.int32)[finite] == theirs.view(np.int32)[finite]).all()  # the sign of zero as well


def test_a_file_may_mix_all_types_and_names_them_when_it_has_another(tmp_path: Path) -> None:
    """Every matrix of a model in another type, as dynamic mixes have it: the values of the `gguf` package on the
    reference, and the same in the layouts of the CPU kernels."""
    model = tiny.target("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    config = model.config.get_text_config()
    state = model.state_dict()
    matrices = [name for name, values in state.items() if values.dim() == 2 and name != "lm_head.weight"]
    types = dict(zip(matrices, cycle(sorted(BLOCKS.keys() - NOT_IN_PACKAGE)), strict=False))
    path = ggufs.write(tmp_path / "mix.gguf", "llama", config, state, mix=types)
    file = gguf.GGUFReader(path)
    want = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in file.tensors if len(t.shape) > 1}
    _, dense, _ = load_target(path)
    ops = CpuOps(threads=1)
    _, packed, _ = load_target(path, ops=ops)
    assert dense.keys() == packed.keys()
    for name, weight in packed.items():
        torch.testing.assert_close(ops.unpack(weight), dense[name].float(), rtol=0, atol=0, msg=name)
    down = torch.from_numpy(want["blk.0.ffn_down.weight"].copy())
    assert torch.equal(dense["layers.0.down"], down)
    assert {t.tensor_type.name for t in file.tensors} > set(types.values())
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(OutriderError, match=r"unsupported type 99 \(known: .*IQ1_S, .*IQ4_XS, MXFP4, .*TQ2_0\)"):
        load_target(path)


def test_an_nvfp4_matrix_with_a_factor(tmp_path: Path) -> None:
    """Converters write the checkpoint's second scale as a tensor of its own: such a file was refused as having tensors
    left over, and that is every NVFP4 file they write."""
    model = tiny.target("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    config = model.config.get_text_config()
    path = tmp_path / "factors.gguf"
    mix = {"model.layers.0.mlp.down_proj.weight": "NVFP4", "model.layers.1.self_attn.q_proj.weight": "NVFP4"}
    factors = {"blk.0.ffn_down": 0.125, "blk.1.attn_q": 0.37}
    scalars = {f"{name}.scale": factor for name, factor in factors.items()}
    scalars |= {f"{name}.input_scale": 3.0 for name in factors}
    ggufs.write(path, "llama", config, model.state_dict(), mix=mix, scalars=scalars)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for ops in (ReferenceOps(), CpuOps(threads=1)):
        _, weights, _ = load_target(path, ops=ops)
        down = ops.unpack(weights["layers.0.down"]) if isinstance(ops, CpuOps) else weights["layers.0.down"]
        want = torch.from_numpy(stored["blk.0.ffn_down.weight"]) * 0.125  # a power of two: exact
        assert torch.equal(down, want)
    _, weights, _ = load_target(path)
    q = weights["layers.1.qkv"][:256]
    want = torch.from_numpy(stored["blk.1.attn_q.weight"]) * np.float32(0.37)
    torch.testing.assert_close(q, want[unpermute(4, 256)], rtol=3e-7, atol=0)
    size = stored_size(hub.resolve(path), model_config(hub.resolve(path)))
    (held,) = [held for held in size.layouts if held.format.startswith("NVFP4")]
    assert (held.format, held.cpu) == ("NVFP4 with a factor", "float32")


@pytest.mark.parametrize("name", ARCHS)
def test_gguf_gives_the_same_model_as_safetensors(name: str, tmp_path: Path) -> None:
    model, path = make(name, tmp_path / "model.gguf")
    want_config, want, _ = load_target(tiny.write(model, tmp_path / "folder", tokenizer=False))
    config, got, _ = load_target(path)
    assert got.keys() == want.keys()
    for key in want:
        assert torch.equal(got[key], want[key]), key  # a q or k row out of order, or a norm without its +1, shows here
    for ours, theirs in zip(config.layers, want_config.layers, strict=True):
        assert (ours.attn.kv_layer, ours.intermediate) == (theirs.attn.kv_layer, theirs.intermediate)
        assert ours.attn.group == theirs.attn.group or name == "qwen2"  # the converter drops its window
        assert ours.rope == theirs.rope or name == "llama3"  # its tensors have their own test below
        assert (
            abs(ours.attn.scale - theirs.attn.scale) < 1e-9 or name == "gemma3"
        )  # 24 there: no key of the format says so
    for field in ("tied", "softcap", "moe", "ple_dim", "vocab_size", "max_context", "qkv_bias", "qk_norm"):
        assert getattr(config, field) == getattr(want_config, field), field


class PackingOps(ReferenceOps):
    """Keeps what it is given, tables too; refuses Q8_0."""

    capabilities = replace(ReferenceOps.capabilities, quantizes_tables=True)

    def __init__(self) -> None:
        self.dense = 0

    def pack_weights(self, parts: Sequence[Weight], device: Any) -> Any:
        return None if parts[0].format.name == "Q8_0" else list(parts)

    def prepare(self, x: Tensor) -> Tensor:
        self.dense += 1
        return x


def wide_llama(path: Path, kind: str) -> Path:
    """Rows of 64: whole blocks of 32."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config).float()
    tiny.randomise(model, 3)
    return ggufs.write(path, "llama", config, model.state_dict(), quantise=kind)


def test_packing_ops_get_the_stored_rows_and_no_dequantised_copy(tmp_path: Path) -> None:
    path = wide_llama(tmp_path / "q4.gguf", "Q4_1")
    ops = PackingOps()
    _, packed, _ = load_target(path, ops=ops)
    _, dense, _ = load_target(path)
    assert ops.dense == 0
    files = hub.resolve(path)
    assert files.gguf is not None
    stored = files.gguf.tensors["blk.0.ffn_gate.weight"]
    gate, _ = packed["layers.0.gate_up"]
    blocks = gate.tensors["blocks"].numpy()
    assert blocks.base is not None and np.array_equal(blocks, stored.data())  # a view of the file, not a copy
    assert [p.shape for p in packed["layers.0.qkv"]] == [(64, 64), (32, 64), (32, 64)]
    for key in ("layers.0.qkv", "layers.0.gate_up", "embed", "head"):
        again = torch.cat([p.dense() for p in packed[key]]).numpy()
        assert np.array_equal(again, dense[key].numpy()), key


def test_ops_that_refuse_to_pack_get_dense_weights(tmp_path: Path) -> None:
    ops = PackingOps()
    _, weights, _ = load_target(wide_llama(tmp_path / "q8.gguf", "Q8_0"), ops=ops)
    assert ops.dense == 6 and isinstance(weights["layers.0.qkv"], Tensor)


def test_rounding_a_quantised_file_is_refused_in_one_line(tmp_path: Path) -> None:
    from outrider.ops.cpu.ops import CpuOps

    with pytest.raises(
        OutriderError, match=r"is quantised already \(Q4_1\): --quantize rounds dense checkpoints; leave it out"
    ):
        load_target(wide_llama(tmp_path / "q4.gguf", "Q4_1"), ops=CpuOps(1), quantize="int4")
    _, dense = make("llama", tmp_path / "dense.gguf")
    load_target(dense, ops=CpuOps(1), quantize="int8")


def test_llama3_rope_scaling_is_recovered_from_the_stored_factors(tmp_path: Path) -> None:
    def file(factors: np.ndarray) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "rope.gguf", "llama")
        for key, value in (
            ("context_length", 1024),
            ("embedding_length", 128),
            ("block_count", 1),
            ("feed_forward_length", 64),
        ):
            writer.add_uint32(f"llama.{key}", value)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(500000.0)
        writer.add_tensor("token_embd.weight", np.zeros((8, 128), np.float32))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "rope.gguf"

    inv = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wave = 2 * np.pi / inv
    factors = []
    for length in wave:  # as llama.cpp's converter writes them
        if length < 8192 / 4.0:
            factors.append(1.0)
        elif length > 8192 / 1.0:
            factors.append(32.0)
        else:
            smooth = (8192 / length - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    rope = ModelConfig.from_hf(hub.resolve(file(np.array(factors))).config).layers[0].rope
    assert (rope.scaling, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    with pytest.raises(OutriderError, match="rope_freqs"):
        hub.resolve(file(np.linspace(1, 7, 64)))


def test_tokenizer_template_and_stop_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    _, path = make("qwen3", tmp_path / "model.gguf", tokenizer=True)
    config, _, text = load_target(path)
    tokenizer = Tokenizer(text)
    assert config.eos_ids == (1, 4) and tokenizer.eos_ids == (1, 4)  # eos, and the end of a turn
    ids = tokenizer.encode("all the 12 <|im_end|>")
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["a", "l", "l", "Ġthe", "Ġ", "1", "2", "Ġ", "<|im_end|>"]
    assert tokenizer.decode(ids, keep_special=True) == "all the 12 <|im_end|>"
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_scored_tokenizer_merges_by_score(tmp_path: Path) -> None:
    """SentencePiece-like: the best-scored piece is merged first, bytes stand in for what is unknown."""
    from outrider.weights.gguf import GGUF
    from outrider.weights.gguf_text import text_files

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁a", "ba", "▁ab"]
    scores = np.array([0.0] * 259 + [-9, -9, -9, -3, -2, -1, -4], np.float32)
    kinds = np.array([2, 3, 3] + [6] * 256 + [1] * 7, np.int32)
    meta = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": kinds, "bos_token_id": 1}
    tokenizer = Tokenizer(text_files(GGUF(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in meta.items()}, {}, b"")))

    def cut(text: str) -> list[str]:
        return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, bos=True)]

    assert cut("ab") == ["<s>", "▁ab"]
    assert cut("aba") == ["<s>", "▁a", "ba"]  # ba (-1) before ▁a (-2) before ab (-3)
    assert cut("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aba é", bos=True)) == "aba é"


def test_gemma4_tokenizer_merges_by_rank_and_keeps_runs_of_newlines(tmp_path: Path) -> None:
    from outrider.weights.gguf import GGUF
    from outrider.weights.gguf_text import text_files

    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\n",
        "\n\n",
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "<turn|>",
    ]
    kinds = np.array([3] * 4 + [6] * 256 + [1] * 7 + [3], np.int32)
    meta = {
        "model": "gemma4",
        "tokens": pieces,
        "merges": ["a b", "▁ a"],
        "token_type": kinds,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    tokenizer = Tokenizer(text_files(GGUF(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in meta.items()}, {}, b"")))
    ids = tokenizer.encode("a ab\n\n\nb a<turn|>", bos=True)
    tokens_of_text = [tokenizer.backend.id_to_token(i) for i in ids]
    assert tokens_of_text == ["<bos>", "a", "▁", "ab", "\n\n", "\n", "b", "▁a", "<turn|>"]
    assert tokenizer.decode(ids) == "a ab\n\n\nb a" and tokenizer.eos_ids == (1, 267)


def test_text_is_cut_as_the_original_tokenizers_cut_it() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from outrider.weights.gguf_text import SPLITS

    assert SPLITS["qwen2"] == PRETOKENIZE_REGEX
    assert SPLITS["llama-bpe"] == TikTokenConverter("").pattern  # Llama 3's


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    _, path = make("smollm2", tmp_path / "model.gguf")
    sound = path.read_bytes()
    where = tmp_path / "bad.gguf"

    def refused(data: bytes, match: str) -> None:
        where.write_bytes(data)
        with pytest.raises(OutriderError, match=match) as caught:
            load_target(where)
        assert "\n" not in str(caught.value)

    refused(b"", "not a GGUF file")
    refused(b"GGML" + sound[4:], "magic")
    refused(sound[:4] + b"\x09" + sound[5:], "version 9")
    refused(sound[:300], "truncated")
    refused(sound[:-5], "runs past the end")
    refused(sound[:8] + b"\xff" * 8 + sound[16:], "truncated")
    refused(sound.replace(b"llama", b"gpt-j"), "architecture 'gpt-j' is not supported")
    refused(
        sound.replace(b"blk.1.attn_v.weight", b"blk.1.attn_x.weight"),
        r"model.layers.1.self_attn.v_proj.weight is missing",
    )
    refused(sound.replace(b"llama.embedding_length", b"llama.embedding_lengtX"), "embedding_length should be a number")


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    _, path = make("smollm2", tmp_path / "model.gguf")
    first = fingerprint(hub.resolve(path))
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(path.read_bytes())
    assert fingerprint(hub.resolve(copy)) == first
    copy.write_bytes(path.read_bytes()[:-1] + b"\x77")
    assert fingerprint(hub.resolve(copy)) != first


@pytest.mark.parametrize("merges", [["a b", "a zz"], ["ab"]], ids=["unknown", "one part"])
def test_a_merge_outside_the_vocabulary_is_refused_in_one_line(merges: list[str], tmp_path: Path) -> None:
    from outrider.weights.gguf import GGUF
    from outrider.weights.gguf_text import build

    meta = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "merges": merges}
    with pytest.raises(OutriderError, match="a merge uses a token outside the vocabulary"):
        build(GGUF(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in meta.items()}, {}, b""))
