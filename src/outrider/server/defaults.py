"""The sampling defaults, if neither the request nor the model's generation_config.json sets a value.

Small models produce nonsense at temperature 1 over the whole vocabulary, which is OpenAI's and Anthropic's default. A
temperature alone keeps requests on the fastest path of a CPU (engine/host.py); top-p would not. Ollama's clients get
Ollama's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..types import DEFAULT_TEMPERATURE

UNCHANGED: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
OPENAI: Mapping[str, float] = {"temperature": DEFAULT_TEMPERATURE}
OLLAMA: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
