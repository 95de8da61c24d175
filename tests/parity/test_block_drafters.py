"""Block drafters against the classes of their authors (dflash, speculators), and where those are not published as a
package against a plain implementation written here from the definition: draft logits within 1e-4, given the same target
states. They catch a tap read at another layer, a slot that is off by one, a norm at another place, a window that is one
too wide, a kernel whose taps are reversed, a head fed the wrong token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.block_drafters import LAYOUTS, context_of, net, speculators, tensors
from tests.engines import tiny_model
from tests.quantised import SCHEMES, convert
from torch import Tensor

TARGETS = {name: tiny_model(name) for name in ("llama", "qwen3", "dense")}
CONTEXT = 9
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def streams(seed: int = 0, rows: int = CONTEXT, taps: int = 2) -> list[Tensor]:
    return list(torch.randn((taps, rows, 32), generator=torch.Generator().manual_seed(seed)))


def draft_logits(block: Any, ids: Tensor, context: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs of the head [B, H] and base logits [B, V] of one block behind the context."""
    hidden = block.backbone(ids[None], context_of(block, context), torch.tensor([len(context[0])]))[0]
    return hidden, block.logits(hidden)


# ---- z-lab -------------------------------------------------------------------------------------------------
def zlab(raw: dict[str, Any]) -> Any:
    dflash = pytest.importorskip("dflash.model")
    config = dflash.Qwen3Config(**raw, num_target_layers=2)
    kind = dflash.DFlash2DraftModel if "DFlash2" in raw["architectures"][0] else dflash.DFlashDraftModel
    return kind(config).eval()


def loaded(model: Any, raw: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights, put into a module and returned by their names on disk."""
    state = tensors(raw, seed)
    weights = {f"{n}.weight" if "codebook" in n and n not in model.state_dict() else n: t for n, t in state.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("rotary" in name for name in missing), (missing, unexpected)
    return state


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["z-lab", "z-lab-old", "dflash2"])
@torch.inference_mode()
def test_dflash_is_zlabs(tmp_path: Path, layout: str, target: str) -> None:
    model = TARGETS[target]
    raw = LAYOUTS[layout]
    theirs = zlab(raw)
    block = net(tmp_path, raw, loaded(theirs, raw), model)
    ids = torch.tensor([7, 4, 4, 4, 4, 4])
    context = streams()
    hidden, z = draft_logits(block, ids, context)
    want = theirs(
        target_hidden=torch.cat(context, -1)[None],
        noise_embedding=model.embed(ids)[None],
        position_ids=torch.arange(CONTEXT + len(ids))[None],
    )
    torch.testing.assert_close(hidden, want[0], **CLOSE)

    def head(h):
        return F.linear(h, model.head)

    torch.testing.assert_close(z, theirs.compute_logits(want, head)[0], **CLOSE)
    if layout == "dflash2":
        path, *_ = theirs.propose(want[:, 1:], ids[:1], head, 0.0)
        token = ids[:1]
        ours = []
        for j in range(1, len(ids)):
            unary, columns = z[j : j + 1].topk(block.config.selector_top)
            best = block.select(hidden[j : j + 1], unary, columns, token).argmax(-1)
            token = columns[0, best]
            ours.append(int(token))
        assert ours == path[0].tolist()


# ---- speculators -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_dspark_heads_are_speculators(tmp_path: Path, kind: str) -> None:
    heads = speculators("speculators.models.dspark.model_definitions")
    raw = LAYOUTS["dspark" if kind == "vanilla" else f"dspark-{kind}"]
    state = tensors(raw, 3)
    block = net(tmp_path, raw, state, TARGETS["llama"])
    markov = heads.MarkovHead(
        verifier_vocab_size=64, draft_vocab_size=64, markov_rank=6, hidden_size=32, head_type=kind
    )
    markov.load_state_dict({n.removeprefix("markov_head."): t for n, t in state.items() if n.startswith("markov")})
    sure = heads.ConfidenceHead(38)
    sure.load_state_dict({n.removeprefix("confidence_head."): t for n, t in state.items() if n.startswith("conf")})
    hidden = streams(4, 5, 1)[0]
    before = torch.tensor([3, 9, 60, 1, 4])
    want = markov.block_bias(prev_token_ids=before[None], hidden_states=hidden[None])[0]
    embedded = markov.prev_embeddings(before)
    state_now = None
    for j in range(5):
        bias, state_now, e = block.markov(before[j : j + 1], hidden[j : j + 1], state_now)
        torch.testing.assert_close(bias[0], want[j], **CLOSE)
        ours = block.confidence(hidden[j : j + 1], e)
        torch.testing.assert_close(ours[0], sure(torch.cat((hidden[j], embedded[j]))).sigmoid(), **CLOSE)


@pytest.mark.parametrize("layout", ["speculators-eagle3", "eagle3", "eagle3-qwen", "eagle3.1"])
@torch.inference_mode()
def test_eagle3_is_speculators(tmp_path: Path, layout: str) -> None:
    """Two steps of every row: the first from the target's features, the second from the drafter's own."""
    core = speculators("speculators.models.eagle3.core")
    from transformers import LlamaConfig, Qwen3Config

    raw = LAYOUTS[layout]
    body = dict(raw.get("transformer_layer_config", raw))
    kind = LlamaConfig if body["model_type"] == "llama" else Qwen3Config
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    layer = kind(**{k: body[k] for k in (*keep, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")})
    layer._attn_implementation = "eager"
    flags = {k: raw[k] for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if k in raw}
    core.Eagle3SpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})
    config = core.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[1, 2], **flags
    )
    theirs = core.Eagle3DraftModel(config).eval()
    model = TARGETS["llama"]
    state = tensors(raw, 5)
    state["t2d"] = torch.zeros(64, dtype=torch.bool)
    state["embed_tokens.weight"] = torch.randn((64, 32), generator=torch.Generator().manual_seed(6))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("verifier") for name in missing), (missing, unexpected)
    block = net(tmp_path, raw, state, model)
    context = streams(7)
    ids = torch.randint(0, 64, (CONTEXT,), generator=torch.Generator().manual_seed(8))
    seen: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda m, i, out: seen.append(out[0]))
    theirs(torch.cat(context, -1)[None], ids[None], torch.zeros((1, CONTEXT), dtype=torch.long), ttt_steps=2)
    feature = block.context(context)
    for t in (0, 4, 7):
        kv = context_of(block, [s[:t] for s in context], ids[:t])
        own_rows = block.rows(block.layers[0], feature, torch.tensor([t]), 2)
        h, back = block.feature_step(ids[t : t + 1], feature[t : t + 1], kv, own_rows, 0)
        torch.testing.assert_close(block.logits(h)[0], seen[0][t], **CLOSE)
        h, _ = block.feature_step(ids[t + 1 : t + 2], back, kv, own_rows, 1)
        torch.testing.assert_close(block.logits(h)[0], seen[1][t], **CLOSE)
    assert block.ids is not None and block.ids.tolist() == [*range(10), *range(30, 60)]


# ---- from the definition -----------------------------------------------------------------------------------
def norm(x: Tensor, w: Tensor | None) -> Tensor:
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return y if w is None else y * w


def turn(x: Tensor, at: Tensor, theta: float, rotated: int) -> Tensor:
    """x [rows, heads, D]: pair (i, i + D/2) by position · theta^(-2i/D), for the first `rotated` pairs."""
    out = x.clone()
    dim = x.shape[-1]
    for i in range(rotated):
        angle = at[:, None] * theta ** (-2.0 * i / dim)
        a = x[..., i]
        b = x[..., i + dim // 2]
        out[..., i], out[..., i + dim // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def plain_block(
    state: dict[str, Tensor], raw: dict[str, Any], ids: Tensor, context: list[Tensor], eagle: bool
) -> Tensor:
    """DeepSpec's drafters for Qwen 3 and Gemma 4, layer by layer; returns base logits of every slot. eagle: the one
    layer over [embedding; feature] instead, causal."""
    gemma = "global_head_dim" in raw
    dim, heads = (16, 4) if gemma else (8, 4)
    theta, rotated, scale = (1e6, 2, 1.0) if gemma else (1e4, dim // 2, dim**-0.5)
    joined = F.linear(torch.cat(context, -1), state["fc.weight"])
    x = F.embedding(ids, state["embed_tokens.weight"]) * (32**0.5 if gemma else 1.0)
    rows = len(ids)
    known = 0 if eagle else len(context[0])
    c = joined if eagle else norm(joined, state["hidden_norm.weight"])
    at = torch.arange(known + rows).float()
    for i in range(raw["num_hidden_layers"]):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in state.items() if n.startswith(f"layers.{i}.")}
        h = norm(x, w["input_layernorm.weight"])
        if eagle:
            h = torch.cat((h, norm(c, w["hidden_norm.weight"])), -1)
            x = c
        every = h if eagle else torch.cat((c, h))
        q = turn(norm(F.linear(h, w["self_attn.q_proj.weight"]).view(rows, heads, dim), w["self_attn.q_norm.weight"]),
                 at[known:], theta, rotated)  # fmt: skip
        raw_k = F.linear(every, w["self_attn.k_proj.weight"]).view(len(every), -1, dim)
        k = turn(norm(raw_k, w["self_attn.k_norm.weight"]), at, theta, rotated)
        v = norm(raw_k, None) if gemma else F.linear(every, w["self_attn.v_proj.weight"]).view(len(every), -1, dim)
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if eagle:
            scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        y = F.linear(
            torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1), w["self_attn.o_proj.weight"]
        )
        x = x + (norm(y, w["post_attention_layernorm.weight"]) if gemma else y)
        h = norm(x, w["pre_feedforward_layernorm.weight" if gemma else "post_attention_layernorm.weight"])
        gate = F.linear(h, w["mlp.gate_proj.weight"])
        up = F.linear(h, w["mlp.up_proj.weight"])
        y = F.linear((F.gelu(gate, approximate="tanh") if gemma else F.silu(gate)) * up, w["mlp.down_proj.weight"])
        x = (x + norm(y, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"] if gemma else x + y
    z = F.linear(norm(x, state["norm.weight"]), state["lm_head.weight"])
    return 30.0 * torch.tanh(z / 30.0) if gemma else z


@pytest.mark.parametrize("layout", ["dspark", "deepseek-dflash", "gemma-dspark"])
@torch.inference_mode()
def test_dspark_backbone_is_the_definition(tmp_path: Path, layout: str) -> None:
    raw = LAYOUTS[layout]
    state = tensors(raw, 9)
    ids = torch.tensor([7, 4, 4, 4, 4])
    context = streams(10)
    block = net(tmp_path, raw, state, TARGETS["dense" if "gemma" in layout else "qwen3"])
    torch.testing.assert_close(
        draft_logits(block, ids, context)[1], plain_block(state, raw, ids, context, False), **CLOSE
    )
    assert block.config.from_anchor and block.config.max_tokens == 5


@pytest.mark.parametrize("layout", ["deepseek-eagle3", "gemma-eagle3"])
@torch.inference_mode()
def test_deepseeks_eagle3_is_the_definition(tmp_path: Path, layout: str) -> None:
    raw = LAYOUTS[layout]
    state = tensors(raw, 11)
    context = streams(12)
    ids = torch.randint(0, 64, (CONTEXT,), generator=torch.Generator().manual_seed(13))
    block = net(tmp_path, raw, state, TARGETS["dense" if "gemma" in layout else "qwen3"])
    want = plain_block(state, raw, ids, context, True)
    feature = block.context(context)
    for t in (0, 3, 8):
        kv = context_of(block, [s[:t] for s in context], ids[:t])
        own_rows = block.rows(block.layers[0], feature, torch.tensor([t]), 1)
        h, _ = block.feature_step(ids[t : t + 1], feature[t : t + 1], kv, own_rows, 0)
        torch.testing.assert_close(block.logits(h)[0], want[t], **CLOSE)


# ---- quantised --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scheme", ["ct-int4-g32", "ct-fp8-channel", "ct-nvfp4", "modelopt-nvfp4", "fp8-block", "awq", "gptq-int4"]
)
@torch.inference_mode()
def test_quantised_checkpoints_are_the_values_they_mean(tmp_path: Path, scheme: str) -> None:
    """The layers' matrices in the formats that targets come in; embedding, head, fc and norms dense."""
    target = tiny_model("llama")
    raw = {**LAYOUTS["z-lab"], "intermediate_size": 64}
    stored, meant = convert({f"model.{name}": value for name, value in tensors(raw).items()}, scheme)
    assert len(stored) > len(meant)
    settings = SCHEMES[scheme][1]
    whole = net(tmp_path / "whole", raw, meant, target)
    some = net(tmp_path / "some", {**raw, "quantization_config": settings}, stored, target)
    streams = [torch.randn(7, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    ids = torch.tensor([[9, 4, 4, 4, 4, 4]])
    want, got = (n.backbone(ids, context_of(n, streams), torch.tensor([7])) for n in (whole, some))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
