"""Routing: the holder of a prompt's beginning first, unless it is busy; else the least loaded."""

from __future__ import annotations

import json

from outrider.cluster.prefix import BLOCK_BYTES, PrefixMap, prefix_keys, rank


def body(*texts: str, **more: object) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": t} for t in texts], "seed": 1}).encode()


def test_keys_are_those_of_the_beginning() -> None:
    long = "word " * 100
    one = prefix_keys(body(long, "a question " * 20))
    two = prefix_keys(body(long, "another one " * 20))
    assert one and one[:3] == two[:3] and one != two
    assert prefix_keys(body(long, model="a", max_tokens=3)) == prefix_keys(
        body(long, model="bb", max_tokens=400)
    )  # what stands before is no prompt
    assert (
        not prefix_keys(body("short")) and not prefix_keys(b"") and not prefix_keys(b'{"model": "' + b"x" * 999 + b'"}')
    )
    assert len(prefix_keys(b'{"prompt": "' + b"x" * 10 * BLOCK_BYTES)) == 10


def test_the_longest_beginning_wins_and_the_dead_are_forgotten() -> None:
    seen: PrefixMap[str] = PrefixMap()
    seen.sent([b"1", b"2"], "a")
    seen.sent([b"1", b"2", b"3"], "b")
    alive = {"a": 0, "b": 0}
    assert seen.holders([b"1", b"2", b"3", b"4"], alive) == ["b"]
    assert seen.holders([b"1", b"2", b"9"], alive) == ["a", "b"]
    assert seen.holders([b"9"], alive) == [] and seen.holders([], alive) == []
    assert seen.holders([b"1", b"2", b"3"], {"a": 0}) == ["a"]
    seen.gone("b")
    assert seen.holders([b"1", b"2", b"3"], alive) == ["a"] and len(seen._seen) == 2


def test_the_map_is_bounded() -> None:
    seen: PrefixMap[str] = PrefixMap(most=4)
    for i in range(100):
        seen.sent([b"root", b"%d" % i], "a")
    assert len(seen._seen) == 4 and seen.holders([b"root"], {"a": 0}) == ["a"]


def test_a_busy_holder_is_passed_over() -> None:
    assert rank({"a": 3, "b": 0}, ["a"], slack=4) == [["a"], ["b"]]
    assert rank({"a": 5, "b": 0}, ["a"], slack=4) == [["a", "b"]]
    assert rank({"a": 5, "b": 0}, [], slack=4) == [["a", "b"]] and rank({}, [], 4) == []
    assert rank({"a": 1, "b": 0}, ["a", "b"], slack=4) == [["a", "b"]]
