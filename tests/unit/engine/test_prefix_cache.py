"""Shared prefixes: what is reused, what is evicted, and what that costs."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.engines import mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.cache import prefix
from outrider.cache.prefix import PrefixChain
from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.engine import Engine
from outrider.models.config import ModelConfig
from outrider.types import RequestStats

PAGE = 4
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip


def run_one(engine: Engine, id: str, prompt: list[int], **params: Any) -> tuple[list[int], RequestStats]:
    engine.submit(request(id, prompt, **{"max_tokens": 6, **params}))
    tokens: list[int] = []
    stats = None
    while engine.busy:
        for event in engine.step():
            tokens += event.tokens
            stats = event.stats or stats
        engine.check()
    assert stats is not None
    return tokens, stats


def share(store: KVStore, tokens: list[int]) -> None:
    chain = PrefixChain(PAGE)
    chain.extend(tokens, len(tokens))
    seq, _ = store.open(chain, len(tokens), PAGE)
    assert store.reserve(seq, len(tokens))
    store.share(seq, chain, tokens, len(tokens))
    store.close(seq)
    store.check()


def cached(store: KVStore, tokens: list[int]) -> int:
    chain = PrefixChain(PAGE)
    chain.extend(tokens, len(tokens))
    return store.prefix.match(chain, len(tokens), PAGE)[0]


def llama_store(pages: int) -> KVStore:
    spec = CacheSpec(2, 400, PAGE, 8, pages * PAGE)
    return KVStore(ModelConfig.from_hf(LLAMA), spec, torch.float32, "cpu")


@pytest.mark.parametrize("length", [33, 34, 32])
def test_a_cached_prefix_is_reused_whole(length: int) -> None:
    """The scheduler left out the last token and the cache another one: of 32 cached tokens 16 were reused (the
    reference backend shares multiples of 16)."""
    prompt = [2 + 5 * i % 60 for i in range(length)]
    engine = tiny_engine("llama")
    first, _ = run_one(engine, "a", prompt)
    again, stats = run_one(engine, "b", prompt)
    assert stats.cached_tokens == (length - 1) // 16 * 16 and again == first


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_drafter_that_starts_from_hidden_states_gets_the_last_one(draft_tokens: int) -> None:
    """The row before the last token is computed for a drafter that starts from it, and only then."""
    prompt = [2 + 5 * i % 60 for i in range(33)]
    model = tiny_model("dense")
    engine = tiny_engine("dense", mtp_drafter(model, "dense"), (), model=model, k=draft_tokens)
    first, _ = run_one(engine, "a", prompt)
    again, stats = run_one(engine, "b", prompt)
    assert again == first
    assert stats.cached_tokens == (32 if draft_tokens == 0 else 16)


def test_copies_are_drafted_from_the_first_step_after_a_whole_prefix() -> None:
    prompt = [3, 5, 7, 9, 11, 13, 15, 17] * 4 + [3]
    engine = tiny_engine("llama")
    run_one(engine, "a", prompt)
    engine.submit(request("b", prompt, max_tokens=6))
    engine.step()
    seq = engine.running("b")
    assert seq is not None and seq.stats.cached_tokens == 32 and seq.has_features
    assert seq.stats.drafted > 0, "the first step has nothing to prefill and drafts"


@pytest.mark.parametrize("variant", ["mistral", "dense", "llama"])
def test_entries_are_as_many_as_pages(variant: str) -> None:
    """Without a full layer evicted entries stayed for ever: 1,440 after 60 requests."""
    engine = tiny_engine(variant, max_batch=1, max_context=128, kv_tokens=160)
    for i in range(60):
        run(engine, [request(str(i), [2 + (7 * i + j * j) % 60 for j in range(96)], max_tokens=4)])
    pages = sum(group.pool.count for group in engine.store.groups.values())
    assert 0 < len(engine.store.prefix.entries) <= pages


@pytest.mark.parametrize("variant", ["mistral", "dense"])
def test_a_conversation_finds_its_prefix_beside_others(variant: str) -> None:
    """The last window of a long prompt is enough where all layers slide, whatever became of the pages before it."""
    model = tiny_model(variant)
    engine = tiny_engine(variant, model=model, max_batch=2, max_context=256)
    prompt = [2 + (3 * j + j * j) % 60 for j in range(81)]
    for i in range(4):
        run_one(engine, f"other {i}", [2 + (11 * i + j) % 60 for j in range(40)])
    first, _ = run_one(engine, "a", prompt)
    again, stats = run_one(engine, "b", [*prompt, *first[:-1], 5], max_tokens=8)
    assert stats.cached_tokens == 80
    alone, _ = run_one(tiny_engine(variant, model=model), "b", [*prompt, *first[:-1], 5], max_tokens=8)
    assert again == alone


def test_the_least_recently_used_text_is_evicted_whole() -> None:
    """The last page of every text went before the second to last of the oldest."""
    store = llama_store(40)
    old, recent = ([start + i for i in range(40)] for start in (0, 1000))
    share(store, old)
    share(store, recent)
    store.prefix.evict("full", store.groups["full"].pool.count - 1 - store.groups["full"].pool.free - 10)
    assert (cached(store, old), cached(store, recent)) == (0, 40)
    store.prefix.evict("full", 3)
    assert cached(store, recent) == 28, "from its end"
    store.check()


class OneByOne(OrderedDict[Any, Any]):
    """An order that may not be looked through as a whole."""

    def items(self) -> Any:
        raise AssertionError("all entries are looked through")

    values = items


def test_an_eviction_looks_at_no_other_entries() -> None:
    store = llama_store(90)
    share(store, list(range(160)))
    share(store, [*range(120), *range(500, 540)])
    store.prefix.entries = OneByOne(store.prefix.entries)
    free = store.groups["full"].pool.free
    for more in range(1, 40):
        store.prefix.evict("full", 1)
        assert store.groups["full"].pool.free == free + more
    store.prefix.entries = OrderedDict(store.prefix.entries)
    store.check()


def test_a_text_that_lost_its_first_pages_is_shared_again_without_holes() -> None:
    """A sequence shares from where it stopped: pages evicted since then would have left their successors orphaned."""
    store = llama_store(60)
    tokens = list(range(80))
    chain = PrefixChain(PAGE)
    chain.extend(tokens, 40)
    seq, _ = store.open(chain, 0, PAGE)
    assert store.reserve(seq, 80)
    store.share(seq, chain, tokens, 40)
    store.prefix.clear()
    store.share(seq, chain, tokens, 80)
    store.check()
    assert cached(store, tokens) == 80
    store.close(seq)
    store.prefix.clear()
    store.check()


def test_unused_prefixes_go_with_their_parents() -> None:
    now = [0.0]
    store = llama_store(60)
    store.prefix.seconds = lambda: now[0]
    chain = PrefixChain(PAGE)
    tokens = list(range(80))
    seq, _ = store.open(chain, 0, PAGE)
    assert store.reserve(seq, 80)
    for end in (20, 40, 60, 80):  # later chunks are newer than the pages before them
        now[0] = end
        store.share(seq, chain, tokens, end)
    store.close(seq)
    now[0] = 130.0
    store.prefix.drop_unused(60.0)
    store.check()
    assert len(store.prefix.entries) == 20, "the last chunk is in use, so those before it are"
    now[0] = 140.0
    store.prefix.drop_unused(60.0)
    assert not store.prefix.entries


def test_each_page_of_a_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk hashed the prompt from its first token on: 25 chunks of 400 tokens took 1,300 hashes."""
    hashes: list[int] = []
    blake2b = hashlib.blake2b

    def counted(data: bytes, **options: Any) -> Any:
        hashes.append(len(data))
        return blake2b(data, **options)

    monkeypatch.setattr(prefix.hashlib, "blake2b", counted)
    engine = tiny_engine("llama", max_batch=1)
    run(engine, [request("a", [2 + i % 60 for i in range(400)], max_tokens=12)])
    assert len(hashes) <= (400 + 12) // engine.config.page_size
