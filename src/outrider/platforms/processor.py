"""The processor: its name, the features that kernels need, its cores and which of them are fast."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

SYS = Path("/sys/devices")
CGROUP = Path("/sys/fs/cgroup/cpu.max")
CPUINFO = Path("/proc/cpuinfo")
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}
# names of features in macOS and in Linux
DARWIN_FEATURES = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.avx512vl": "avx512vl",
    "hw.optional.avx512dq": "avx512dq",
    "hw.optional.avx512vnni": "avx512_vnni",
    "hw.optional.f16c": "f16c",
    "hw.optional.fma": "fma",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}
# Numbers of IsProcessorFeaturePresent, if there is no cpuid.dll. Every processor with AVX2 that Windows 10 supports has
# FMA and F16C. There is no number for VNNI, so levels beyond AVX2 are then not known to run.
WINDOWS_FEATURES = {40: ("avx2", "fma", "f16c"), 41: ("avx512f",), 43: ("asimddp",)}
CPUID_LIBRARY = Path(__file__).with_name("cpuid.dll")  # cpuid.c, in Windows's wheels
CPUID_FEATURES = (  # in the order of its bits
    *("f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"),
    "avx_vnni",
)


def machine() -> str:
    """The processor's architecture as Linux names it: x86_64, aarch64."""
    name = platform.machine()
    return MACHINES.get(name, name)


def cpu_flags() -> set[str]:
    """The processor's features, by Linux's names."""
    if sys.platform == "darwin":
        return {feature for name, feature in DARWIN_FEATURES.items() if sysctl(name) == 1}
    if sys.platform == "win32":
        return _windows_features()
    return set(_described("flags", "Features").split())  # x86, ARM


def processor_name() -> str:
    if sys.platform == "darwin":
        return sysctl_text("machdep.cpu.brand_string") or machine()
    return _described("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use: its affinity, or fewer if a cgroup limits it."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or no limit: "max"
        quota, period = CGROUP.read_text(encoding="ascii").split()[:2]
        count = min(count, max(1, int(quota) // int(period)))
    return count


def performance_cores() -> int | None:
    """Number of fast cores of this process; None if all are alike or the system does not say. A pool's barriers wait
    for its slowest member."""
    if sys.platform == "darwin":
        fast = sysctl("hw.perflevel0.logicalcpu")
        return fast if fast and (sysctl("hw.nperflevels") or 1) > 1 else None
    if sys.platform == "win32":
        return _windows_performance_cores()
    fast_cores = _linux_performance_cores()
    affinity = getattr(os, "sched_getaffinity", None)
    if fast_cores and affinity is not None:
        usable = fast_cores & set(affinity(0))
        return len(usable) if usable and usable != set(affinity(0)) else None
    return None


def default_threads() -> int:
    """Default threads of the kernels: the fast cores this process may use."""
    return min(usable_cores(), performance_cores() or usable_cores())


def _linux_performance_cores() -> set[int]:
    """The fast cores. Intel's hybrids have a device for each kind of core; ARM's kernels state a capacity for every
    core. Empty if no core is known to be faster."""
    with suppress(OSError, ValueError):
        (SYS / "cpu_atom" / "cpus").read_text(encoding="ascii")
        return core_numbers((SYS / "cpu_core" / "cpus").read_text(encoding="ascii"))
    capacity = dict[int, int]()
    for path in (SYS / "system" / "cpu").glob("cpu[0-9]*/cpu_capacity"):
        with suppress(OSError, ValueError):
            capacity[int(path.parent.name[3:])] = int(path.read_text(encoding="ascii"))
    largest = max(capacity.values(), default=0)
    # middle cores of phones' chips have most of the largest one's speed, small ones a third
    return {core for core, speed in capacity.items() if 2 * speed > largest}


def core_numbers(text: str) -> set[int]:
    """Core numbers in a list such as `0-3,8`."""
    cores = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _described(*keys: str) -> str:
    """A field of Linux's description of the processor; empty if missing."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(keys)), "")


def sysctl(name: str) -> int | None:
    """Number under this name in macOS's sysctl; None if missing."""
    value = ctypes.c_int64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None or call(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.value


def sysctl_text(name: str) -> str:
    """Text under this name in macOS's sysctl; empty if missing."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None or call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return ""
    return value.value.decode(errors="replace")


def _kernel32() -> object | None:
    """Windows's library of system calls."""
    return getattr(getattr(ctypes, "windll", None), "kernel32", None)


def _windows_features() -> set[str]:
    with suppress(OSError):  # no such file
        return features_of_bits(ctypes.CDLL(str(CPUID_LIBRARY)).outrider_cpu_features())
    present = getattr(_kernel32(), "IsProcessorFeaturePresent", None)
    if present is None:
        return set()
    return {feature for number, names in WINDOWS_FEATURES.items() if present(number) for feature in names}


def features_of_bits(bits: int) -> set[str]:
    """Names of the features in the number that cpuid.c returns."""
    return {name for number, name in enumerate(CPUID_FEATURES) if bits >> number & 1}


def _windows_performance_cores() -> int | None:
    """Logical processors of the highest efficiency class, which are the fast ones."""
    ask = getattr(_kernel32(), "GetSystemCpuSetInformation", None)
    if ask is None:
        return None
    needed = ctypes.c_ulong(0)
    ask(None, 0, ctypes.byref(needed), None, 0)
    buffer = ctypes.create_string_buffer(max(1, needed.value))
    if not ask(buffer, len(buffer), ctypes.byref(needed), None, 0):
        return None
    return fast_cpu_sets(buffer.raw[: needed.value])


def fast_cpu_sets(data: bytes) -> int | None:
    """Number of SYSTEM_CPU_SET_INFORMATION records with the highest efficiency class; None if all are equal."""
    classes = list[int]()
    at = 0
    while at + 20 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if size < 20:
            break
        classes.append(data[at + 18])  # EfficiencyClass
        at += size
    fast = classes.count(max(classes, default=0))
    return fast if 0 < fast < len(classes) else None
