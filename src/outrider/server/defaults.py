"""How answers are sampled where a request says nothing and the model's generation_config.json says nothing either.

Small models talk nonsense at temperature 1 over the whole vocabulary, which is OpenAI's and Anthropic's default. A
temperature alone keeps requests on the fastest path of a CPU (engine/host.py); a cut by top-p would not. Ollama's
clients get Ollama's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..types import DEFAULT_TEMPERATURE

UNCHANGED: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
OPENAI: Mapping[str, float] = {"temperature": DEFAULT_TEMPERATURE}
OLLAMA: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
