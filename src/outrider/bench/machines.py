"""The machines that `outrider predict` and `outrider inspect` know: vendors' figures and the rates our kernels reach.
Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from ..types import OutriderError
from .rates import H200, Rates

# One row after the other, bytes and arithmetic in turn: a CPU core does not overlap them.
CPU_RATES = Rates(
    reach16=0.75, reach8=0.75, reach4=0.75, expert_reach=0.75, kv_reach=0.75,
    rate16=0.6, narrow_rate=0.6, narrow_rate_few=0.6,
    sharpness=1.0, kernel_us=2.0, ple_us=6.0, moe_us=20.0, row_us=0.0, row_power=1.0,
    draft_layer_us=10.0, draft_head_us=12.0,
)  # fmt: skip
TWO_CORES_RATES = CPU_RATES.scaled(reach=0.95, rate=1.0)


@dataclass(frozen=True)
class Hardware:
    """Vendor figures: bandwidth in GB/s, dense matrix rate in TFLOP/s (bf16; CPUs: 8-bit integer).

    memory: GB of 10^9 bytes, of NVIDIA's cards as CUDA reports them ("80 GB" are 84.9: vendors count in GiB, and the
    driver keeps a little)."""

    label: str
    bandwidth: float
    rate: float
    memory: float
    rates: Rates = H200
    is_cpu: bool = False
    narrow_drafter: bool = True  # a drafter's large head and layers are read in 8 bits
    measured: bool = False  # our engine's steps were measured on it

    @property
    def memory_bytes(self) -> int:
        return round(self.memory * 1e9)


def cpu(label: str, *, bandwidth: float, rate: float, memory: float, rates: Rates = CPU_RATES) -> Hardware:
    return Hardware(label, bandwidth, rate, memory, rates=rates, is_cpu=True, narrow_drafter=False)


MACHINES: Mapping[str, Hardware] = {
    "b200": Hardware("NVIDIA B200", 8000, 2250, 191.5),
    "h200": Hardware("NVIDIA H200", 4800, 989, 150.1, measured=True),
    "h100": Hardware("NVIDIA H100 SXM", 3350, 989, 84.9),
    "h100-pcie": Hardware("NVIDIA H100 PCIe", 2000, 756, 84.9),
    "a100": Hardware("NVIDIA A100 80GB SXM", 2039, 312, 85.0),
    "a100-40": Hardware("NVIDIA A100 40GB", 1555, 312, 42.3),
    "l40s": Hardware("NVIDIA L40S", 864, 362, 47.7),
    "l4": Hardware("NVIDIA L4", 300, 121, 23.7),
    "rtx-pro-6000": Hardware("NVIDIA RTX PRO 6000 Blackwell", 1792, 504, 101.9),
    "rtx5090": Hardware("NVIDIA RTX 5090", 1792, 210, 33.7),
    "rtx4090": Hardware("NVIDIA RTX 4090", 1008, 165, 25.4),
    "rtx3090": Hardware("NVIDIA RTX 3090", 936, 71, 25.4),
    "rtx5070ti": Hardware("NVIDIA RTX 5070 Ti", 896, 88, 16.6),
    "dgx-spark": Hardware("NVIDIA DGX Spark (GB10)", 273, 125, 128),
    "m3-max": Hardware("Apple M3 Max (40-core GPU)", 400, 28, 128),
    "m3-ultra": Hardware("Apple M3 Ultra (80-core GPU)", 819, 57, 512),
    "m4-max": Hardware("Apple M4 Max (40-core GPU)", 546, 34, 128),
    "strix-halo": Hardware("AMD Strix Halo", 256, 59, 128),
    "mi300x": Hardware("AMD MI300X", 5300, 1307, 192),
    "desktop-ddr5": cpu("Desktop CPU, 8 cores, dual-channel DDR5-5600", bandwidth=90, rate=1.6, memory=64),
    "server-ddr5": cpu("Server CPU, 32 cores, 8-channel DDR5-4800 with AMX", bandwidth=307, rate=20, memory=512),
    "cpu-2-cores": cpu(
        "Two x86-64 cores with AVX2", bandwidth=20.7, rate=0.28, memory=16, rates=TWO_CORES_RATES
    ),  # measured
}


def machine(name: str) -> Hardware:
    by_name = {key.replace("-", ""): hardware for key, hardware in MACHINES.items()}
    hardware = by_name.get(re.sub("[ _-]", "", name.lower()))
    if hardware is None:
        near = get_close_matches(name.lower(), MACHINES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise OutriderError(f"unknown machine {name!r}{hint}; known: {', '.join(MACHINES)}")
    return hardware
