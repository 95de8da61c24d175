"""Machine code that assembles and does not run: what ptxas does not check, read from its output."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)([^;]*);")


def text_of(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([NVDISASM, file.name], capture_output=True, text=True, check=True).stdout


def odd_policies(text: str) -> list[str]:
    """Asynchronous copies whose L2 policy is in half a pair of uniform registers: an illegal instruction. ptxas 12.9 and
    13.0 make it of a copy with a policy to a uniform address."""
    return re.findall(r"LDGSTS\S* .*desc\[UR\d*[13579]\].*", text)


def registers_after(text: str, change: str) -> tuple[int, int]:
    """How many registers the instructions after `USETMAXREG.change` use, and how many it leaves them. One too many is
    an illegal instruction."""
    labels: dict[str, int] = {}
    instructions: list[tuple[str | None, str, str]] = []  # condition, operation, operands
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.search(line):
            instructions.append((instruction[2], instruction[3], instruction[4]))
    start = next(i for i, (_, name, _) in enumerate(instructions) if name.startswith(f"USETMAXREG.{change}"))
    left = int(re.findall(r"0x[0-9a-f]+", instructions[start][2])[-1], 16)
    seen = set[int]()
    ahead = [start + 1]
    most = 0
    while ahead:
        at = ahead.pop()
        if at in seen:
            continue
        seen.add(at)
        condition, name, operands = instructions[at]
        most = max(most, *(int(r) for r in re.findall(r"\bR(\d+)\b", operands)), 0)
        if (to := re.search(r"\.L_x_\d+", operands)) and name.startswith("BRA"):
            ahead.append(labels[to[0]])
        if condition is not None or not name.startswith(("BRA", "EXIT")):
            ahead.append(at + 1)
    return most + 1, left
