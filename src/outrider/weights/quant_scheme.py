"""Which matrices of a checkpoint are quantised, and how each is stored.

A configuration's `quantization_config` names a method; the method's entry in `METHODS` turns the rest of it into a
`QuantScheme`, a function from a module's name to the `QuantReader` of its matrix. A new method needs a reader and an
entry here; GGUF files need neither, since each of their tensors has a type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from ..models.config import text_part
from ..models.names import normalise
from ..types import OutriderError, bad_input
from .quant_reader import QuantReader, by_columns, float8, int_quantized, nvfp4, pack_quantized

Settings = Mapping[str, object]  # a configuration's `quantization_config`
# takes a module's name (`model.layers.0.mlp.down_proj`); None: dense
QuantScheme = Callable[[str], QuantReader | None]
NOT_LINEAR = ("embed_tokens", "embed_tokens_per_layer")  # modules that "Linear" does not include


# ---- reading settings -----------------------------------------------------------------------------------------------
def linear(module: str) -> bool:
    return module.rpartition(".")[2] not in NOT_LINEAR


def matches(module: str, targets: Sequence[str], contained: bool = False) -> bool:
    """True if a list of names and `re:` patterns matches a module, with or without a wrapper's prefix of the text
    tower. contained: a plain name matches anywhere in the module's name, as in AWQ's tools."""
    names = [module]
    if module.startswith("model."):
        names += [f"model.language_model.{module[6:]}", f"language_model.{module}"]
    for target in targets:
        if target.startswith("re:"):
            if any(re.match(target[3:], name) for name in names):
                return True
        elif normalise(target) == module or (contained and target in module):
            return True
    return False


def all_but(dense: Sequence[str], stored: QuantReader) -> QuantScheme:
    """Assigns one reader to every linear module, except those whose names contain one of these."""
    return lambda module: stored if linear(module) and not matches(module, dense, contained=True) else None


def strings(settings: Settings, *keys: str) -> list[str]:
    """Names in the first of these keys that holds a list; [] if none does."""
    for key in keys:
        values = settings.get(key)
        if isinstance(values, list | tuple):
            return [str(v) for v in values]
    return []


def whole(settings: Settings, key: str, default: int | None, method: str) -> int:
    value = settings.get(key, default)
    if type(value) is not int:
        raise refused(method, f"{key} should be a whole number, got {str(value)[:40]}")
    return value


def block_size(settings: Settings, key: str, method: str) -> tuple[int, int]:
    block = settings.get(key)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise refused(method, f"{key} {str(block)[:40]} is no pair of numbers")
    return block[0], block[1]


def refused(method: str, why: str) -> OutriderError:
    return OutriderError(f"quantization_config ({method}): {why}")


# ---- the methods ----------------------------------------------------------------------------------------------------
def by_awq(settings: Settings) -> QuantScheme:
    bits = whole(settings, "bits", default=4, method="awq")
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise refused("awq", f"{bits} bits in layout {version!r} are not supported; known: 4 bits, gemm")
    stored = by_columns("awq", 4, whole(settings, "group_size", default=128, method="awq"))
    return all_but(strings(settings, "modules_to_not_convert"), stored)


def by_fp8(settings: Settings) -> QuantScheme:
    """FP8 checkpoints. `weight_scale_inv` is a scale, not an inverse."""
    blocks = settings.get("weight_block_size") is not None
    stored = float8("fp8", block_size(settings, "weight_block_size", "fp8"), "weight_scale_inv") if blocks else None
    return all_but(strings(settings, "modules_to_not_convert", "ignored_layers"), stored or float8("fp8"))


def by_gptq(settings: Settings) -> QuantScheme:
    """GPTQ checkpoints. `dynamic`: "-:pattern" leaves modules dense, "+:pattern" or "pattern" changes their
    settings."""

    def stored(values: Settings) -> QuantReader:
        bits = whole(values, "bits", default=4, method="gptq")
        group = whole(values, "group_size", default=128, method="gptq")
        if bits not in (4, 8):
            raise refused("gptq", f"{bits} bits are not supported; known: 4, 8")
        less_one = settings.get("checkpoint_format") != "gptq_v2"
        ordered = bool(values.get("desc_act"))
        return by_columns("gptq", bits, group=max(0, group), less_one=less_one, ordered=ordered)

    usual = stored(settings)
    dense = strings(settings, "modules_to_not_convert", "modules_in_block_not_to_quantize")
    special = settings.get("dynamic")
    rules = special if isinstance(special, Mapping) else {}

    def find(module: str) -> QuantReader | None:
        if not linear(module) or module == "lm_head" or matches(module, dense, contained=True):
            return None
        for pattern, change in rules.items():
            if re.match(str(pattern).removeprefix("+:").removeprefix("-:"), module):
                if str(pattern).startswith("-:"):
                    return None
                return stored({**settings, **change}) if isinstance(change, Mapping) else usual
        return usual

    return find


def by_modelopt(settings: Settings) -> QuantScheme:
    nested = settings.get("quantization")  # the form of hf_quant_config.json
    settings = nested if isinstance(nested, Mapping) else settings
    algorithm = settings.get("quant_algo")
    dense = strings(settings, "ignore", "exclude_modules")
    each = settings.get("quantized_layers")
    layers = {normalise(str(k)): v for k, v in each.items()} if isinstance(each, Mapping) else {}

    def stored(algorithm: object) -> QuantReader | None:
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            return nvfp4("modelopt NVFP4", "weight", "weight_scale_2", divided=False)
        if algorithm == "FP8":
            return float8("modelopt")
        if algorithm in (None, "", "none"):
            return None
        raise refused("modelopt", f"{str(algorithm)[:40]} is not supported; known: NVFP4, FP8")

    usual = stored(algorithm) if algorithm != "MIXED_PRECISION" else None

    def find(module: str) -> QuantReader | None:
        if not linear(module) or matches(module, dense) or any(fnmatchcase(module, normalise(p)) for p in dense):
            return None
        named = layers.get(module)
        return stored(named.get("quant_algo")) if isinstance(named, Mapping) else usual

    return find


COMPRESSED = "compressed-tensors"


def by_compressed_tensors(settings: Settings) -> QuantScheme:
    """`config_groups` say which modules are stored how, `ignore` which are dense."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise OutriderError(f"quantization_config ({COMPRESSED}) has no config_groups")
    readers: list[tuple[list[str], QuantReader]] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise refused(COMPRESSED, f"{name} has no weights")
        layout = str(group.get("format") or settings.get("format") or "")
        readers.append((strings(group, "targets"), compressed_reader(layout, group["weights"])))
    dense = strings(settings, "ignore")

    def find(module: str) -> QuantReader | None:
        if matches(module, dense):
            return None
        named = next((stored for targets, stored in readers if matches(module, targets)), None)
        return named or next((stored for targets, stored in readers if linear(module) and "Linear" in targets), None)

    return find


def compressed_reader(layout: str, weights: Settings) -> QuantReader:
    kind = f"{weights.get('type', 'int')}{whole(weights, 'num_bits', default=8, method=COMPRESSED)}"
    strategy = weights.get("strategy")
    if layout == "pack-quantized" and kind in ("int4", "int8") and strategy in ("group", "channel"):
        group = whole(weights, "group_size", default=None, method=COMPRESSED) if strategy == "group" else 0
        if group not in (0, 16, 32, 64, 128, 256):
            raise refused(COMPRESSED, f"{layout} with {kind} weights in groups of {group} is not supported")
        ordered = weights.get("actorder") in ("group", True)
        return pack_quantized(int(kind[3:]), group, symmetric=bool(weights.get("symmetric", True)), ordered=ordered)
    if layout == "nvfp4-pack-quantized" and kind == "float4":
        return nvfp4(f"{COMPRESSED} {layout}", "weight_packed", "weight_global_scale", divided=True)
    if layout in ("float-quantized", "naive-quantized") and kind == "float8":
        if strategy == "block":
            return float8(f"{COMPRESSED} float-quantized", block_size(weights, "block_structure", COMPRESSED))
        if strategy in ("tensor", "channel"):
            return float8(f"{COMPRESSED} float-quantized")
    if layout in ("int-quantized", "naive-quantized") and kind == "int8" and strategy in ("tensor", "channel"):
        return int_quantized()
    raise refused(COMPRESSED, f"{layout or 'no format'} with {kind} weights by {strategy} is not supported")


METHODS: dict[str, Callable[[Settings], QuantScheme]] = {
    COMPRESSED: by_compressed_tensors,
    "awq": by_awq,
    "gptq": by_gptq,
    "fp8": by_fp8,
    "modelopt": by_modelopt,
    "modelopt_fp4": by_modelopt,
}


# ---- a checkpoint's --------------------------------------------------------------------------------------------------
def recipe(config: Settings, where: str) -> QuantScheme | None:
    """The scheme of a checkpoint's quantised matrices; None if nothing is quantised."""
    section = config.get("quantization_config") or text_part(config).get("quantization_config")
    if not section:
        return None
    method = str(section.get("quant_method")) if isinstance(section, dict) else None
    if not isinstance(section, dict) or method not in METHODS:
        known = f"known: {', '.join(METHODS)}"
        raise OutriderError(f"{where}: weights quantised by {str(method)[:40]!r} are not supported; {known}")
    with bad_input(OutriderError, lambda error: f"{where}: {error}"):
        return METHODS[method](section)
