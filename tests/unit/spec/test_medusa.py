"""Medusa heads: both file formats, the formula, refusals by name, and answers unchanged."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.engines import VOCAB, request, run, tiny_engine, tiny_model

from outrider.spec.medusa import Medusa
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import OutriderError, SamplingParams
from outrider.weights.files import from_folder

H, HEADS, LAYERS = 32, 3, 2


def tensors(names: str, tied: bool = False, bias: bool = True) -> dict[str, torch.Tensor]:
    gen, out = torch.Generator().manual_seed(0), {}
    for i in range(HEADS):
        for j in range(LAYERS):
            block = f"{i}.{j}.linear" if names == "original" else f"blocks.{i}.layers.{j}"
            out[block + ".weight"] = torch.randn(H, H, generator=gen) * 0.3
            noise = torch.randn(H, generator=gen)
            if bias:
                out[block + ".bias"] = noise
        head = torch.randn(VOCAB, H, generator=gen)
        if not tied:
            out[f"{i}.{LAYERS}.weight" if names == "original" else f"lm_heads.{i}.weight"] = head
    return out


def folder(path, weights, **config):
    path.mkdir(exist_ok=True)
    whole = {"model_type": "medusa", "medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, **config}
    (path / "config.json").write_text(json.dumps(whole))
    save_file(weights, path / "model.safetensors")
    return from_folder(path, str(path))


def batch(model, features, params, own_noise=False):
    count = features.shape[0]
    return SimpleNamespace(
        features=features, last=torch.zeros(count, dtype=torch.int64), position=torch.full((count,), 9), ops=model.ops,
        vocab=VOCAB,
        sampling=sampling_batch([params] * count, [[1]] * count, [[]] * count, VOCAB, "cpu"), own_noise=own_noise,
    )  # fmt: skip


@pytest.mark.parametrize("names", ["original", "vllm"])
def test_heads_follow_the_formula(tmp_path, names):
    model, w = tiny_model("llama"), tensors(names)
    medusa = Medusa.load(folder(tmp_path / "m", w), model, "cpu", torch.float32)
    hidden = torch.randn(2, H)
    draft = medusa.propose(batch(model, torch.cat((hidden, torch.randn(2, 5)), 1), SamplingParams()), 2)
    plain = tensors("original")
    for i in range(2):
        x = hidden
        for j in range(LAYERS):
            x = x + F.silu(F.linear(x, plain[f"{i}.{j}.linear.weight"], plain[f"{i}.{j}.linear.bias"]))
        assert torch.equal(draft.tokens[:, i], F.linear(x, plain[f"{i}.{LAYERS}.weight"]).argmax(-1))
    assert draft.lengths.tolist() == [2, 2] and draft.q is None


def test_more_tokens_than_heads_are_not_drafted(tmp_path):
    model = tiny_model("llama")
    medusa = Medusa.load(folder(tmp_path / "m", tensors("original", bias=False)), model, "cpu", torch.float32)
    for own_noise in (False, True):
        draft = medusa.propose(batch(model, torch.randn(2, H), SamplingParams(temperature=1.0), own_noise), 5)
        assert draft.tokens.shape == (2, 5) and draft.lengths.tolist() == [HEADS] * 2
        if own_noise:
            assert draft.q.shape == (2, 5, VOCAB)
            torch.testing.assert_close(draft.q[:, :HEADS].sum(-1), torch.ones(2, HEADS))


def test_tied_heads_use_the_targets_head(tmp_path):
    model = tiny_model("dense")  # with soft-capped logits
    medusa = Medusa.load(
        folder(tmp_path / "m", tensors("original", tied=True), tied_to_target=True), model, "cpu", torch.float32
    )
    hidden = torch.randn(2, H)
    (w, b), (w2, b2) = medusa.heads[0].layers
    x = hidden + F.silu(F.linear(hidden, w, b))
    x = x + F.silu(F.linear(x, w2, b2))
    torch.testing.assert_close(medusa.logits(hidden, medusa.heads[0]), model.logits(x))


@pytest.mark.parametrize(
    ("spoil", "config", "says"),
    [
        (lambda w: w.pop("1.0.linear.weight"), {}, "1.0.linear.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), {}, "extra is left over"),
        (lambda w: w.update({"0.2.weight": torch.zeros(VOCAB + 1, H)}), {}, "shape"),
        (lambda w: None, {"hidden_size": 64}, "hidden_size 64"),
        (lambda w: None, {"medusa_num_heads": None}, "medusa_num_heads"),
        (lambda w: None, {"tied_to_target": True}, "left over"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, spoil, config, says):
    weights = tensors("original")
    spoil(weights)
    with pytest.raises(OutriderError, match=says):
        Medusa.load(folder(tmp_path / "m", weights, **config), tiny_model("llama"), "cpu", torch.float32)


@pytest.mark.parametrize("verify", ["coupled", "rejection", "block"])
def test_answers_are_the_targets(tmp_path, verify):
    model = tiny_model("llama")
    medusa = Medusa.load(folder(tmp_path / "m", tensors("original")), model, "cpu", torch.float32)
    asked = [dict(temperature=0.0), dict(temperature=0.9, seed=2, top_p=0.9, repetition_penalty=1.2)]
    requests = [request(str(i), [i + 2, 7, 7], 1 + i % 5, **asked[i % 2]) for i in range(5)]
    out = run(tiny_engine("llama", medusa, model=model, verify=verify, names=()), requests)
    plain = run(
        tiny_engine("llama", model=model, names=()),
        [request(r.id, r.prompt, 0, **asked[i % 2]) for i, r in enumerate(requests)],
    )
    same = [
        r.id for i, r in enumerate(requests) if verify == "coupled" or i % 2 == 0
    ]  # rejection keeps the law, not the text
    assert [out[i] for i in same] == [plain[i] for i in same]


def test_a_head_that_knows_the_next_token_is_believed(tmp_path):
    """Head 0 guesses the token after the newest one: on a target that always says the same, heads that say it too are
    right."""
    model, weights = tiny_model("llama"), tensors("original", bias=False)
    for i in range(HEADS):
        weights[f"{i}.{LAYERS}.weight"] *= 0
    medusa = Medusa.load(folder(tmp_path / "m", weights), model, "cpu", torch.float32)  # all logits equal: token 0
    engine = tiny_engine("llama", medusa, model=model, names=(), k=3)
    engine.submit(request("a", [3, 4], logit_bias={0: 100.0}))
    events = []
    while engine.busy:
        events += engine.step()
    assert events[-1].stats.drafted == events[-1].stats.accepted > 0
