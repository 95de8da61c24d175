"""Rates that our kernels reach on an H200, fitted to benchmarks/history/gpu.jsonl by `python tools/fit_predict.py`.

The values of `H200` and `CELLS` are written by that script: do not edit them by hand. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rates:
    """Shares of a machine's vendor figures, and fixed times in microseconds."""

    reach16: float  # share of the bandwidth when reading weights of 16 bits
    reach8: float
    reach4: float
    expert_reach: float  # reach of experts' weights, relative to that for their bits
    kv_reach: float
    rate16: float  # share of the matrix rate with weights of 16 bits
    narrow_rate: float  # with weights of 4 to 8 bits
    narrow_rate_few: float  # the same, in passes of up to FEW_ROWS rows
    sharpness: float  # order of the norm by which moving bytes and arithmetic overlap; 1: no overlap
    kernel_us: float  # per kernel inside a captured graph
    ple_us: float  # additional per layer with its own embeddings
    moe_us: float  # additional per layer of experts
    row_us: float  # per layer, times the number of further rows to the power of `row_power`
    row_power: float
    draft_layer_us: float  # per layer of a drafter and draft step
    draft_head_us: float  # per draft step

    def scaled(self, *, reach: float, rate: float) -> Rates:
        """Rates with these shares of bandwidth and arithmetic for all formats."""
        bytes_read = {"reach16": reach, "reach8": reach, "reach4": reach, "kv_reach": reach, "expert_reach": 1.0}
        arithmetic = {"rate16": rate, "narrow_rate": rate, "narrow_rate_few": rate}
        return replace(self, **bytes_read, **arithmetic)


FEW_ROWS = 40  # maximum rows of the kernels for few rows of quantised products


@dataclass(frozen=True)
class Cell:
    """A published measurement: milliseconds of one cycle at CONTEXT tokens."""

    size: str  # Gemma 4's size
    format: str  # bf16, int4, fp8, …
    batch: int
    k: int
    ms: float

    @property
    def bits(self) -> int:
        return {"bf16": 16, "int4": 4}.get(self.format, 8)


CONTEXT = 1024  # tokens of every sequence in a cell
# <fitted>
H200 = Rates(
    reach16=0.9015,
    reach8=0.99,
    reach4=0.891,
    expert_reach=0.9089,
    kv_reach=1.0,
    rate16=0.7998,
    narrow_rate=0.4443,
    narrow_rate_few=0.2857,
    sharpness=1.441,
    kernel_us=2.468,
    ple_us=2.705,
    moe_us=14.27,
    row_us=1.252,
    row_power=0.71,
    draft_layer_us=18.54,
    draft_head_us=17.03,
)
# of each size's weights, by which a model is recognised
PARAMETERS = {"12B": 11907350320, "26B-A4B": 25233141790, "31B": 30697345340, "E2B": 4628569379, "E4B": 7463013418}
CELLS: tuple[Cell, ...] = (
    Cell("31B", "bf16", batch=1, k=0, ms=15.361),
    Cell("31B", "bf16", batch=8, k=0, ms=17.241),
    Cell("31B", "bf16", batch=1, k=4, ms=16.441),
    Cell("31B", "bf16", batch=8, k=4, ms=20.584),
    Cell("E2B", "bf16", batch=1, k=0, ms=1.934),
    Cell("E2B", "bf16", batch=8, k=0, ms=2.152),
    Cell("E2B", "bf16", batch=32, k=0, ms=2.701),
    Cell("E2B", "bf16", batch=64, k=0, ms=3.296),
    Cell("E2B", "bf16", batch=1, k=4, ms=2.519),
    Cell("E2B", "bf16", batch=8, k=4, ms=3.282),
    Cell("E2B", "bf16", batch=32, k=4, ms=5.268),
    Cell("E2B", "bf16", batch=64, k=4, ms=6.98),
    Cell("26B-A4B", "bf16", batch=1, k=0, ms=2.674),
    Cell("26B-A4B", "bf16", batch=8, k=0, ms=6.926),
    Cell("26B-A4B", "bf16", batch=32, k=0, ms=13.306),
    Cell("26B-A4B", "bf16", batch=64, k=0, ms=16.478),
    Cell("26B-A4B", "bf16", batch=1, k=4, ms=5.757),
    Cell("26B-A4B", "bf16", batch=8, k=4, ms=14.655),
    Cell("26B-A4B", "bf16", batch=32, k=4, ms=19.104),
    Cell("31B", "int4", batch=1, k=0, ms=6.173),
    Cell("31B", "int4", batch=8, k=0, ms=8.214),
    Cell("31B", "int4", batch=1, k=4, ms=7.419),
    Cell("31B", "int4", batch=8, k=4, ms=16.2),
    Cell("31B", "bf16", batch=32, k=0, ms=23.952),
    Cell("31B", "bf16", batch=64, k=0, ms=31.373),
    Cell("31B", "bf16", batch=32, k=4, ms=33.896),
    Cell("31B", "bf16", batch=64, k=4, ms=58.76),
    Cell("31B", "int4", batch=32, k=0, ms=18.637),
    Cell("31B", "int4", batch=32, k=4, ms=37.151),
    Cell("26B-A4B", "bf16", batch=64, k=4, ms=23.033),
    Cell("E2B", "bf16", batch=1, k=0, ms=2.042),
    Cell("E2B", "bf16", batch=1, k=4, ms=2.472),
    Cell("E2B", "bf16", batch=1, k=8, ms=2.841),
    Cell("E2B", "bf16", batch=1, k=16, ms=3.662),
    Cell("E4B", "bf16", batch=1, k=0, ms=3.393),
    Cell("E4B", "bf16", batch=1, k=4, ms=3.859),
    Cell("E4B", "bf16", batch=1, k=8, ms=4.244),
    Cell("E4B", "bf16", batch=1, k=16, ms=5.04),
    Cell("12B", "bf16", batch=1, k=0, ms=6.567),
    Cell("12B", "bf16", batch=1, k=4, ms=7.396),
    Cell("12B", "bf16", batch=1, k=8, ms=8.222),
    Cell("12B", "bf16", batch=1, k=16, ms=9.917),
    Cell("26B-A4B", "bf16", batch=1, k=0, ms=3.128),
    Cell("26B-A4B", "bf16", batch=1, k=4, ms=6.931),
    Cell("26B-A4B", "bf16", batch=1, k=8, ms=9.706),
    Cell("26B-A4B", "bf16", batch=1, k=16, ms=14.146),
    Cell("31B", "bf16", batch=1, k=0, ms=15.699),
    Cell("31B", "bf16", batch=1, k=4, ms=16.838),
    Cell("31B", "bf16", batch=1, k=8, ms=17.905),
    Cell("31B", "bf16", batch=1, k=16, ms=20.696),
    Cell("31B", "int4", batch=1, k=0, ms=6.02),
    Cell("31B", "int4", batch=1, k=4, ms=7.298),
    Cell("31B", "int4", batch=8, k=0, ms=8.095),
    Cell("31B", "int4", batch=8, k=4, ms=16.131),
    Cell("31B", "fp8", batch=1, k=0, ms=8.799),
    Cell("31B", "fp8", batch=1, k=4, ms=9.998),
    Cell("26B-A4B", "int8", batch=1, k=0, ms=2.094),
    Cell("26B-A4B", "int8", batch=1, k=4, ms=4.442),
    Cell("12B", "int4", batch=1, k=0, ms=3.077),
    Cell("12B", "int4", batch=1, k=4, ms=4.03),
    Cell("E4B", "int4", batch=1, k=0, ms=2.084),
    Cell("E2B", "int4", batch=1, k=0, ms=1.414),
    Cell("E2B", "int4", batch=1, k=4, ms=1.929),
    Cell("31B", "bf16", batch=1, k=0, ms=15.312),
    Cell("31B", "bf16", batch=1, k=4, ms=16.48),
    Cell("31B", "bf16", batch=1, k=7, ms=17.27),
    Cell("31B", "bf16", batch=8, k=0, ms=17.279),
    Cell("31B", "bf16", batch=8, k=4, ms=20.563),
    Cell("31B", "bf16", batch=8, k=7, ms=22.339),
    Cell("12B", "bf16", batch=1, k=0, ms=6.45),
    Cell("12B", "bf16", batch=1, k=4, ms=7.261),
    Cell("12B", "bf16", batch=1, k=7, ms=7.874),
    Cell("12B", "bf16", batch=8, k=0, ms=7.433),
    Cell("12B", "bf16", batch=8, k=4, ms=10.037),
    Cell("12B", "bf16", batch=8, k=7, ms=11.681),
    Cell("E4B", "bf16", batch=1, k=0, ms=3.244),
    Cell("E4B", "bf16", batch=1, k=4, ms=3.696),
    Cell("E4B", "bf16", batch=1, k=7, ms=3.976),
    Cell("31B", "bf16", batch=32, k=0, ms=23.913),
    Cell("31B", "bf16", batch=32, k=4, ms=33.12),
    Cell("31B", "bf16", batch=32, k=7, ms=43.52),
)
# </fitted>
