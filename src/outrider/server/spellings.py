"""Translates other engines' spellings of a request's fields into those of schema.py: samplers that are off, other forms
of `tool_choice`, other ways to ask for thinking. Nothing here guesses: a field that would change an answer and is not
supported stays in and is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

from ..types import DEFAULT_TEMPERATURE

Fields = dict[str, object]

# Unsupported samplers and switches of other engines, with the values that mean "off". Other values are refused.
OFF: dict[str, tuple[object, ...]] = {
    "typical_p": (1,), "typical": (1,), "tfs": (1,), "tfs_z": (1,), "top_a": (0,), "mirostat": (0,),
    "mirostat_mode": (0,), "dynatemp_range": (0,), "dynamic_temperature": (False,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "smoothing_factor": (0,),
    "top_n_sigma": (-1, 0), "penalty_alpha": (0,), "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,), "num_beams": (1,), "use_beam_search": (False,), "length_penalty": (1,),
    "early_stopping": (False,), "ban_eos_token": (False,), "include_reasoning": (True,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "detokenize": (True,), "documents": ([],), "lora": ([],), "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
}  # fmt: skip
OFF_IN_CHAT: dict[str, tuple[object, ...]] = {"best_of": (1,), "suffix": ("",)}
# Sampling where neither the request nor the model's generation_config.json sets a value. Small models produce nonsense
# at temperature 1 over the whole vocabulary, OpenAI's and Anthropic's default. A temperature alone keeps requests on
# the fastest path of a CPU (engine/host.py); top-p would not. Ollama's clients get Ollama's own.
UNCHANGED: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
OPENAI: Mapping[str, float] = {"temperature": DEFAULT_TEMPERATURE}
OLLAMA: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
MAX_LOGPROBS = 20
MAX_BIASES = 1024


def whole(value: object) -> object:
    """Converts 4.0 to 4: JSON has one type of numbers, and some languages write all of them as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(whole)]


def top(value: object) -> object:
    """vLLM's -1 means as many as the server reports."""
    return MAX_LOGPROBS if value == -1 else whole(value)


Top = Annotated[int, BeforeValidator(top)]  # number of alternatives


def biases(value: object) -> object:
    """OpenAI's {"15": 1.5}, and llama.cpp's [[15, 1.5], [" text", -2], [16, false]] (false: never), as one map."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise ValueError(f"must be an object or a list of pairs, at most {MAX_BIASES} of them")
    out: dict[int | str, float | bool] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("must hold pairs of a token id or a text and a number")
        key = whole(pair[0])
        bias = pair[1]
        if isinstance(key, str) and isinstance(value, dict) and key.isascii() and key.isdigit() and len(key) < 10:
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int | str) or not 0 < len(str(key)) <= 256:
            raise ValueError("keys must be token ids or texts of 1 to 256 characters")
        if bias is not False and (
            isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100
        ):
            raise ValueError("a bias must be a number in [-100, 100], or false for a token that may not come")
        out[key] = False if bias is False else float(bias)
    return out


Biases = Annotated[dict[int | str, float | bool], BeforeValidator(biases)]


def split_prompts(given: object) -> list[str | list[object]]:
    """Splits a prompt field into texts and lists of token ids. Texts may stand between ids: [1, 2, "text", 3] is one
    prompt, as in llama.cpp."""
    if isinstance(given, str) or (isinstance(given, list) and any(isinstance(one, int) for one in given)):
        return [given]
    if not isinstance(given, list) or not all(isinstance(one, str | list) for one in given):
        raise ValueError("must be a text, token ids, or a list of either")
    return given


Prompts = Annotated[
    list[str | list[object]],
    BeforeValidator(split_prompts, json_schema_input_type=str | list[str | int | list[str | int]]),
]
Texts = Annotated[  # or one
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given, json_schema_input_type=str | list[str]),
]


def spelled(fields: Fields) -> Fields:
    """Renames fields to the names in schema.py."""
    chat = "messages" in fields
    off = {**OFF, **OFF_IN_CHAT} if chat else OFF
    out = {k: v for k, v in fields.items() if k not in off or v not in off[k]}
    limit = out.pop("n_predict", None)  # llama.cpp's max_tokens
    if limit is not None:
        limit = -1 if limit == -2 else limit  # -2: until the context is full
        if any(out.get(name, limit) != limit for name in ("max_tokens", "max_completion_tokens")):
            raise ValueError("n_predict and max_tokens are two names of one limit, and differ")
        out["max_tokens"] = limit
    likeliest = out.pop("n_probs", None)  # llama.cpp's logprobs
    if likeliest:
        out |= {"logprobs": True, "top_logprobs": likeliest} if chat else {"logprobs": likeliest}
    if all(out.get(name) in (None, 1) for name in ("repetition_penalty", "repeat_penalty")):
        out.pop("repeat_last_n", None)  # window of a penalty that is off
    return thinking(tool_choice(out)) if chat else out


def tool_choice(fields: Fields) -> Fields:
    """Converts words, Mistral's "any", a bare name and OpenAI's `allowed_tools` (other tools are not offered) to one
    form."""
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("auto", "none", "required", "any"):
        return {**fields, "tool_choice": "required" if kind == "any" else kind}
    if not isinstance(choice, dict):
        return fields
    if kind in ("function", "tool") and "function" not in choice and "name" in choice:
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # flat in the Responses API
        tools = fields.get("tools")
        if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) and isinstance(tools, list):
            names = [_name(tool) for tool in allowed["tools"]]
            offered = [tool for tool in tools if _name(tool) in names]
            return {**fields, "tools": offered, "tool_choice": allowed.get("mode", "auto")}
    return fields


def _name(tool: object) -> object:
    """The name of a function, as JSON or as a validated tool."""
    function = tool.get("function", tool) if isinstance(tool, dict) else getattr(tool, "function", None)
    return function.get("name") if isinstance(function, dict) else getattr(function, "name", None)


def thinking(fields: Fields) -> Fields:
    """Translates Qwen's `enable_thinking`, DeepSeek's `thinking` and OpenRouter's `reasoning` into our two fields."""
    out = dict(fields)
    switch = out.get("enable_thinking")
    if isinstance(switch, bool):
        del out["enable_thinking"]
        options = out.get("chat_template_kwargs") or {}
        out["chat_template_kwargs"] = {"enable_thinking": switch, **options} if isinstance(options, dict) else options
    deepseek = out.get("thinking")
    if isinstance(deepseek, dict) and deepseek.get("type") in ("enabled", "disabled", "adaptive", "auto"):
        del out["thinking"]
        out.setdefault("reasoning_effort", "none" if deepseek["type"] == "disabled" else "medium")
    openrouter = out.get("reasoning")
    known = {"effort", "enabled", "exclude", "summary", "max_tokens"}
    if isinstance(openrouter, dict) and openrouter.keys() <= known and not openrouter.get("exclude"):
        del out["reasoning"]
        switch = openrouter.get("enabled")
        effort = openrouter.get("effort")
        if not effort and isinstance(switch, bool):
            effort = "medium" if switch else "none"
        if effort is not None:
            out.setdefault("reasoning_effort", effort)
    return out
