"""A cheapened draft model on the CPU: rounds in one call are those step by step, a shortlist and four bits change no
answer."""

import random

import pytest
import torch
from tests.engines import VARIANTS, VOCAB, request, run, tiny_engine
from tests.unit.spec.test_draft_model import AuditedDraftModel, batch

from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.lib import PackedKind
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import PackedWeight
from outrider.spec import draft_model
from outrider.spec.draft_model import shortlist
from outrider.spec.plan import CostPart
from outrider.types import DraftPlan, SamplingParams
from outrider.weights.load import dummy_weights

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64}
LISTED = torch.tensor([*range(40), 50, 63])
HOT = SamplingParams(temperature=1.0, seed=3)
OPS = CpuOps(2)


def compiled(seed: int, coarse: bool = False, variant: str = "llama"):
    """A tiny model of sizes that the library runs in one call; far from uniform, so that texts differ."""
    config = ModelConfig.from_hf({**VARIANTS[variant], **WIDE})
    weights = dummy_weights(config, "cpu", torch.float32, OPS, None, seed)
    for weight in weights.values():
        if weight.ndim >= 2:
            weight *= 6.0
    if coarse:
        weights = {name: OPS.coarse(w) if name != "embed" and w.ndim >= 2 else w for name, w in weights.items()}
    return OPS.compile(TextModel(config, weights, OPS))


def stepwise(model, listed) -> AuditedDraftModel:
    drafter = AuditedDraftModel(model, listed)
    drafter.chain = None
    return drafter


@pytest.mark.parametrize("listed", [None, LISTED])
@pytest.mark.parametrize("params", [SamplingParams(), HOT])
def test_a_round_in_one_call_is_the_round_step_by_step(listed, params, monkeypatch):
    """Sequences come and go, guesses are kept or refused at random, texts hold tokens that are not listed."""
    monkeypatch.setattr(draft_model, "READ_BESIDE", 20)
    model = compiled(5, coarse=True)
    rng = random.Random(0)
    whole = AuditedDraftModel(model, listed)
    steps = stepwise(model, listed)
    texts = {f"s{i}": [rng.randrange(VOCAB) for _ in range(n)] for i, n in enumerate((1, 9, 24))}
    for cycle in range(8):
        k = rng.randint(1, 5)
        some = {n: t for n, t in texts.items() if rng.random() < 0.7} or texts
        a, b = (d.propose(batch(some, params), k) for d in (whole, steps))
        full = a.lengths.tolist()
        for i, n in enumerate(full):
            assert n in (0, k) if cycle < 3 else n == k  # two texts at once may be too much for the first reading
            assert a.tokens[i, :n].tolist() == b.tokens[i, :n].tolist()
            torch.testing.assert_close(a.confidence[i, :n], b.confidence[i, :n], rtol=1e-4, atol=1e-5)
        for name, guess in zip(some, b.tokens.tolist()):
            texts[name] = [*texts[name], *guess[: rng.randint(0, k)], rng.randrange(VOCAB)]
        whole.audit()
    if listed is not None:
        assert not {t for t in a.tokens.flatten().tolist()} - {
            *LISTED.tolist(),
            *(t for text in texts.values() for t in text),
        }


def test_drafts_end_in_the_call_where_they_end_step_by_step():
    model = compiled(5)
    texts = {"a": [5, 6, 7], "b": [9] * 10, "c": [1, 2]}
    trust = [(i + 0.5) / 16 for i in range(16)]
    sure = stepwise(model, LISTED).propose(batch(texts), 5).confidence
    for stop, drop in ((0.3, 0.1), (0.0, float(sure[0, 1])), (2.0, 0.0), (0.0, 2.0)):
        drafts = []
        for drafter in (AuditedDraftModel(model, LISTED), stepwise(model, LISTED)):
            some = batch(texts)
            some.trust = trust
            some.plans = [DraftPlan("draft_model", 6, stop, each) for each in (drop, 0.0, drop)]
            drafts.append(drafter.propose(some, 5))
        assert drafts[0].lengths.tolist() == drafts[1].lengths.tolist()
        for i, n in enumerate(drafts[0].lengths.tolist()):
            assert drafts[0].tokens[i, :n].tolist() == drafts[1].tokens[i, :n].tolist()


REQUESTS = (
    dict(temperature=0.0), dict(temperature=1.0, seed=3), dict(temperature=0.8, seed=4, top_p=0.9),
    dict(temperature=0.7, seed=5, top_k=5),
    dict(temperature=0.0, repetition_penalty=1.3), dict(temperature=1.0, seed=6, presence_penalty=0.5, min_p=0.05),
    dict(logprobs=2),
)  # fmt: skip


def test_a_cheapened_draft_model_changes_no_answer():
    """The target's texts, alone and together, whatever K; a prompt longer than what is read in one go among them."""
    target = compiled(5)
    small = AuditedDraftModel(
        compiled(5, coarse=True), LISTED
    )  # the target's own weights in four bits, and part of its vocabulary
    engine = tiny_engine(drafter=small, model=target, names=(), kv=torch.bfloat16, page_size=16, prefill_chunk=32)
    plain = tiny_engine(model=target, names=(), kv=torch.bfloat16, page_size=16, prefill_chunk=32)
    prompts = [[i + 2, 7, 45, 7] if i else [3, 44, 8] * 100 for i in range(len(REQUESTS))]

    def made(k):
        return [request(str(i), p, k, **r) for i, (p, r) in enumerate(zip(prompts, REQUESTS))]

    want = run(plain, made(0))
    got = run(engine, [*made(4)[:2], *made(1)[2:4], *made(16)[4:]])
    small.audit()
    assert not small.tracks
    assert engine.metrics.accepted > engine.metrics.cycles / 2  # it does foresee something
    assert got == want
    # by the controller, in the executor of single calls
    assert run(engine, made(None)[:2]) == {n: want[n] for n in ("0", "1")}
    assert engine.executors[0].name == "host" and engine.executors[0].can_probe(CostPart("draft", "draft_model"))


def test_a_draft_model_that_fails_leaves_its_requests_to_plain_decoding(monkeypatch):
    target = compiled(5)
    small = AuditedDraftModel(compiled(5, coarse=True), LISTED)
    engine = tiny_engine(drafter=small, model=target, names=(), kv=torch.bfloat16, page_size=16, prefill_chunk=32)
    plain = tiny_engine(model=target, names=(), kv=torch.bfloat16, page_size=16, prefill_chunk=32)
    monkeypatch.setattr(small, "draft_on_host", lambda *args: 1 / 0)
    assert run(engine, [request("a", [3, 44, 8], 4)]) == run(plain, [request("a", [3, 44, 8], 0)])
    assert engine.executors[0].name == "host" and engine.metrics.drafter_failures == 1


def test_rounded_copies_keep_no_memory_of_what_they_are_made_from():
    block = OPS.packer.arena.block
    rounded = OPS.coarse(OPS.quantize(torch.randn((64, 128)), "int8"))
    arena_block = OPS.packer.arena.block
    assert (
        isinstance(rounded, PackedWeight)
        and rounded.c.kind == PackedKind.Q4_0
        and arena_block is not None
        and (block is None or arena_block is block)
    )
    assert not arena_block.data_ptr() <= rounded.c.data < arena_block.data_ptr() + arena_block.numel()


def test_the_latest_tokens_of_a_text_are_scored(monkeypatch):
    monkeypatch.setattr(draft_model, "MAX_UNLISTED", 2)
    track = draft_model.Track()
    known = bytearray(10)
    for tokens, scored in (([5, 6, 7], [6, 7]), ([5, 6, 7, 6], [7, 6])):
        track.scan(tokens, known)
        assert list(track.unlisted) == scored


def test_weights_in_four_bits():
    """The best scale leaves less error than the largest weight's alone would, and what is in four bits already is left
    alone."""
    torch.manual_seed(1)
    dense = torch.randn(40, 64)
    dense[3] = 0.0
    eight = OPS.quantize(dense, "int8")
    packed = OPS.coarse(eight)
    assert (
        isinstance(packed, PackedWeight)
        and packed.c.kind == PackedKind.Q4_0
        and packed.shape == (40, 64)
        and OPS.coarse(packed) is packed
    )
    error = OPS.unpack(packed) - dense
    block = dense.view(-1, 32)
    naive = block / (block.abs().amax(1, keepdim=True) / 7).clamp(min=1e-9)
    naive = (naive.round() - naive) * (block.abs().amax(1, keepdim=True) / 7)
    assert float(error.norm()) < 0.95 * float(naive.norm()) and not error[3].any()
    straight = OPS.unpack(OPS.coarse(dense)) - dense  # from float32, not by way of eight bits
    assert float(straight.norm()) < 1.02 * float(error.norm())


def test_the_shortlist_holds_what_stands_elsewhere():
    listed = shortlist(262_144, [5, 262_143, 300_000])
    assert listed is not None and listed.tolist() == [*range(65_536), 262_143]
    assert len(shortlist(151_936)) == draft_model.SHORTLIST_TOKENS
    assert shortlist(49_152) is None  # a small vocabulary is scored whole
