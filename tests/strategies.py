"""Hypothesis strategies that several property tests draw from."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# how a request chooses its tokens, by field of SamplingParams
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.7, 1.3]),
    "seed": st.integers(0, 2**40),
    "top_p": st.sampled_from([1.0, 0.8]),
    "top_k": st.sampled_from([0, 10]),
    "min_p": st.sampled_from([0.0, 0.05]),
    "max_tokens": st.integers(1, 20),
}
