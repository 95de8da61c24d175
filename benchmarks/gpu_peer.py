"""Hugging Face transformers on the same shapes: random weights on the GPU from the same config, timed through
`generate`.

A step is the time between two forward passes of the target, so prompt processing does not count. With random weights no
draft is right, so an assisted cycle emits one token; what it costs does not depend on that.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch

from gpu_rig import collect
from outrider.models.config import Foreign

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# drafted tokens per cycle; steps or cycles that are timed
K = 4
STEPS = 10


class Timed(TypedDict):
    """Timings of a peer. A part that fails is left out, and `errors` says why."""

    mtp_ms: float | None  # an assisted cycle
    mtp_k: int
    context: int
    errors: list[str]
    version: NotRequired[str]
    build_s: NotRequired[float]


class Peer(Timed):
    ar_ms: dict[int, float]  # a plain step, by batch


def build(raw: Foreign, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The text model of a config.json, or an assistant, with random weights made on the device."""
    import transformers as t

    assistant = "assistant" in raw["model_type"]
    unified = "unified" in raw["model_type"] and hasattr(
        t, "Gemma4UnifiedTextConfig"
    )  # older ones: the same text layers
    text_kind = t.Gemma4UnifiedTextConfig if unified else t.Gemma4TextConfig
    body = {k: v for k, v in raw["text_config"].items() if k not in ("model_type", "dtype")}
    if assistant and not unified:
        body["vocab_size_per_layer_input"] = 0  # it insists on this beside a width of 0
    config: PretrainedConfig = text_kind(**body)
    if assistant:
        kind = t.Gemma4UnifiedAssistantConfig if unified else t.Gemma4AssistantConfig
        names = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
        config = kind(text_config=config, **{name: raw[name] for name in names})
    with torch.device(device):
        model = t.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def step_ms(
    model: PreTrainedModel, context: int, batch: int, vocab: int, assistant: PreTrainedModel | None = None
) -> float:
    """Median time from one call of the target to the next, after the prompt and the first step."""
    ids = torch.randint(3, vocab, (batch, context), device=model.device)
    at: list[float] = []
    handle = model.register_forward_pre_hook(lambda *_: at.append(time.perf_counter()))
    model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, max_new_tokens=STEPS + 3, do_sample=False
    )
    handle.remove()
    return median(b - a for a, b in pairwise(at[2:])) * 1e3


def measure(raw: Foreign, drafter: Foreign, context: int, batches: tuple[int, ...]) -> Peer:
    result: Peer = {"ar_ms": {}, "mtp_ms": None, "mtp_k": K, "context": context, "errors": []}
    model = assistant = None
    try:
        import transformers

        result["version"] = transformers.__version__
        vocab = raw["text_config"]["vocab_size"]
        began = time.perf_counter()
        model = build(raw)
        result["build_s"] = round(time.perf_counter() - began, 2)
        for batch in batches:
            result["ar_ms"][batch] = step_ms(model, context, batch, vocab)
        assistant = build(drafter)
        assistant.generation_config.num_assistant_tokens = K
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        result["mtp_ms"] = step_ms(model, context, 1, vocab, assistant)
    except Exception as error:  # a peer that does not run must not cost us our own figures
        result["errors"].append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
    del model, assistant
    collect()
    return result
