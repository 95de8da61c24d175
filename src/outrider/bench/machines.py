"""The machines that `outrider predict` and `outrider inspect` know: vendors' figures, and the rates that our kernels
reach. Torch-free."""

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
    narrow_drafter: bool = True  # the drafter's large head and layers are stored in 8 bits
    measured: bool = False  # steps of our engine were measured on it

    @property
    def memory_bytes(self) -> int:
        return round(self.memory * 1e9)


def cpu(label: str, *, bandwidth: float, rate: float, memory: float, rates: Rates = CPU_RATES) -> Hardware:
    return Hardware(label, bandwidth, rate, memory=memory, rates=rates, is_cpu=True, narrow_drafter=False)


MACHINES: Mapping[str, Hardware] = {
    "b200": Hardware(label="NVIDIA B200", bandwidth=8000, rate=2250, memory=191.5),
    "h200": Hardware(label="NVIDIA H200", bandwidth=4800, rate=989, memory=150.1, measured=True),
    "h100": Hardware(label="NVIDIA H100 SXM", bandwidth=3350, rate=989, memory=84.9),
    "h100-pcie": Hardware(label="NVIDIA H100 PCIe", bandwidth=2000, rate=756, memory=84.9),
    "a100": Hardware(label="NVIDIA A100 80GB SXM", bandwidth=2039, rate=312, memory=85.0),
    "a100-40": Hardware(label="NVIDIA A100 40GB", bandwidth=1555, rate=312, memory=42.3),
    "l40s": Hardware(label="NVIDIA L40S", bandwidth=864, rate=362, memory=47.7),
    "l4": Hardware(label="NVIDIA L4", bandwidth=300, rate=121, memory=23.7),
    "rtx-pro-6000": Hardware(label="NVIDIA RTX PRO 6000 Blackwell", bandwidth=1792, rate=504, memory=101.9),
    "rtx5090": Hardware(label="NVIDIA RTX 5090", bandwidth=1792, rate=210, memory=33.7),
    "rtx4090": Hardware(label="NVIDIA RTX 4090", bandwidth=1008, rate=165, memory=25.4),
    "rtx3090": Hardware(label="NVIDIA RTX 3090", bandwidth=936, rate=71, memory=25.4),
    "rtx5070ti": Hardware(label="NVIDIA RTX 5070 Ti", bandwidth=896, rate=88, memory=16.6),
    "dgx-spark": Hardware(label="NVIDIA DGX Spark (GB10)", bandwidth=273, rate=125, memory=128),
    "m3-max": Hardware(label="Apple M3 Max (40-core GPU)", bandwidth=400, rate=28, memory=128),
    "m3-ultra": Hardware(label="Apple M3 Ultra (80-core GPU)", bandwidth=819, rate=57, memory=512),
    "m4-max": Hardware(label="Apple M4 Max (40-core GPU)", bandwidth=546, rate=34, memory=128),
    "strix-halo": Hardware(label="AMD Strix Halo", bandwidth=256, rate=59, memory=128),
    "mi300x": Hardware(label="AMD MI300X", bandwidth=5300, rate=1307, memory=192),
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
