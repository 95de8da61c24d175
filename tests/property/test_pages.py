"""Random schedules of open / append / commit / share / close conserve pages, whatever is evicted on the way."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.prefix import PrefixChain
from outrider.cache.store import CacheSpec, KVStore, SeqCache
from outrider.models.config import ModelConfig

GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_hidden_layers": 3, "intermediate_size": 16, "vocab_size": 32, "sliding_window": 10,
    "sliding_window_pattern": 3,
}  # fmt: skip
PAGE = 4


def store(tokens: int = 200, slots: int = 4) -> KVStore:
    return KVStore(ModelConfig.from_hf(GEMMA), CacheSpec(slots, 120, PAGE, 8, tokens), torch.float32, "cpu")


def opened(kv: KVStore, tokens: list[int]) -> tuple[SeqCache, PrefixChain, int]:
    """A sequence on the cached pages of all tokens but the last."""
    chain = PrefixChain(PAGE)
    chain.extend(tokens, len(tokens) - 1)
    seq, hit = kv.open(chain, len(tokens) - 1, PAGE)
    return seq, chain, hit


step = st.tuples(
    st.sampled_from(["open", "append", "append", "commit", "share", "close"]), st.integers(0, 3), st.integers(1, 8)
)


@settings(max_examples=60)
@given(st.lists(step, max_size=60), st.integers(60, 200))
def test_pages_are_conserved(steps: list[tuple[str, int, int]], capacity: int) -> None:
    kv = store(capacity)
    live: list[tuple[SeqCache, PrefixChain, list[int], list[int]]] = []  # cache, keys, [committed], tokens
    for what, which, n in steps:
        if what == "open" and kv.free_slots:
            tokens = [i % (2 + which) for i in range(n * 5)]
            seq, chain, hit = opened(kv, tokens)
            assert hit % PAGE == 0 and hit < len(tokens)
            live.append((seq, chain, [hit], tokens))
        elif live:
            seq, chain, committed, tokens = live[which % len(live)]
            if what == "append":
                target = min(committed[0] + n, len(tokens) + 40, 110)
                if kv.reserve(seq, target):
                    while len(tokens) < target:
                        tokens.append(len(tokens) % 7)
                    committed[0] = max(committed[0], target - n // 2)  # some of it was rejected
            elif what == "commit":
                kv.commit(seq, committed[0])
            elif what == "share":
                kv.share(seq, chain, tokens, committed[0] - committed[0] % PAGE)
            elif what == "close":
                kv.close(seq)
                live = [entry for entry in live if entry[0] is not seq]
        kv.check()
    for seq, _, _, _ in live:
        kv.close(seq)
    kv.prefix.clear()
    kv.check()
    assert all(group.pool.free == group.pool.count - 1 for group in kv.groups.values())


def test_sliding_memory_is_bounded() -> None:
    kv = store(tokens=4000, slots=1)
    seq, _ = kv.open()
    most = 0
    for length in range(1, 110):
        assert kv.reserve(seq, length + 3)
        kv.commit(seq, length)
        most = max(most, len(seq.pages["sliding"].held()))
    assert most <= -(-(10 + 3) // PAGE) + 2
    assert len(seq.pages["full"].held()) == -(-112 // PAGE)


def test_prefix_hit_needs_the_window() -> None:
    kv = store(tokens=400)
    tokens = list(range(30))
    seq, chain, _ = opened(kv, tokens)
    kv.reserve(seq, 30)
    kv.share(seq, chain, tokens, 28)
    kv.close(seq)
    again, _, hit = opened(kv, tokens)
    assert hit == 28
    kv.close(again)
    kv.prefix.evict("sliding", 100)
    again, _, hit = opened(kv, tokens)
    assert hit == 0, "sliding pages are gone, so the window before the hit is not there"
    kv.close(again)
    kv.check()
